"""What a bucket keeps: its notes, the list of its blobs, and which of them may go."""

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
    except Exception as error:
        code = s3_answers.code_of(error)
        if code == s3_answers.BARE:
            return _there(bucket, digest) and keep(bucket, digest, size)
        if code in s3_answers.THERE_ALREADY:
            return keep(bucket, digest, size)
        if code == s3_answers.NO_KEY:
            return False
        raise bucket.refusal(error) from error
    return True


def _there(bucket: Bucket, digest: str) -> bool:
    """Whether the blob is stored, by a kind of request that is also told why it isn't: the blob may be missing, or the whole bucket."""
    try:
        bucket.wait(bucket.begin(lambda: bucket.range(bucket.key(digest), 0, 1)), digest)
    except Refusal as refusal:
        if refusal.code != "blob_unknown":
            raise
        return False
    return True


def remove(bucket: Bucket, digest: str, *, older_than: float) -> bool:
    """See blobs.Blobs.remove.

    Raises:
        Refusal: blobs_unreachable.
    """
    key = bucket.key(digest)
    try:
        answer = bucket.begin(lambda: bucket.call("head_object", Key=key)).result()
        if (s3_answers.time_of(answer) - answer["LastModified"]).total_seconds() <= older_than:
            return False
        delete(bucket, key, etag=answer["ETag"])
    except Exchanged:
        return False
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
    try:
        bucket.begin(lambda: bucket.call("delete_object", Key=key, IfMatch=etag)).result()
    except Exception as error:
        if s3_answers.code_of(error) not in s3_answers.NOT_OFFERED:
            raise
        bucket.begin(lambda: bucket.call("delete_object", Key=key)).result()
