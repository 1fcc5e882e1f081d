"""The keys of a log that somebody keeps: the one of now, and those that were given up, each with where that was.

A key is given up because it was stolen, or may be. Whoever stole it can make a log under it, of any length, in which no hand-over is. So a key that was
given up speaks for what the log was before the hand-over, where the newer key leads there, and for nothing by itself.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

from acclimate import log
from acclimate.hand_overs import Chain
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal


@dataclass(frozen=True)
class GivenUp:
    """A key that handed its log over.

    Attributes:
        vkey: the key.
        index: the hand-over's log index; None where it is not known.
        root: of the index + 1 entries up to it; None likewise.
    """

    vkey: str
    index: int | None = None
    root: bytes | None = None

    def text(self) -> str:
        """As a line of a file."""
        if self.index is None or self.root is None:
            return self.vkey
        return f"{self.vkey} {self.index} {base64.b64encode(self.root).decode()}"

    @classmethod
    def parse(cls, line: str) -> "GivenUp":
        """The key of a line.

        Raises:
            Refusal: file_unreadable.
        """
        try:
            vkey, *rest = line.split()
            if not rest:
                return cls(vkey)
            index, root = rest
            if str(int(index)) != index:
                raise ValueError(index)
            return cls(vkey, int(index), base64.b64decode(root, validate=True))
        except (ValueError, binascii.Error) as error:
            raise Refusal("file_unreadable", f"{line!r} is no key that was given up, with where that was") from error


@dataclass(frozen=True)
class LogKeys:
    """The keys of one log.

    Attributes:
        newest: the key of now.
        older: those that were given up, the oldest first.
    """

    newest: str
    older: tuple[GivenUp, ...] = ()

    @property
    def texts(self) -> list[str]:
        """All keys, the oldest first."""
        return [*(given_up.vkey for given_up in self.older), self.newest]

    @property
    def origin(self) -> str:
        """The log's name."""
        return self.newest.partition("+")[0]

    def doubt(self, chain: Chain, size: int, entries: Sequence[bytes] = ()) -> str:
        """What a checkpoint leaves open because its key was given up, in words; empty where it leaves nothing open.

        Args:
            chain: the keys that are said to have signed the log.
            size: how many entries the checkpoint is of.
            entries: the log's first ones, which the checkpoint is of or which go on from there; none where they are not at hand.

        Raises:
            Refusal: rotation_invalid, where a log goes on under the key, or otherwise, after it was given up.
        """
        signer = chain.at(size).text()
        given_up = next((one for one in self.older if one.vkey == signer), None)
        if given_up is None:
            return ""
        if given_up.index is not None and given_up.root is not None and max(size, len(entries)) > given_up.index:
            if size > given_up.index:
                raise _goes_on(signer, given_up.index, f"a log of {size} entries goes on under it")
            if digests.root_of_hashes([digests.leaf_hash(e) for e in entries[: given_up.index + 1]]) == given_up.root:
                return ""
            raise _goes_on(signer, given_up.index, "these entries up to there are others")
        where = f" at log entry {given_up.index}" if given_up.index is not None else ""
        return f"signed by {signer}, a key that was given up{where}: a thief of it could have made this"

    def require_now(self, chain: Chain, size: int) -> None:
        """Refuse a log that is shown as one of now, and is not signed by the newest key, or by one that came after it.

        Raises:
            Refusal: rotation_invalid.
        """
        if log.parse_vkey(self.newest) in chain.keys:
            return
        if doubt := self.doubt(chain, size):
            raise Refusal("rotation_invalid", f"the log of {size} entries is {doubt}", hint=_OTHERS)


_OTHERS = (
    "keep what you were shown, and ask the operator and the others: whoever has the old key can make a log of its own"
)


def _goes_on(signer: str, index: int, why: str) -> Refusal:
    return Refusal(
        "rotation_invalid", f"the key {signer} was given up at log entry {index}, and {why}: it is forged", hint=_OTHERS
    )
