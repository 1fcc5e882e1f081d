"""What a bucket keeps: its notes, the list of its blobs, and which of them may go.

Bytes stored again have the ETag they had, so no condition of S3 keeps a remover from what was stored since it looked. Instead it first
leaves a mark, looks then and removes; whoever marks the blob as young looks for that mark afterwards and waits until it is gone. One of
the two sees the other.
"""

import contextlib
import time
from collections.abc import Iterator

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners import s3_answers
from acclimate_runners.blobs import Stored, note_name
from acclimate_runners.bucket import Bucket
from acclimate_runners.s3_reading import Exchanged

KEPT_SECONDS = 1800.0
"""A blob stored or kept within so many seconds is not marked again: that would be a request for each time it is stored."""
_LARGEST_NOTE = 64 << 20
_REMOVAL_BEGINS, _REMOVAL_IS_OVER = 30.0, 120.0
"""Seconds since its mark: after the first a remover begins no removal, after the second it is taken for dead."""


def note(bucket: Bucket, name: str) -> bytes | None:
    """See blobs.Blobs.note.

    Raises:
        Refusal: blobs_unreachable.
    """
    key = bucket.prefix + note_name(name)
    try:
        return bucket.wait(bucket.begin(lambda: bucket.range(key, 0, _LARGEST_NOTE)), name)[0]
    except Refusal as refusal:
        if refusal.code != "blob_unknown":
            raise
        return None


def notes(bucket: Bucket, prefix: str) -> list[str]:
    """See blobs.Blobs.notes.

    Raises:
        Refusal: blobs_unreachable.
    """
    below = bucket.prefix + note_name(prefix.removesuffix("/")) + "/"
    listed = bucket.listed("list_objects_v2", "Contents", "ContinuationToken", Prefix=below)
    return sorted(found["Key"].removeprefix(bucket.prefix) for found, _ in listed)


def listing(bucket: Bucket) -> Iterator[Stored]:
    """See blobs.Blobs.listing.

    Raises:
        Refusal: blobs_unreachable.
    """
    for found, now in bucket.listed("list_objects_v2", "Contents", "ContinuationToken", Prefix=bucket.prefix):
        first, slash, rest = found["Key"].removeprefix(bucket.prefix).partition("/")
        digest = f"sha256:{first}{rest}"
        if slash and len(first) == 2 and digests.is_digest(digest):
            yield Stored(digest, int(found["Size"]), (now - found["LastModified"]).total_seconds())


def keep(bucket: Bucket, digest: str, size: int | None = None) -> bool:
    """Whether the blob is stored, of that size if one is given, and then marked as stored just now.

    Raises:
        Refusal: blobs_unreachable.
    """
    key = bucket.key(digest)
    try:
        answer = bucket.begin(lambda: bucket.call("head_object", Key=key)).result()
        if size is not None and answer["ContentLength"] != size:
            return False
        if (s3_answers.time_of(answer) - answer["LastModified"]).total_seconds() > KEPT_SECONDS:
            bucket.begin(lambda: bucket.copy(key, key, etag=answer["ETag"], MetadataDirective="REPLACE")).result()
        else:
            return True
    except Exception as error:
        code = s3_answers.code_of(error)
        if code == s3_answers.BARE:
            return _there(bucket, digest) and keep(bucket, digest, size)
        if code in s3_answers.THERE_ALREADY:
            return keep(bucket, digest, size)
        if code == s3_answers.NO_KEY:
            return False
        raise bucket.refusal(error) from error
    return not waited_for_removal(bucket, digest) or keep(bucket, digest, size)


def _there(bucket: Bucket, digest: str) -> bool:
    """Whether the blob is stored, by a kind of request that is also told why it isn't: the blob may be missing, or the whole bucket."""
    try:
        bucket.wait(bucket.begin(lambda: bucket.range(bucket.key(digest), 0, 1)), digest)
    except Refusal as refusal:
        if refusal.code != "blob_unknown":
            raise
        return False
    return True


def _mark(bucket: Bucket, digest: str) -> str:
    return f"{bucket.prefix}tmp/removing-{digest[7:]}"


def waited_for_removal(bucket: Bucket, digest: str) -> bool:
    """Whether somebody was removing the blob; returns once that is over.

    Raises:
        Refusal: blobs_unreachable.
    """
    waited = False
    while True:
        try:
            answer = bucket.begin(lambda: bucket.call("head_object", Key=_mark(bucket, digest))).result()
        except Exception as error:
            if s3_answers.code_of(error) not in s3_answers.MISSING:
                raise bucket.refusal(error) from error
            return waited
        if (s3_answers.time_of(answer) - answer["LastModified"]).total_seconds() > _REMOVAL_IS_OVER:
            return waited
        waited = True
        time.sleep(0.1)


@contextlib.contextmanager
def _marked(bucket: Bucket, digest: str) -> Iterator[bool]:
    """Whether the mark of this removal is there, and not another's; it is taken away afterwards."""
    body = {"Key": _mark(bucket, digest), "Body": b""}
    try:
        bucket.begin(lambda: bucket.call("put_object", **body, IfNoneMatch="*")).result()
    except Exception as error:
        code = s3_answers.code_of(error)
        if code in s3_answers.THERE_ALREADY:
            yield False
            return
        if code not in s3_answers.NOT_OFFERED:
            raise
        bucket.begin(lambda: bucket.call("put_object", **body)).result()
    try:
        yield True
    finally:
        # One that stays for want of an answer holds nobody for long, and `sweep` takes it away.
        with contextlib.suppress(Exception):
            bucket.begin(lambda: bucket.call("delete_object", Key=body["Key"])).result()


def remove(bucket: Bucket, digest: str, *, older_than: float) -> bool:
    """See blobs.Blobs.remove.

    Raises:
        Refusal: blobs_unreachable.
    """
    key = bucket.key(digest)
    try:
        began = time.monotonic()
        with _marked(bucket, digest) as ours:
            answer = bucket.begin(lambda: bucket.call("head_object", Key=key)).result() if ours else None
            if answer is None or time.monotonic() - began > _REMOVAL_BEGINS:
                return False
            if (s3_answers.time_of(answer) - answer["LastModified"]).total_seconds() <= older_than:
                return False
            _delete(bucket, key, etag=answer["ETag"])
    except Exception as error:
        if s3_answers.code_of(error) in s3_answers.MISSING | s3_answers.THERE_ALREADY:
            return False
        raise bucket.refusal(error, doing="delete") from error
    return True


def delete(bucket: Bucket, key: str, *, etag: str) -> None:
    """Delete an object, if it still has the ETag; raises Exchanged where it hasn't."""
    # Not every server knows a condition on a deletion, and some pass over it: so it is also asked before.
    answer = bucket.begin(lambda: bucket.call("head_object", Key=key)).result()
    if answer.get("ETag") != etag:
        raise Exchanged
    _delete(bucket, key, etag=etag)


def _delete(bucket: Bucket, key: str, *, etag: str) -> None:
    try:
        bucket.begin(lambda: bucket.call("delete_object", Key=key, IfMatch=etag)).result()
    except Exception as error:
        if s3_answers.code_of(error) not in s3_answers.NOT_OFFERED:
            raise
        bucket.begin(lambda: bucket.call("delete_object", Key=key)).result()
