"""Reading a bundle: a folder, or the same in a ZIP. Nothing in it is trusted before its own check.

A ZIP is copied out into a temporary folder, because the ciphertext is read by block. What the copy refuses: names that are
absolute, climb with `..` or hold other than plain characters, doubled names, links, encrypted members, and more bytes
than SLACK + GROWTH × the ZIP's size, counted by what the ZIP declares and by what really comes out. What zips.py refuses: a second
content, for readers that go by another of a ZIP's two tables of contents, and bytes that nobody reads.
"""

import os
import re
import shutil
import stat
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from acclimate.verify import zips
from acclimate.verify.report import Failed, lacking
from acclimate_competitions import digests
from acclimate_competitions.digests import Json
from acclimate_competitions.errors import Refusal

SLACK = 1 << 30
GROWTH = 100
MOST_FILES = 1_000_000
_FEW, _SHORTEST = 1000, 32
"""Lines of a file that may be of any length, and the bytes that a line has on average where there are more."""
PREFIX = "acclimate-verify-"
_YOUNG = 60.0
"""Seconds within which a temporary folder that nobody holds is left alone: it may have been made just now."""
_CHUNK = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*){0,7}")
_ALONE = frozenset(
    "MANIFEST definition.toml keys.json checkpoint entries.jsonl submissions.jsonl holdout.sealed shares.json prepared.json"
    " ranking.json rows.jsonl".split()
)
_FOLDERS = frozenset("public checkpoints receipts holdout predictions scores versions".split())
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


