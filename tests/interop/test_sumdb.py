"""Go's golang.org/x/mod/sumdb takes our checkpoints and proofs unchanged, refuses what we refuse, and makes the same ones.

The program is built from Debian's golang-golang-x-mod-dev, offline. Skipped where Go or that source isn't installed.
"""

import base64
import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rounds_made

from acclimate import log
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

HERE = Path(__file__).parent
DEBIAN = Path("/usr/share/gocode")
GO = shutil.which("go")

pytestmark = pytest.mark.skipif(
    GO is None or not (DEBIAN / "src/golang.org/x/mod/sumdb/tlog").is_dir(),
    reason="needs Go and golang.org/x/mod (Debian: golang-go, golang-golang-x-mod-dev)",
)


class Go:
    """The judge, running."""

    def __init__(self, program: Path) -> None:
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, what: str, **question: Any) -> dict[str, Any]:
        """Its answer; bytes go and come as base64."""
        assert self.process.stdin is not None and self.process.stdout is not None
        line = json.dumps({"ask": what, **{name: _plain(value) for name, value in question.items()}})
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        self.process.communicate(timeout=30)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Go]:
    folder = tmp_path_factory.mktemp("go")
    # Debian's sources lie in a GOPATH; nothing is fetched.
    environment = {"GO111MODULE": "off", "GOPATH": str(DEBIAN), "GOCACHE": str(folder / "cache"), "GOFLAGS": ""}
    command = [str(GO), "build", "-o", str(folder / "sumdb"), str(HERE / "sumdb" / "main.go")]
    subprocess.run(command, check=True, env={**os.environ, **environment}, cwd=folder, timeout=280)
    running = Go(folder / "sumdb")
    yield running
    running.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


def test_go_opens_every_checkpoint_of_a_round(go: Go, made: rounds_made.Made) -> None:
    for size, note in made.notes.items():
        answer = go.ask("note", note=note, vkey=made.signer.vkey)
        assert answer["ok"], answer["why"]
        assert answer["text"] == log.parse_note(note).text
        assert log.parse_checkpoint(answer["text"]).size == size


def test_go_and_we_refuse_the_same_changed_notes(go: Go, made: rounds_made.Made) -> None:
    note, draw, taken = made.notes[len(made.notes)], random.Random(1), 0
    other = log.Signer("other.example", rounds_made.key("other"))
    changed = [note.replace(made.signer.origin, "log.example.com"), note + "\n", note[:-1], note.replace("\n\n", "\n")]
    changed += [log.sign_note(log.parse_note(note).text, other), log.sign_note("x\n", other, made.signer), note + note]
    for _ in range(300):
        raw = bytearray(note.encode())
        raw[draw.randrange(len(raw))] = draw.choice(b"\n \x00a=\xe2+A")
        changed.append(raw.decode("utf-8", "replace"))
    for text in changed:
        answer = go.ask("note", note=text, vkey=made.signer.vkey)
        try:
            ours = log.open_note(text, [made.signer.verifier]).text
        except Refusal:
            assert not answer["ok"], text
        else:
            assert answer["ok"] and answer["text"] == ours, text
            taken += 1
    assert taken < 20


def test_go_checks_every_receipt_of_a_round(go: Go, made: rounds_made.Made) -> None:
    for text in made.receipts.values():
        receipt = log.Receipt.parse(text)
        opened = go.ask("note", note=receipt.checkpoint, vkey=made.signer.vkey)
        size, root = (log.parse_checkpoint(opened["text"]).size, log.parse_checkpoint(opened["text"]).root)
        known = {"size": size, "root": root, "first": receipt.index, "proof": receipt.proof}
        assert go.ask("inclusion", entry=receipt.entry, **known)["ok"]
        assert not go.ask("inclusion", entry=receipt.entry + b" ", **known)["ok"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 63, 64, 65, 130])
def test_go_makes_the_same_roots_and_proofs_and_takes_ours(go: Go, size: int) -> None:
    leaves = [f"entry {number}".encode() for number in range(size)]
    tree = log.Tree(map(digests.leaf_hash, leaves))
    for first in range(0, size, max(1, size // 12)):
        theirs = go.ask("tree", leaves=leaves, first=first)
        included, consistent = tree.inclusion_proof(first), tree.consistency_proof(first + 1)
        assert theirs["root"] == _plain(tree.root())
        assert theirs["proof"] == _plain([*included, *consistent])
        newer = {"size": size, "root": tree.root()}
        older = {"older": tree.root(first + 1), "first": first + 1}
        assert go.ask("inclusion", entry=leaves[first], first=first, proof=included, **newer)["ok"]
        assert go.ask("consistency", proof=consistent, **older, **newer)["ok"]
        assert not go.ask("inclusion", entry=b"another", first=first, proof=included, **newer)["ok"]
        if first + 1 < size:
            assert not go.ask("consistency", proof=consistent, **{**older, "older": tree.root(first)}, **newer)["ok"]


def test_go_takes_a_key_that_we_take_and_no_other_spelling(go: Go, made: rounds_made.Made) -> None:
    note = made.notes[3]
    for key in (made.signer.vkey[:-2] + "A=", made.signer.vkey.replace("+", "+0", 1), "x+y", ""):
        assert not go.ask("note", note=note, vkey=key)["ok"]
        with pytest.raises(Refusal):
            log.parse_vkey(key)
