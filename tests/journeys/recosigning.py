"""The checkpoints of a made round's bundle, cosigned anew: by whom and when a test says."""

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from rounds_made import START, Made

from acclimate import log, notes
from acclimate_competitions import records

NAMES = ("w1.example.org", "w2.example.org", "w3.example.org")
CLOSES = START + timedelta(days=30)


def plain(note: str) -> str:
    """A checkpoint as its log alone signed it."""
    parsed = notes.parse_note(note)
    return notes.Note(parsed.text, parsed.signatures[:1]).encode()


def files(path: Path) -> list[Path]:
    """All files with a checkpoint in them."""
    return [path / "checkpoint", *(path / "checkpoints").iterdir(), *(path / "receipts").iterdir()]


def recosign(path: Path, change: Callable[[int, str], str]) -> None:
    """Put another checkpoint in the place of each in a bundle: change(size, the note as its log alone signed it)."""
    for file in files(path):
        text = file.read_text("utf-8")
        note = log.Receipt.parse(text).checkpoint if file.suffix else text
        size = log.parse_checkpoint(notes.parse_note(note).text).size
        file.write_text(text.removesuffix(note) + change(size, plain(note)), "utf-8")


def then(made: Made, size: int, at: datetime) -> datetime:
    """This time, or that of the last of so many entries: no witness sees an entry before it is there."""
    return max(at, records.parse(made.entries[size - 1]).at)
