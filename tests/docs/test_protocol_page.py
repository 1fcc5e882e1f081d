"""docs/protocol.md is held against the code: every record, field, phase and check is there, and its worked values come out."""

import hashlib
import hmac
import math
import random
import re
from pathlib import Path
from types import CodeType, FunctionType

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from acclimate import custody, log, notes, sealing
from acclimate.verify import CHECKS
from acclimate_competitions import confidence, digests, drawing, records, rounds
from acclimate_competitions.phases import Phase

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "protocol.md").read_text("utf-8")
SECRET, ROW_KEY, SEAL = bytes(range(32)), bytes(range(32, 64)), "sha256:" + "5a" * 32


def key(word: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(word.encode()).digest())


def block(name: str) -> str:
    found = re.findall(rf"^```text {name}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return found[0]


def section(number: int) -> str:
    return PAGE.split(f"\n## {number} ")[1].split("\n## ")[0]


def rows(text: str, header: str) -> dict[str, list[str]]:
    """The table below a header line: first cell -> all cells."""
    lines = text.split(f"\n{header}\n", 1)[1].split("\n")[1:]
    table = [line for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {row[0].strip("`"): row for row in cells}


def worked(what: str) -> str:
    return next(line for line in PAGE.splitlines() if line.startswith(f"| {what}")).split("|")[2].strip()


def test_every_record_is_there_with_its_fields():
    table = rows(section(3), "| type | fields | signed by |")
    assert list(table) == list(records.FIELDS)
    for kind, (required, optional, signed) in records.FIELDS.items():
        assert (
            set(re.findall(r"[a-z0-9_]+", table[kind][1])) - {"may", "have", "and", "either", "or"}
            == required | optional
        )
        assert (table[kind][2] == "–") is not signed


def test_what_every_field_holds_is_said():
    said = {name for cell in rows(section(3), "| field | holds |") for name in cell.replace("`", "").split(", ")}
    fields = {name for required, optional, _ in records.FIELDS.values() for name in required | optional}
    # What a table of its own, or the word itself, says: times, names of other sections.
    plain = set(
        "seal size block_root rows row_root opens closes closes_latest release_by cost diverged ed25519 seed reason".split()
    )
    assert fields - said - plain - {"predecessor"} == set()


@pytest.mark.parametrize("phase", list(Phase))
def test_each_phase_takes_what_its_row_says(phase):
    table = rows(section(2), "| phase | takes |")
    assert {kind for kind in table[phase][1].split(", ") if kind} == set(rounds.allowed(phase))


def test_each_record_of_a_round_has_its_guard():
    first, *others = rows(section(2), "| record | must hold |")
    assert first == "RoundDefined" and set(others) == set(rounds.TABLE)


def test_every_check_is_there_with_its_claim():
    table = rows(section(11), "| check | level | ok means |")
    assert {name: row[1:] for name, row in table.items()} == {rule.name: [rule.level, rule.claim] for rule in CHECKS}


def test_every_check_that_can_leave_something_open_is_there_with_when():
    table = rows(section(11), "| check | NOT CHECKED where |")
    said = {name for cell in table for name in cell.split(", ")}
    private = {name for cell, row in table.items() if "private holdout" in row[1] for name in cell.split(", ")}
    names = {rule.name for rule in CHECKS}
    withheld = {rule.name for rule in CHECKS if rule.secret}
    # What builds on a check that is withheld is open, too.
    while more := {rule.name for rule in CHECKS if withheld & {*rule.needs, *rule.rests}} - withheld:
        withheld |= more
    assert private == withheld
    assert said == withheld | {rule.name for rule in CHECKS if leaves_open(rule.run)}
    assert said <= names


def leaves_open(check: FunctionType, seen: frozenset[FunctionType] = frozenset()) -> bool:
    """Whether a check, or a function of acclimate.verify that it calls, raises NotChecked."""
    named, codes = set[str](), [check.__code__]
    while codes:
        code = codes.pop()
        named |= set(code.co_names)
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    called = [check.__globals__.get(name) for name in sorted(named)]
    return "NotChecked" in named or any(
        leaves_open(function, seen | {check})
        for function in called
        if isinstance(function, FunctionType)
        and function.__module__.startswith("acclimate.verify")
        and function not in seen
    )


def test_the_signed_bytes_and_the_entry_come_out():
    entry = block("record").rstrip("\n").encode()
    record = records.parse(entry)
    assert record.encode() == entry
    covered = records.statement(record.type, record.round, record.fields, by=record.by)
    assert covered.decode() == block("signed").rstrip("\n")
    made = records.sign(record.type, record.round, record.fields, key=key("entrant"))
    assert (made["by"], made["sig"]) == (record.by, record.sig)
    assert digests.leaf_hash(entry).hex() == worked("leaf hash of the record")


def test_the_receipt_comes_out_and_verifies():
    log_key, witness_key = block("vkeys").split()
    entry = block("record").rstrip("\n").encode()
    tree = log.Tree(map(digests.leaf_hash, (b"one", b"two", entry)))
    signer = log.Signer("log.example.org/a", key("log"))
    note = notes.parse_note(log.sign_checkpoint(signer, 3, tree.root()))
    cosigned = notes.cosign(note.text, name="witness.example.org", key=key("witness"), time=1805112000)
    checkpoint = notes.Note(note.text, (*note.signatures, cosigned)).encode()
    made = log.Receipt(2, entry, tuple(tree.inclusion_proof(2)), checkpoint)
    assert made.text() == block("receipt")
    record, signed = log.Receipt.parse(block("receipt")).open(log.parse_vkey(log_key), [log.parse_vkey(witness_key)])
    assert (record["entrant"], dict(signed.cosigned)) == ("ada", {witness_key: 1805112000})


def test_the_values_of_the_seal_come_out():
    assert sealing.cipher_key(SECRET, SEAL).hex() == worked("seal key")
    salt = hmac.digest(ROW_KEY, (0).to_bytes(8, "big"), "sha256")
    assert salt.hex() == worked("salt of row 0")
    row = re.search(r"leaf hash of row 0, `(.*?)`", PAGE)
    assert row is not None
    assert digests.leaf_hash(salt + row[1].encode()).hex() == worked("leaf hash of row 0")


def test_the_shares_come_out():
    shares = custody.split(SECRET, k=2, n=3, random=lambda length: bytes([7]) * length)
    round_id = records.parse(block("record").rstrip("\n").encode()).round
    documents = [custody.Share(round_id, SEAL, i, 2, 3, share).encode() for i, share in enumerate(shares, start=1)]
    assert [document.decode() for document in documents] == block("shares").splitlines()
    assert custody.recover([custody.parse_document(document) for document in documents[1:]]) == SECRET


def test_the_draw_comes_out():
    seed = drawing.job_seed(SECRET, b"finished")
    assert seed.hex() == worked("job seed")
    drawn = ", ".join(map(str, drawing.numbers(seed, count=3, of=108)))
    assert drawn == worked("numbers(job seed")


def test_the_commitment_comes_out():
    manifest = digests.parse_canonical(block("manifest").rstrip("\n").encode())
    commitment = digests.of_bytes(SECRET + digests.canonical(manifest))
    assert f"its nonce is `{commitment}`" in PAGE


def test_the_keys_of_low_order_are_those_of_the_page() -> None:
    w = int(re.search(r"\n`([0-9a-f]{64})`", PAGE)[1], 16)  # type: ignore[index]
    p = 2**255 - 19
    ys = (0, 1, p - 1, p, p + 1, w, p - w)
    assert {(y + sign * 2**255).to_bytes(32, "little") for y in ys for sign in (0, 1)} == records.LOW_ORDER
    assert len(records.LOW_ORDER) == 14


def test_uncertainty_is_what_the_page_writes() -> None:
    """9.5 by hand, for two tasks, three seeds, clusters of unequal size and a missing score."""
    draw = random.Random(5)
    tasks, seeds, names = (8, 6), 3, ("a", "b", "c")
    scores = {
        (t, i, s): [float(draw.random() < 0.6) for _ in range(size)]
        for t, size in enumerate(tasks)
        for i in names
        for s in range(seeds)
    }
    scores[0, "b", 1][3] = math.nan
    clusters = {0: [0, 0, 1, 1, 2, 3, 3, 3], 1: [0, 1, 1, 2, 4, 4]}
    total = {(i, c): 0.0 for i in names for c in range(5)}
    variance = dict.fromkeys(names, 0.0)
    for t, size in enumerate(tasks):
        g = len(set(clusters[t]))
        excess = {}
        for i in names:
            means, e = [], []
            for s in range(seeds):
                row = scores[t, i, s]
                known = [x for x in row if not math.isnan(x)]
                means.append(sum(known) / len(known))
                e.append([0.0 if math.isnan(x) else (x - means[-1]) / len(known) for x in row])
            mean_e = [sum(e[s][j] for s in range(seeds)) / seeds for j in range(size)]
            for j in range(size):
                total[i, clusters[t][j]] += math.sqrt(g / (g - 1)) * mean_e[j] / len(tasks)
            middle = sum(means) / seeds
            items = sum(
                sum(e[s][j] - mean_e[j] for j in range(size) if clusters[t][j] == c) ** 2
                for s in range(seeds)
                for c in set(clusters[t])
            )
            excess[i] = (sum((m - middle) ** 2 for m in means) - g / (g - 1) * items) / (seeds - 1)
        pooled = sum(excess.values()) / len(names)
        for i in names:
            variance[i] += max(0.0, pooled) / seeds / len(tasks) ** 2
    by_hand = [math.sqrt(sum(total[i, c] ** 2 for c in range(5)) + variance[i]) for i in names]
    errors = [
        confidence.task_error(
            np.array([[scores[t, i, s] for s in range(seeds)] for i in names]),
            np.array(clusters[t]),
            count=5,
            pool=np.array([True, True, True]),
        )
        for t in range(len(tasks))
    ]
    assert confidence.standard_errors(errors) == pytest.approx(by_hand, rel=1e-12)
