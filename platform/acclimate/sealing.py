"""The seal: the holdout in one ciphertext, committed to as a whole, by blocks and by rows, its key in the custodians' shares only.

    secret    32 random bytes; exist while sealing, and again once k custodians have released
    seal id   "sha256:" and the hex of 32 random bytes, chosen first
    key       HKDF-SHA256(secret, no salt, info = "acclimate/seal-key/v1" ‖ 0x00 ‖ seal id), 32 bytes
    context   "acclimate/seal/v1" ‖ 0x00 ‖ round id ‖ 0x00 ‖ seal id
    plaintext the archive of archive.py, with row_key as its first member
    ciphertext C2SP chunked-encryption v1 (Cobblestone-256: 56 bytes header, then chunks of 16 KiB + 16 bytes, the last one shorter)
    block_root RFC 6962 root over the ciphertext in blocks of 1 MiB
    row_root  see rows.py

The ciphertext commits to its key, so no second key opens it to something else. Python can't wipe memory: the secret is gone from the
result of `seal` and unreachable once it returns, but the process that sealed should end.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cryptography.cobblestone import Cobblestone256Decryptor, Cobblestone256Encryptor
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from acclimate import archive, custody, rows
from acclimate.blocks import BLOCK, Aside, Digests, Measured, Ring, Tally, measure
from acclimate.files import is_full, sync_folder
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

FORMAT = "acclimate/seal/v1"
SECRET_BYTES = custody.SECRET_BYTES
_HEADER = 56
_PLAIN, _TAG = 16 << 10, 16
_CHUNK = _PLAIN + _TAG
_SETTLE = 64 << 20
"""Bytes after which the disk is asked to keep what was written."""


@dataclass(frozen=True)
class Recipient:
    """A custodian who gets a share: a name, an age recipient, and a backup recipient or None."""

    name: str
    age: str
    backup: str | None = None


@dataclass(frozen=True)
class Sealed:
    """What sealing leaves besides the ciphertext; neither the secret nor a share in clear.

    Attributes:
        fields: of the HoldoutSealed record.
        envelopes: [{index, to, main, backup}], one a custodian.
    """

    fields: dict[str, Any]
    envelopes: list[dict[str, Any]]


@dataclass(frozen=True)
class Opened:
    """What an opening found, all of it checked.

    Attributes:
        key: digest of the secret.
        plaintext: digest of the archive.
        row_root: root over the rows, equal to the seal's.
        files: name -> digest of each file that now stands in the folder.
        row_key: what salts the rows.
    """

    key: str
    plaintext: str
    row_root: str
    files: dict[str, str]
    row_key: bytes = field(repr=False)

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the HoldoutOpened record."""
        return {"key": self.key, "plaintext": self.plaintext, "row_root": self.row_root}


def seal(
    files: Mapping[str, Path],
    out: Path,
    *,
    round_id: str,
    recipients: Sequence[Recipient],
    k: int,
    rehearsal: bool = False,
    random: Callable[[int], bytes] = secrets.token_bytes,
) -> Sealed:
    """Seal a holdout into the file `out`, which is either whole afterwards or not there.

    1. The rows are committed to under a new row_key; an unusable holdout is refused before there is a secret.
    2. The seal's id is chosen, then the secret, which is split at once; the shares leave only as age files to the custodians.
    3. Archive bytes are encrypted as they are read; the ciphertext's digest and blocks, and the blobs' digests, are hashed on the way.
    4. Blobs that are not those which the rows name, and files that changed since step 1, are refused; then the ciphertext gets its name.

    Args:
        files: name in the archive -> file: Parquet, and blobs that its rows name.
        out: where the ciphertext goes; an older file of this name is replaced.
        round_id: the round that the seal is for; the ciphertext opens under no other.
        recipients: the custodians, in the round's order; share i + 1 goes to recipients[i].
        k: how many shares open the seal.
        rehearsal: whether it is a dummy, whose shares custodians send back in clear before the round opens; they say so.
        random: gives that many uniform bytes.

    Raises:
        Refusal: splits_invalid, definition_invalid, key_refused, file_unreadable, no_space.
    """
    # 1
    before = _stamps(files)
    _need_space(out, _HEADER + _encrypted(archive.size_of({name: stamp[1] for name, stamp in before.items()})))
    row_key = random(32)
    committed = rows.commit_tables(files, row_key)
    # 2
    seal_id = "sha256:" + random(32).hex()
    encryptor, shares, envelopes = _deal(
        seal_id, round_id=round_id, recipients=recipients, k=k, rehearsal=rehearsal, random=random
    )
    # 3
    with _draft_of(out) as draft:
        with draft.open("xb") as stream, Digests() as blobs:
            measured = _encrypt(files, row_key, encryptor, stream=stream, blobs=blobs)
            found = blobs.result()
        # 4
        for name, expected in committed.blobs.items():
            rows.check_blob(name, expected, found[name])
        if _stamps(files) != before:
            raise Refusal("file_unreadable", "a file of the holdout changed while it was sealed", hint="seal again")
        draft.replace(out)
        sync_folder(out.parent)
    fields = {
        "seal": seal_id,
        "format": FORMAT,
        "size": measured.size,
        "ciphertext": measured.digest,
        "block_root": measured.block_root,
        "rows": committed.count,
        "row_root": committed.root,
        "shares": shares,
    }
    return Sealed(fields, envelopes)


