"""The newest signed checkpoint outside the database: with the blobs, and in the data folder of who signs.

A database that was restored from an older backup looks like a whole one: its log ends, and its own checkpoint says so. Who went on
from there would sign other entries in the place of those for which people hold receipts. So the newest checkpoint is kept elsewhere,
too, and at the start the stored log must hold what it holds. Copies are written now and then; what was lost since the last one, the log's
witnesses know, who keep the newest checkpoint that they cosigned: they are asked as well. A checkpoint counts by the log's own signature, so
that no witness can say what was never signed; one that can't be asked says nothing.
"""

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from sqlalchemy import select

from acclimate import log, witness_client
from acclimate.config import Settings
from acclimate.console import say
from acclimate.store import Store, Tx, log_checkpoints
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs, FolderBlobs

COPY, HANDED_OVER = "CHECKPOINT", "CHECKPOINT-ROTATED"
"""Name of both copies, and of that with the newest hand-over of the log's key: the one by both keys, which the old one reads, too."""
EVERY_SECONDS = 30.0
LOST = (
    "it was restored from an older backup, or is not the newest one: put the newest in its place. If what is missing is lost "
    "for good, tell everybody which entries, then `acclimate db accept-loss` with the same settings and data folder"
)
"""What to do where entries are lost."""
_PAGE = 2000


class Copies:
    """Both copies of an installation's newest checkpoint, and what its witnesses showed.

    Args:
        blobs: the installation's.
        data: the data folder.
        verifier: of the log's key; what it did not sign is no copy.
        witnessed: a witness's name and address -> the newest checkpoint that it showed, a note. They must have been asked before the log that
            is compared was read: it grows meanwhile.
    """

    def __init__(
        self, blobs: Blobs, data: Path, verifier: log.Verifier, *, witnessed: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._places: dict[str, Blobs] = {"with the blobs": blobs, f"in {data}": FolderBlobs(data)}
        self._verifier, self._witnessed = verifier, witnessed
        self._kept = ""

    @classmethod
    def asking(cls, settings: Settings, blobs: Blobs, verifier: log.Verifier) -> "Copies":
        """The copies of an installation, with what its witnesses show now; a witness is waited for a few seconds at most.

        Raises:
            Refusal: config_invalid.
        """
        return cls(blobs, settings.data, verifier, witnessed=witness_client.shown(settings.witnesses, verifier.name))

    def check(self, tree: log.Tree) -> None:
        """Refuse a log that is not what was signed.

        Raises:
            Refusal: log_inconsistent, blobs_unreachable.
        """
        for where, _, signed in self._lost(tree):
            raise Refusal("log_inconsistent", lacking(where, signed, size=len(tree)), hint=LOST)

    def check_signed(self, tx: Tx) -> None:
        """The same for the log of a transaction.

        Raises:
            Refusal: log_inconsistent, blobs_unreachable.
        """
        self.check(_tree(tx))

    def lost(self, tx: Tx) -> list[tuple[str, log.Checkpoint]]:
        """Where a checkpoint is that the log of a transaction does not hold, and what it says; none where nothing is lost.

        Raises:
            Refusal: blobs_unreachable.
        """
        return [(where, signed) for where, _, signed in self._lost(_tree(tx))]

    def keep(self, note: str) -> None:
        """Write both copies, where the checkpoint is another than that written last; what fails is said, and tried the next time."""
        if note in ("", self._kept):
            return
        try:
            for place in self._places.values():
                place.put_note(COPY, note.encode())
        except (Refusal, OSError) as error:
            say("checkpoint not copied", level="warning", reason=str(error))
        else:
            self._kept = note

    def keep_hand_over(self, note: str) -> None:
        """Write the copy of the checkpoint that holds a hand-over of the log's key.

        Raises:
            Refusal: blobs_unreachable, no_space.
        """
        for place in self._places.values():
            place.put_note(HANDED_OVER, note.encode())

    def complete(self, tx: Tx) -> bool:
        """Write the copy of the newest hand-over's checkpoint where it is missing, as where it was killed before; whether it was.

        The log must have been compared with the copies before: a later hand-over's copy says what the log lacks.

        Raises:
            Refusal: blobs_unreachable, no_space.
        """
        found = tx.records("")
        if not found:
            return False
        query = select(log_checkpoints.c.note).where(log_checkpoints.c.size == found[-1][0] + 1)
        note = str(tx.execute(query).scalar_one())
        missing = any(place.note(HANDED_OVER) != note.encode() for place in self._places.values())
        if missing:
            self.keep_hand_over(note)
        return missing

    def accept(self, store: Store) -> list[str]:
        """Take the log as the database has it; each lost checkpoint stays with the blobs under a name of its own. What was done, a line each.

        Raises:
            Refusal: blobs_unreachable, no_space, busy.
        """
        done = []
        with store.snapshot() as tx:
            tree, size = _tree(tx), tx.size()
            newest = tx.execute(
                select(log_checkpoints.c.note).order_by(log_checkpoints.c.size.desc()).limit(1)
            ).scalar()
        for where, note, signed in list(self._lost(tree)):
            aside = _aside(signed)
            store.blobs.put_note(aside, note)
            done.append(
                f"{signed.size} entries were signed ({where}), {size} are here; that checkpoint is kept as {aside} with the blobs"
            )
        if done:
            for place in self._places.values():
                place.put_note(COPY, (newest or "").encode())
                if place.note(HANDED_OVER):
                    place.put_note(HANDED_OVER, (newest or "").encode())
        return done

    def _lost(self, tree: log.Tree) -> Iterator[tuple[str, bytes, log.Checkpoint]]:
        """The checkpoints that the log does not hold."""
        for where, place, name in ((*item, name) for item in self._places.items() for name in (COPY, HANDED_OVER)):
            note = place.note(name)
            if (signed := self._beyond(note, tree)) is not None:
                yield f"{name} {where}", note or b"", signed
        for witness, text in self._witnessed.items():
            signed = self._beyond(text.encode(), tree)
            # A witness never forgets; that it was accepted is kept with the blobs.
            if signed is not None and not any(place.note(_aside(signed)) for place in self._places.values()):
                yield f"cosigned by witness {witness}", text.encode(), signed

    def _beyond(self, note: bytes | None, tree: log.Tree) -> log.Checkpoint | None:
        """What a note says that the log's key signed and the log does not hold; else None."""
        try:
            signed = log.open_checkpoint(note, self._verifier).checkpoint if note else None
        except Refusal:
            # Of another installation that had this folder before: nothing is known of this one's.
            return None
        return signed if signed and (signed.size > len(tree) or tree.root(signed.size) != signed.root) else None


def lacking(where: str, signed: log.Checkpoint, *, size: int) -> str:
    """A checkpoint that the log does not hold, in words.

    Args:
        where: as `lost` says it.
        signed: the checkpoint.
        size: how many entries the log has.
    """
    root = base64.b64encode(signed.root).decode()
    same = "" if signed.size > size else ", and not the same"
    return f"{signed.size} entries were signed (root {root}; {where}), the database has {size}{same}"


def _aside(signed: log.Checkpoint) -> str:
    return f"{COPY}-LOST-{signed.size}-{signed.root.hex()[:8]}"


def _tree(tx: Tx) -> log.Tree:
    tree, size = log.Tree(), tx.size()
    for start in range(0, size, _PAGE):
        for entry in tx.entries(start, min(start + _PAGE, size)):
            tree.append(log.leaf_hash(entry))
    return tree
