"""What a server says of itself, and what an organizer holds it to before it signs a round: log, witnesses, quorum, evaluators.

A server that was stolen before the round could name no witnesses, or its own, and a log of its own: RoundDefined fixes them for good, and custodians
and auditors believe it. So the log is the one whose key the folder keeps since it registered, and the witnesses are those that the organizer names,
or those of its last round, which `server.json` of the key folder keeps, or, before its first one, none. All of it is told before anything is signed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate import files
from acclimate.client.connection import Client
from acclimate.client.folder import keep_log_key, log_key
from acclimate.keys import Keys
from acclimate.quorum import parse_witness
from acclimate.service import names
from acclimate_competitions import vkeys
from acclimate_competitions.errors import Refusal

SERVER_FILE = "server.json"
_KEPT = ("evaluators", "witnesses", "quorum")


@dataclass(frozen=True)
class Witnesses:
    """Witnesses, and how many of them must have cosigned what is relied on.

    Attributes:
        keys: their vkeys, in any order.
        quorum: how many; 0 where none are asked for.
    """

    keys: tuple[str, ...]
    quorum: int

    def told(self) -> str:
        """All of it, in words."""
        if not self.keys:
            return "no witnesses"
        return f"a quorum of {self.quorum} of the witnesses {', '.join(sorted(self.keys))}"

    def same(self, other: "Witnesses") -> bool:
        """Whether another asks for the same."""
        return (sorted(self.keys), self.quorum) == (sorted(other.keys), other.quorum)


NOBODY = Witnesses((), 0)


def agreed(
    client: Client,
    keys: Keys,
    server: Mapping[str, Any],
    *,
    asked: Witnesses | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """RoundDefined's log, witnesses, quorum and evaluators.

    1. The log is the one whose key the folder keeps.
    2. The server's witnesses and quorum are those asked for; else those of the folder's last round; else, before its first one, none.
    3. All is told; evaluators that are others than in the last round are.

    Args:
        client: a connection for the organizer's account.
        keys: the organizer's keys.
        server: what the server says of itself.
        asked: the witnesses that the organizer wants.
        say: told what is about to be signed.

    Raises:
        Refusal: log_inconsistent; guard_failed, where the witnesses are others; key_refused, where one of them is no witness's key.
    """
    # 1
    log = log_key(client, keys.folder)
    # 2
    found = Witnesses(tuple(server["witnesses"]), server["quorum"])
    for text in found.keys:
        # Two that look alike are not to be told apart by whoever compares them with what the operator said.
        names.check(parse_witness(text).name, what="the name of a witness", longest=vkeys.LONGEST_NAME)
    before = _kept(keys.folder)
    wanted, source = asked, "asked for is"
    if wanted is None and before is not None:
        wanted, source = (
            Witnesses(tuple(before["witnesses"]), before["quorum"]),
            f"by {SERVER_FILE} your last round had",
        )
    if wanted is None:
        # Its first round: that the server names them is no reason to sign for them.
        wanted, source = NOBODY, "you have named none, and had no round before: asked for is"
    if not wanted.same(found):
        raise Refusal(
            "guard_failed",
            f"{client.url} names {found.told()}; {source} {wanted.told()}",
            hint="nothing was signed; if the operator told you so, and not only the server, say it: "
            "--witness KEY for each, and --quorum N",
        )
    # 3
    evaluators: Sequence[str] = server["evaluators"]
    said = {"log": [log], "evaluators": evaluators, "witnesses": _described(found)}
    for name, lines in said.items():
        say(f"{name + ':':<12}{', '.join(lines)}")
    if asked is None and before is None:
        say(
            "note: log and witnesses bind the round for good, and the server named these: compare them with what the operator told you"
        )
    if before is not None and sorted(before["evaluators"]) != sorted(evaluators):
        say(f"note: in your last round the evaluators were {', '.join(before['evaluators'])}: ask the operator why")
    return {"log": log, "evaluators": list(evaluators), "witnesses": list(found.keys), "quorum": found.quorum}


def keep(folder: Path, defined: Mapping[str, Any]) -> None:
    """Keep what a RoundDefined says of its server, for the next one."""
    keep_log_key(folder, defined["log"])
    files.write_json(folder / SERVER_FILE, {name: defined[name] for name in _KEPT})


def _described(witnesses: Witnesses) -> list[str]:
    if not witnesses.keys:
        return ["none: that everybody sees one log, and when, is the server's word"]
    if witnesses.quorum == 0:
        return [
            f"none are asked for: the server has {len(witnesses.keys)}, and quorum 0; the round keeps that for good"
        ]
    names = ", ".join(parse_witness(text).text() for text in witnesses.keys)
    return [f"{witnesses.quorum} of {names} must see the log before a share is released"]


def _kept(folder: Path) -> dict[str, Any] | None:
    path = folder / SERVER_FILE
    if not path.exists():
        return None
    found = files.read_json(path)
    sound = isinstance(found, dict) and set(found) == set(_KEPT) and isinstance(found["quorum"], int)
    if not sound or not all(isinstance(found[name], list) for name in ("evaluators", "witnesses")):
        raise Refusal(
            "file_unreadable", f"{path} does not hold a server's terms", hint="put it back, or delete it and compare"
        )
    return dict(found)