def _encrypt(
    files: Mapping[str, Path],
    row_key: bytes,
    encryptor: Cobblestone256Encryptor,
    *,
    stream: IO[bytes],
    blobs: Digests,
) -> Measured:
    """Write the encrypted archive, all of it on the disk in the end; the caller takes the blobs' digests from `blobs`."""
    plain, cipher = Ring(archive.CHUNK), Ring(_HEADER + _encrypted(archive.CHUNK) + _CHUNK)

    def told(piece: memoryview) -> None:
        blobs.feed(piece)
        plain.turn()

    def watch(name: str) -> Callable[[memoryview], None] | None:
        if name.endswith(rows.SUFFIX):
            return None
        blobs.begin(name)
        return told

    unsettled = 0
    # The disk works while the rest is computed, not only at the end; a piece handed to `settling` has no meaning.
    with Tally() as tally, Aside(lambda _: os.fsync(stream.fileno()), waiting=1) as settling:
        for piece in archive.write(files, row_key, watch=watch, room=lambda: plain.current):
            count = encryptor.update_into(piece, cipher.current)
            encrypted = memoryview(cipher.current)[:count]
            tally.feed(encrypted)
            stream.write(encrypted)
            cipher.turn()
            unsettled += count
            if unsettled >= _SETTLE:
                settling.put(b"")
                unsettled = 0
        last = encryptor.finalize()
        tally.feed(last)
        stream.write(last)
        settling.finish()
        stream.flush()
        os.fsync(stream.fileno())
        return tally.result()


def _deal(
    seal_id: str,
    *,
    round_id: str,
    recipients: Sequence[Recipient],
    k: int,
    rehearsal: bool,
    random: Callable[[int], bytes],
) -> tuple[Cobblestone256Encryptor, list[dict[str, Any]], list[dict[str, Any]]]:
    """The encryptor under a new secret, HoldoutSealed's shares, and the envelopes; the secret's only place is this call."""
    n = len(recipients)
    secret = random(SECRET_BYTES)
    encryptor = Cobblestone256Encryptor(cipher_key(secret, seal_id), _context(round_id, seal_id))
    shares, envelopes = [], []
    for index, (share, to) in enumerate(
        zip(custody.split(secret, k=k, n=n, random=random), recipients, strict=True), start=1
    ):
        document = custody.Share(round_id, seal_id, index, k, n, share, rehearsal).encode()
        envelope = custody.envelope(document, index=index, to=to.name, main=to.age, backup=to.backup)
        envelopes.append(envelope)
        shares.append(
            {
                "index": index,
                "to": to.name,
                "commitment": custody.document_digest(document),
                "envelope": custody.envelope_digest(envelope),
            }
        )
    return encryptor, shares, envelopes