class Bundle:
    """The files of a bundle by name, read only.

    Attributes:
        names: of all files, relative, with `/`, sorted bytewise.
        odd: what stands in the folder and is no plain file with a plain name.
        empty: folders without anything in them, sorted.
        source: the folder or ZIP that it was opened from.
        damaged: name -> why, of files that did not come out of their ZIP whole; whoever reads one is told.
    """

    def __init__(self, root: Path, *, source: Path | None = None, damaged: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.source = source or root
        self.damaged = dict(damaged or {})
        found = list(_walk(root, root))
        self.names = tuple(sorted(name for name, plain in found if plain))
        self.odd = tuple(sorted(name for name, plain in found if not plain))
        self.empty = tuple(sorted(_empty(root, root)))
        self._known = frozenset(self.names)
        self._digests: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def under(self, folder: str) -> list[str]:
        """Names of the files below a folder, given without its final `/`."""
        return [name for name in self.names if name.startswith(folder + "/")]

    def path(self, name: str) -> Path:
        """Where a file lies.

        Raises:
            Failed: it is missing, or damaged.
        """
        if name in self.damaged:
            raise Failed(name, self.damaged[name])
        if name not in self._known:
            raise Failed(name, "the file is missing")
        return self.root / name

    def read(self, name: str) -> bytes:
        """A file's bytes."""
        return self.path(name).read_bytes()

    def text(self, name: str) -> str:
        """A file's text (UTF-8)."""
        try:
            return self.read(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise Failed(f"{name}, byte {error.start}", "it is not UTF-8") from error

    def json(self, name: str) -> Json:
        """The value of a JSON file in canonical form (RFC 8785)."""
        return parse(self.read(name), name)

    def lines(self, name: str) -> list[bytes]:
        """The lines of a file without their newlines; the last must have one too."""
        data = self.read(name)
        if data and not data.endswith(b"\n"):
            raise Failed(f"{name}, byte {len(data)}", "the last line has no newline: the file is cut off")
        count = data.count(b"\n")
        if count > _FEW and len(data) < count * _SHORTEST:
            # A ZIP of a megabyte may unpack to a billion of them, each an object in memory.
            raise Failed(name, f"it has {count} lines in {len(data)} bytes: too short for what a line of it says")
        return data.split(b"\n")[:-1]

    def digest(self, name: str) -> str:
        """Digest of a file's bytes; computed once."""
        if name not in self._digests:
            self._digests[name] = digests.of_file(self.path(name))
        return self._digests[name]


def parse(data: bytes, where: str) -> Json:
    """The value of canonical JSON; Failed names the place otherwise."""
    try:
        return digests.parse_canonical(data)
    except Refusal as refusal:
        raise Failed(where, refusal.sentence) from refusal


def manifest(bundle: Bundle) -> str:
    """Check 1: MANIFEST lists every other file, no other, with its digest, sorted.

    It shows that the bundle is whole, not that it is true: whoever changes a file can mend MANIFEST. The other checks are
    for that.
    """
    if bundle.odd:
        raise Failed(bundle.odd[0], "not a plain file with a plain name")
    listed: dict[str, str] = {}
    text, position = bundle.text("MANIFEST"), 0
    if not text.endswith("\n"):
        raise Failed(f"MANIFEST, byte {len(text.encode())}", "it is empty, or its last line has no newline")
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise Failed(
                f"MANIFEST, line {number}, byte {position}", "not 64 hex digits, two blanks, a name, a newline"
            )
        if listed and match[2] <= next(reversed(listed)):
            raise Failed(f"MANIFEST, line {number}", f"{match[2]!r} is doubled or out of order")
        listed[match[2]] = "sha256:" + match[1]
        position += len(line.encode()) + 1
    for name in sorted({*listed, *bundle.names} - {"MANIFEST"}):
        if name not in bundle:
            raise Failed(name, "MANIFEST lists it, the bundle has no such file")
        if name not in listed:
            raise Failed(name, "the bundle has this file, MANIFEST does not list it")
        if bundle.digest(name) != listed[name]:
            raise Failed(name, f"its digest is {bundle.digest(name)}, MANIFEST says {listed[name]}")
    if "MANIFEST" in listed:
        raise Failed("MANIFEST", "it lists itself")
    return f"{len(listed)} files"


def known(bundle: Bundle) -> str:
    """Each file has a name that a check reads; what else stands in a folder, the folder's own check tells."""
    for name in bundle.names:
        folder, slash, _ = name.partition("/")
        if folder not in (_FOLDERS if slash else _ALONE):
            raise Failed(name, "a bundle has no such file, and no check reads it")
    if bundle.empty:
        raise Failed(f"{bundle.empty[0]}/", "a bundle has no empty folder, and no check reads it")
    return f"{len(bundle.names)} files"


@contextmanager
def opened(path: Path, *, slack: int = SLACK) -> Iterator[Bundle]:
    """The bundle at a path: a folder, or a ZIP, copied into a temporary folder for as long as the context lasts.

    Of a ZIP of which some members are damaged the others are there: what is damaged fails where it is read.

    Args:
        path: where it is.
        slack: bytes that a ZIP may unpack to beside GROWTH times its own.

    Raises:
        Failed: there is neither, or the ZIP is damaged or refused.
        Refusal: no_space, file_unreadable, where this machine lacks what it takes.
    """
    try:
        if path.is_dir():
            yield Bundle(path)
            return
        if not path.exists():
            raise Failed(path.name, "there is no such file or folder")
        if not path.is_file():
            raise Failed(path.name, "it is no regular file, and no folder")
        bound = slack + GROWTH * path.stat().st_size
        with aside() as folder:
            damaged = _copy_out(path, folder, bound)
            yield Bundle(folder, source=path, damaged=damaged)
    except Refusal:
        raise
    except Exception as error:
        if (refusal := lacking(error)) is not None:
            raise refusal from error
        raise


@contextmanager
def aside(prefix: str = PREFIX) -> Iterator[Path]:
    """A temporary folder for as long as the context lasts; those of processes that were killed are removed before.

    Args:
        prefix: how its name begins.

    Raises:
        Refusal: no_space, where there is no room for one anywhere.
    """
    try:
        _sweep(Path(tempfile.gettempdir()), prefix)
        folder = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        sentence = f"there is no room for temporary files: {error.strerror or error}"
        raise Refusal("no_space", sentence, hint="free some space, or name a folder that has it: TMPDIR=DIR") from error
    with folder as name, _held(Path(name)):
        yield Path(name)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, which the kernel gives up with the process; False where another process has it, or it has none."""
    if os.name != "posix":
        yield False
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        held = False
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        yield held
    finally:
        os.close(descriptor)


def _sweep(where: Path, prefix: str) -> None:
    """Remove what killed processes of this user left: opened holdouts may be in it."""
    if os.name != "posix":
        return
    for left in where.glob(prefix + "*"):
        # Another process may remove it first, or have just made it and not yet hold it.
        with suppress(OSError):
            found = left.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if time.time() - found.st_mtime < _YOUNG:
                continue
            with _held(left) as dead:
                if dead:
                    shutil.rmtree(left, ignore_errors=True)


def _copy_out(path: Path, folder: Path, bound: int) -> dict[str, str]:
    """Copy a ZIP's members into a folder; of those that are damaged, name -> why."""
    damaged: dict[str, str] = {}
    try:
        # Opened once: what is looked at is what is read.
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            members = _accepted(archive, bound=bound, where=path.name)
            zips.require_one_content(stream, path.name)
            for name, member in members.items():
                if member.filename.endswith("/"):
                    (folder / name).mkdir(parents=True, exist_ok=True)
                    continue
                try:
                    _copy_member(archive, member, folder / name)
                    zips.require_no_rest(stream, member)
                except (zipfile.BadZipFile, zlib.error, EOFError) as error:
                    damaged[name] = f"the ZIP's member is damaged: {error or 'it is cut off'}"
                    (folder / name).touch()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OSError) as error:
        raise Failed(path.name, f"the ZIP is damaged: {error}") from error
    return damaged


def _accepted(archive: zipfile.ZipFile, *, bound: int, where: str) -> dict[str, zipfile.ZipInfo]:
    """The members to copy by their name in the bundle: a single folder around all of them is taken off."""
    members = archive.infolist()
    if len(members) > MOST_FILES or sum(member.file_size for member in members) > bound:
        raise Failed(where, f"the ZIP would unpack to more than {MOST_FILES} files or {bound} bytes")
    # Not is_dir(): it takes a name for granted.
    names = [member.filename for member in members if not member.filename.endswith("/")]
    around = names[0].partition("/")[0] + "/" if names and "MANIFEST" not in names else ""
    if not all(name.startswith(around) for name in names):
        around = ""
    accepted: dict[str, zipfile.ZipInfo] = {}
    for member in members:
        folder = member.filename.endswith("/")
        name = member.filename.removeprefix(around).removesuffix("/")
        if folder and not name and around:
            continue
        kind = stat.S_IFMT(member.external_attr >> 16)
        if not _NAME.fullmatch(name) or name in accepted or kind not in (0, stat.S_IFDIR if folder else stat.S_IFREG):
            raise Failed(f"{where}, member {member.filename!r}", "not a plain file with a plain name of its own")
        accepted[name] = member
    return accepted


def _copy_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    left = member.file_size
    try:
        with archive.open(member) as source, to.open("xb") as sink:
            while chunk := source.read(_CHUNK):
                left -= len(chunk)
                if left < 0:
                    raise Failed(member.filename, "the ZIP holds more bytes of it than it declares")
                sink.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise
    except Exception as error:
        raise Failed(member.filename, f"the ZIP's member is damaged: {error}") from error


def _walk(folder: Path, root: Path) -> Iterator[tuple[str, bool]]:
    for item in folder.iterdir():
        name = item.relative_to(root).as_posix()
        if item.is_dir() and not item.is_symlink():
            yield from _walk(item, root)
        else:
            yield name, item.is_file() and not item.is_symlink() and _NAME.fullmatch(name) is not None


def _empty(folder: Path, root: Path) -> Iterator[str]:
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            if not any(item.iterdir()):
                yield item.relative_to(root).as_posix()
            yield from _empty(item, root)