def open_(ciphertext: Path, secret: bytes, out: Path, *, round_id: str, fields: Mapping[str, Any]) -> Opened:
    """Open a seal into the folder `out`, which is either whole and checked afterwards or not there.

    1. The ciphertext has the size, digest and block root of the record; else the first part that fails is named.
    2. It decrypts to the last chunk under the secret, this round and this seal; the archive is written to a draft folder,
       name by name as archive.py allows.
    3. The rows have the count and the root of the record.
    4. Only then the draft gets the folder's name. A folder that already holds the same files is left as it is.

    The caller has checked that the shares match their commitments (custody.consistent), and compares round and record
    with the log.

    Args:
        ciphertext: the file.
        secret: what custody.recover gave.
        out: the folder to make.
        round_id: the round's id.
        fields: of the HoldoutSealed record.

    Raises:
        Refusal: seal_mismatch; conflict, where the folder holds something else; file_unreadable, no_space.
    """
    if fields["format"] != FORMAT:
        raise Refusal("seal_mismatch", f"the seal has format {fields['format']!r}, this version knows {FORMAT!r}")
    key, context = cipher_key(secret, fields["seal"]), _context(round_id, fields["seal"])
    # 1
    check_ciphertext(ciphertext, fields, locate=lambda: _first_bad_chunk(ciphertext, key, context))
    # 2
    with _draft_of(out) as draft:
        draft.mkdir(mode=0o700)
        state = hashlib.sha256()
        row_key, names = archive.extract(_decrypt(ciphertext, key, context, state=state), draft)
        files = {name: draft / name for name in names}
        # 3
        try:
            committed = rows.commit(files, row_key)
        except Refusal as refusal:
            raise Refusal("seal_mismatch", f"what was sealed is no holdout: {refusal.sentence}") from refusal
        if (committed.count, committed.root) != (fields["rows"], fields["row_root"]):
            counts = ", ".join(f"{name} {count}" for name, count in committed.counts.items())
            raise Refusal(
                "seal_mismatch",
                f"the opened holdout has {committed.count} rows with root {committed.root}; sealed were {fields['rows']}"
                f" rows with root {fields['row_root']} (rows found: {counts})",
                hint="the organizer sealed other rows than those committed to; the round can't be trusted",
            )
        found = {
            name: committed.blobs[name][0] if name in committed.blobs else digests.of_file(path)
            for name, path in files.items()
        }
        # 4
        _put_folder(draft, out, found)
    return Opened(digests.of_bytes(secret), "sha256:" + state.hexdigest(), committed.root, found, row_key)


def check_ciphertext(
    ciphertext: Path, fields: Mapping[str, Any], *, locate: Callable[[], str] = lambda: ""
) -> Measured:
    """Compare a ciphertext with its record: size, digest, block root. The server does so at sealing, the auditor any time.

    Args:
        ciphertext: the file.
        fields: of the HoldoutSealed record.
        locate: asked on a mismatch for words that name the place.

    Raises:
        Refusal: seal_mismatch, file_unreadable.
    """
    found = measure(ciphertext)
    for what, value, committed in (
        ("size", found.size, fields["size"]),
        ("digest", found.digest, fields["ciphertext"]),
        ("block root", found.block_root, fields["block_root"]),
    ):
        if value != committed:
            place = locate()
            raise Refusal(
                "seal_mismatch",
                f"the sealed holdout has {what} {value}, the seal's record says {committed}" + (place and f"; {place}"),
                hint="fetch the ciphertext again; if it stays so, it was changed after sealing",
            )
    return found


def row_key(ciphertext: Path, secret: bytes, *, round_id: str, fields: Mapping[str, Any]) -> bytes:
    """What salts the rows of a seal, read from the beginning of its ciphertext alone; arguments as open_.

    Raises:
        Refusal: seal_mismatch, where the secret does not decrypt it.
    """
    key, context = cipher_key(secret, fields["seal"]), _context(round_id, fields["seal"])
    return archive.row_key(_decrypt(ciphertext, key, context, state=hashlib.sha256()))


def is_size(size: int) -> bool:
    """Whether a ciphertext of this format can have so many bytes: archives have whole blocks of 512."""
    chunks, last = divmod(size - _HEADER, _CHUNK)
    return chunks >= 0 and last >= _TAG and (last - _TAG) % archive.BLOCK == 0 and size > _HEADER + 4 * archive.BLOCK


def block_root(path: Path) -> str:
    """RFC 6962 root over a file in blocks of 1 MiB, as a digest."""
    return measure(path).block_root


def row_root(files: Mapping[str, Path], row_key: bytes) -> str:
    """RFC 6962 root over the salted rows of a holdout's files, as a digest (rows.py).

    Raises:
        Refusal: splits_invalid.
    """
    return rows.commit(files, row_key).root


def rehearsal_files(folder: Path, random: Callable[[int], bytes] = secrets.token_bytes) -> dict[str, Path]:
    """A dummy holdout for the rehearsal: one small Parquet file of random rows, in an existing folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {name: [f"rehearsal {random(8).hex()}" for _ in range(16)] for name in ("example", "input", "target")}
    )
    path = folder / "rehearsal.parquet"
    pq.write_table(table, path)
    return {path.name: path}


# ---- cipher --------------------------------------------------------------------------------------------------------


def cipher_key(secret: bytes, seal_id: str) -> bytes:
    """The key that a seal's content is encrypted with."""
    info = b"acclimate/seal-key/v1\x00" + seal_id.encode()
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def _context(round_id: str, seal_id: str) -> bytes:
    if "\x00" in round_id:
        raise Refusal("record_invalid", f"round id {round_id!r} holds a NUL")
    return b"acclimate/seal/v1\x00" + round_id.encode() + b"\x00" + seal_id.encode()


def _decrypt(path: Path, key: bytes, context: bytes, *, state: "hashlib._Hash") -> Iterator[bytes]:
    """The plaintext in pieces, each authenticated; the last `next` fails where the ciphertext was cut off."""
    decryptor, done = Cobblestone256Decryptor(key, context), 0
    try:
        with path.open("rb") as stream:
            while piece := stream.read(BLOCK):
                plain = decryptor.update(piece)
                done += len(piece)
                state.update(plain)
                yield plain
        plain = decryptor.finalize()
    except InvalidTag as error:
        raise Refusal(
            "seal_mismatch",
            f"the recovered key does not decrypt the sealed holdout: {_first_bad_chunk(path, key, context)}",
            hint="shares of another seal or round, or a seal that its organizer made wrongly",
        ) from error
    state.update(plain)
    yield plain


def _first_bad_chunk(path: Path, key: bytes, context: bytes) -> str:
    """Words for the first part of a ciphertext that does not authenticate."""
    decryptor, offset, size = Cobblestone256Decryptor(key, context), 0, path.stat().st_size
    with path.open("rb") as stream:
        try:
            while piece := stream.read(_CHUNK if offset else _HEADER):
                decryptor.update(piece)
                offset += len(piece)
            decryptor.finalize()
        except InvalidTag:
            if offset < _HEADER + _CHUNK and size >= _HEADER:
                return f"bytes 0 to {min(size, _HEADER + _CHUNK) - 1} (block 0) do not authenticate: key, header or first chunk"
            last = min(offset, size) - 1
            return f"the first part that does not authenticate is bytes {offset} to {last} (block {offset // BLOCK})"
    return "all of it authenticates: it is another ciphertext under the same key"


# ---- files ---------------------------------------------------------------------------------------------------------


def _encrypted(size: int) -> int:
    """Bytes that the cipher makes of so many, besides its header."""
    return size + _TAG * (size // _PLAIN + 1)


def _need_space(path: Path, needed: int) -> None:
    """Refuse at once what would fill the disk after hours.

    Raises:
        Refusal: no_space; file_unreadable, where there is no such folder.
    """
    with _disk(path):
        free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise Refusal(
            "no_space",
            f"no space for {path}: it takes {needed} bytes, {free} are free; nothing was begun",
            hint="free some space and repeat",
        )


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turns what the operating system says into refusals."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise Refusal(
                "no_space", f"no space for {path}; what was begun is removed", hint="free some space and repeat"
            ) from error
        raise Refusal("file_unreadable", f"{error.filename or path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _draft_of(path: Path) -> Iterator[Path]:
    """A name beside `path` for a file or folder in the making; what still has this name at the end is removed."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.draft")
    try:
        with _disk(path):
            yield draft
    finally:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)


def _put_folder(draft: Path, out: Path, found: Mapping[str, str]) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        draft.rename(out)
        return
    standing = {p.relative_to(out).as_posix(): digests.of_file(p) for p in out.rglob("*") if p.is_file()}
    if standing != found:
        raise Refusal("conflict", f"{out} exists already and holds something else", hint="name another folder")


def _stamps(files: Mapping[str, Path]) -> dict[str, tuple[int, int, int]]:
    result = {}
    for name, path in files.items():
        with _disk(path):
            status = path.stat()
        result[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return result
