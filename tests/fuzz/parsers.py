"""What is fuzzed: each target takes bytes, and raises only where our code did something else than refuse or take them.

A target holds more than "no crash": what a parser takes must be written again as the same bytes, and what a proof shows must be
true. Those whose input is JSON don't wait for the fuzzer to find the syntax: on an odd first byte they edit a valid document
with the rest of the bytes, and write it canonically.
"""

import base64
import contextlib
import dataclasses
import io
import json
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import building_models
import pyrage
import rounds_made
import submitting
import witnessing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from edits import Bytes, edited, written

from acclimate import archive, custody, log, notes
from acclimate.verify import files
from acclimate.verify.report import Failed
from acclimate_competitions import corrections, definition, digests, records, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.splits import columns_of
from acclimate_runners import prompts

SIGNER = log.Signer("log.example/acclimate", Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
WITNESS_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
WITNESS = notes.Verifier("witness.example/w1", notes.COSIGNATURE, WITNESS_KEY.public_key().public_bytes_raw())
# A fixed identity, so that the seeds are the same bytes in every run: it protects nothing.
IDENTITY = "AGE-SECRET-KEY-1GFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPQ4EGAEX"
SEAL = "sha256:" + "5e" * 32
LEAVES = [digests.leaf_hash(bytes([i])) for i in range(40)]
TREE = log.Tree(LEAVES)


def same(left: object, right: object) -> None:
    """A property that holds of whatever was taken."""
    if left != right:
        raise AssertionError(f"{left!r} became {right!r}")


# ---- signed text ---------------------------------------------------------------------------------------------------


def note(data: bytes) -> None:
    """Notes, checkpoints and their signatures."""
    with contextlib.suppress(Refusal):
        parsed = notes.parse_note(data)
        same(parsed.encode().encode(), data)
        with contextlib.suppress(Refusal):
            same(log.parse_checkpoint(parsed.text).body(), parsed.text)
        opened = log.open_checkpoint(data, SIGNER.verifier, [WITNESS])
        same(opened.checkpoint.body() in SIGNED, True)


SIGNED = {log.checkpoint(SIGNER.origin, size, TREE.root(size)) for size in range(41)}


def cosigned(size: int) -> str:
    """A checkpoint of the log, with a witness's line."""
    body = log.checkpoint(SIGNER.origin, size, TREE.root(size))
    return (
        log.sign_note(body, SIGNER) + notes.cosign(body, name=WITNESS.name, key=WITNESS_KEY, time=1_800_000_000).line()
    )


def vkey(data: bytes) -> None:
    """Verifier keys."""
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(Refusal):
        same(notes.parse_vkey(text).text(), text)


def receipt(data: bytes) -> None:
    """Receipts."""
    with contextlib.suppress(Refusal):
        parsed = log.Receipt.parse(data)
        same(parsed.text().encode(), data)
        parsed.open(SIGNER.verifier, [WITNESS])
        same(digests.leaf_hash(parsed.entry) in RECEIPT_TREE_LEAVES, True)


ENTRY = digests.canonical(
    {"at": "2027-03-01T00:00:00.000000Z", "round": "r", "seal": SEAL, "type": "RoundOpened", "v": 1}
)
RECEIPT_TREE = log.Tree([digests.leaf_hash(ENTRY), *LEAVES])
RECEIPT_TREE_LEAVES = {digests.leaf_hash(ENTRY), *LEAVES}


def receipt_of(size: int) -> str:
    """A receipt of entry 0."""
    checkpoint = log.sign_checkpoint(SIGNER, size, RECEIPT_TREE.root(size))
    return log.Receipt(0, ENTRY, tuple(RECEIPT_TREE.inclusion_proof(0, size)), checkpoint).text()


def proof(data: bytes) -> None:
    """Proofs: one that is taken shows what is true."""
    choices = Bytes(data)
    first, second = choices.below(44), choices.below(44)
    pool = [*LEAVES, *(TREE.root(size) for size in range(41)), b"", b"\x00" * 31, b"\xff" * 32]
    pool += TREE.consistency_proof(first, second) if first <= second <= 40 else []
    pool += TREE.inclusion_proof(first, second) if first < second <= 40 else []
    right = choices.below(2)
    if choices.below(2):
        size, leaf, root = second, choices.one_of(pool), choices.one_of(pool)
        hashes = [choices.one_of(pool) for _ in range(choices.below(8))]
        if right and first < size <= 40:
            leaf, root, hashes = LEAVES[first], TREE.root(size), TREE.inclusion_proof(first, size)
        with contextlib.suppress(Refusal):
            log.verify_inclusion(leaf, hashes, index=first, size=size, root=root)
            if size <= 40 and root == TREE.root(size):
                same(leaf, LEAVES[first])
    else:
        known = {"first_root": choices.one_of(pool), "second_root": choices.one_of(pool)}
        hashes = [choices.one_of(pool) for _ in range(choices.below(8))]
        if right and first <= second <= 40:
            known = {"first_root": TREE.root(first), "second_root": TREE.root(second)}
            hashes = TREE.consistency_proof(first, second)
        with contextlib.suppress(Refusal):
            log.verify_consistency(hashes, first=first, second=second, **known)
            if second <= 40 and known["second_root"] == TREE.root(second):
                same(known["first_root"], TREE.root(first))


# ---- JSON ----------------------------------------------------------------------------------------------------------


def canonical(data: bytes) -> None:
    """Canonical JSON: what is taken has one spelling; what can be said at all can be said canonically, once."""
    with contextlib.suppress(Refusal):
        same(digests.canonical(digests.parse_canonical(data)), data)
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data.decode("utf-8"))
        if (once := written(value)) is not None:
            same(digests.canonical(digests.parse_canonical(once)), once)


def record(data: bytes) -> None:
    """Log entries."""
    raw = data[1:]
    if data[:1] and data[0] & 1:
        choices = Bytes(raw)
        raw = written(edited(json.loads(choices.one_of(history()[0])), choices)) or b""
    with contextlib.suppress(Refusal):
        parsed = records.parse(raw)
        same(parsed.encode(), raw)
        records.verify(parsed)


def correction(data: bytes) -> None:
    """Corrections of rankings."""
    given: object = None
    if data[:1] and data[0] & 1:
        given = edited(CORRECTION, Bytes(data[1:]))
    else:
        with contextlib.suppress(Refusal):
            given = digests.parse_canonical(data[1:])
    with contextlib.suppress(Refusal):
        parsed = corrections.parse(given)
        same(parsed.document(), given)
        same(len(base64.b64decode(parsed.nonce)), corrections.NONCE_BYTES)


CORRECTION = {
    "v": 1,
    "metrics": {"size": "nll"},
    "targets": {"tint": {"a": "red"}},
    "void": {"tint": ["b"]},
    "nonce": base64.b64encode(bytes(32)).decode(),
}


def rules(data: bytes) -> None:
    """The fold: any well-formed record, signed by whoever may sign it, is applied or refused in any phase."""
    entries, states = history()
    choices = Bytes(data)
    place = choices.below(len(states))
    original = records.parse(choices.one_of(entries))
    fields = edited({"fields": dict(original.fields)}, choices).get("fields")
    if not isinstance(fields, dict) or written(fields) is None:
        return
    signer = choices.one_of(SIGNERS)
    at = choices.one_of([original.at, *(records.parse(entry).at for entry in entries[place : place + 2])])
    with contextlib.suppress(Refusal):
        name = states[place].id
        request = {"by": None, "sig": None}
        records.check_fields(original.type, fields, signed=records.FIELDS[original.type][2])
        if records.FIELDS[original.type][2]:
            request = records.sign(original.type, name, fields, key=rounds_made.key(signer))
        made = records.Record(original.type, name, at, fields, request["by"], request["sig"])
        made = records.parse(made.encode())
        if original.type == "RoundDefined":
            rounds.begin(made, states[0].competition)
        else:
            rounds.apply(states[place], made, index=place + 2)


SIGNERS = ("organizer", "evaluator", "custodian-a", "custodian-b", "custodian-c", "ada", "bea", "mallory")
_HISTORY: list[Any] = []


def history() -> tuple[list[bytes], list[Any]]:
    """The entries of a whole round, and its state after each."""
    if not _HISTORY:
        with tempfile.TemporaryDirectory() as folder:
            made = rounds_made.make(Path(folder))
        own = [(i, records.parse(entry)) for i, entry in enumerate(made.entries)]
        own = [(i, parsed) for i, parsed in own if parsed.round == made.round]
        states = [rounds.begin(own[0][1], made.competition)]
        for index, parsed in own[1:]:
            states.append(rounds.apply(states[-1], parsed, index=index))
        _HISTORY.extend(([parsed.encode() for _, parsed in own], states))
    return _HISTORY[0], _HISTORY[1]


def share(data: bytes) -> None:
    """Share documents."""
    raw = data[1:]
    if data[:1] and data[0] & 1:
        raw = written(edited(json.loads(DOCUMENTS[1]), Bytes(data[1:]))) or b""
    for rehearsal in (False, True):
        with contextlib.suppress(Refusal):
            parsed = custody.parse_document(raw, rehearsal=rehearsal)
            same(parsed.encode(), raw)
    with contextlib.suppress(Refusal):
        custody.consistent([DOCUMENTS[0], raw], [digests.of_bytes(document) for document in DOCUMENTS], of=SPLIT)
        same(raw in DOCUMENTS[1:], True)
    with contextlib.suppress(Refusal):
        custody.consistent([DOCUMENTS[0], raw], [digests.of_bytes(DOCUMENTS[0]), digests.of_bytes(raw), SEAL], of=SPLIT)


SPLIT = custody.Split("r", SEAL, 2, 3)
DOCUMENTS = [
    custody.Share("r", SEAL, index, 2, 3, value).encode()
    for index, value in enumerate(
        custody.split(bytes(range(32)), k=2, n=3, random=lambda size: b"\x07" * size), start=1
    )
]


def envelope(data: bytes) -> None:
    """Envelopes, and the age files in them."""
    raw = data[1:]
    if data[:1] and data[0] & 1:
        given = edited(ENVELOPE, Bytes(raw))
        if written(given) is None or not isinstance(given, dict):
            return
        named = digests.of_json(given)
        expected = {"index": 1, "to": "ada", "commitment": digests.of_bytes(DOCUMENTS[0]), "envelope": named}
        with contextlib.suppress(Refusal):
            same(custody.open_envelope(given, IDENTITY, share=expected, of=SPLIT), DOCUMENTS[0])
    else:
        with contextlib.suppress(Refusal):
            custody.unwrap(raw, IDENTITY)


RECIPIENT = str(pyrage.x25519.Identity.from_str(IDENTITY).to_public())
ENVELOPE = custody.envelope(DOCUMENTS[0], index=1, to="ada", main=RECIPIENT, backup=RECIPIENT)

# ---- files ---------------------------------------------------------------------------------------------------------


def competition(data: bytes) -> None:
    """A competition's definition."""
    with contextlib.suppress(Refusal):
        parsed = definition.parse(data)
        same(parsed.digest, digests.of_bytes(data))


TASK = definition.parse(rounds_made.DEFINITION.encode()).tasks[0]
PROMPTS = (
    "{{ input }}", "{{ 'a' * 9 ~ input }}", "{{ ('a' ~ {}) | urlencode | list | string }}", "{{ ---input + -1 }}",
    "{% for word in input.split() %}{{ loop.index }} {{ word | default('') }}{% endfor %}",
    "{% macro of(text) %}{{ text }}{{ caller() }}{% endmacro %}{% call of(input) %}{% endcall %}",
    "{% set all = namespace(a=1) %}{% set all.a = 2 %}{% block text %}{% if a is defined %}{{ all.a }}{% endif %}{% endblock %}",
)  # fmt: skip


def prompt(data: bytes) -> None:
    """A task's template, as a server looks at it: it is never filled."""
    task = dataclasses.replace(TASK, prompt=data.decode("utf-8", "ignore"))
    columns_of(task)
    with contextlib.suppress(Refusal):
        prompts.require_template(task)
        prompts.require_columns(task, ("example", "input", "target"))


def unpacked(data: bytes) -> None:
    """The archive in an opened seal."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        inside = Path(folder) / "out"
        inside.mkdir()
        with contextlib.suppress(Refusal):
            row_key, names = archive.extract(iter([data[:700], data[700:]]), inside)
            found = {name: inside / name for name in names}
            same(b"".join(archive.write(found, row_key)), data)
        same([path.name for path in Path(folder).iterdir()], ["out"])


def bundle(data: bytes) -> None:
    """A bundle in a ZIP, up to its MANIFEST; nothing lands beside the folder it is copied into."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / "bundle.zip"
        path.write_bytes(data)
        with contextlib.suppress(Failed), files.opened(path) as opened:
            for check in (files.manifest, files.known):
                with contextlib.suppress(Failed):
                    check(opened)
            for name in opened.names:
                with contextlib.suppress(Failed):
                    opened.json(name)
                with contextlib.suppress(Failed):
                    opened.lines(name)
        same([item.name for item in Path(folder).iterdir()], ["bundle.zip"])


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def zipped() -> bytes:
    """A small bundle in a ZIP."""
    stream = io.BytesIO()
    contents = {"keys.json": b"{}", "public/tokenizer.json": b"[1]", "entries.jsonl": ENTRY + b"\n"}
    listed = "".join(f"{digests.of_bytes(data)[7:]}  {name}\n" for name, data in sorted(contents.items()))
    with zipfile.ZipFile(stream, "w") as archive_:
        for name, data in {**contents, "MANIFEST": listed.encode()}.items():
            archive_.writestr(zipfile.ZipInfo(name), data)
    return stream.getvalue()


def packed() -> bytes:
    """A small archive."""
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for name in ("a.parquet", "b.parquet"):
            made[name] = Path(folder) / name
            made[name].write_bytes(name.encode() * 10)
        return b"".join(archive.write(made, bytes(32)))


# ---- all -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A function to fuzz, inputs to begin with, words that inputs may hold, and how many inputs a short run has."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    words: tuple[str, ...] = ()
    runs: int = 300


JSON_WORDS = tuple(
    '{ } [ ] " \\\\ \\\\u , : null true false 1e21 -0 5e-324 9007199254740993 \\xed\\xa0\\x80 \\xef\\xbb\\xbf'.split()
)
TARGETS: dict[str, Target] = {
    "notes": Target(
        note,
        lambda: [cosigned(5).encode(), cosigned(40).encode(), log.sign_note("text\n", SIGNER).encode()],
        ("\\xe2\\x80\\x94 ", "\\x0a\\x0a", SIGNER.origin, WITNESS.name, "=\\x0a"),
    ),
    "keys": Target(vkey, lambda: [SIGNER.vkey.encode(), WITNESS.text().encode()], ("+", "=", "\\xe3\\x80\\x80")),
    "receipts": Target(
        receipt,
        lambda: [receipt_of(size).encode() for size in (1, 2, 7, 41)],
        ("c2sp.org/tlog-proof@v1", "extra ", "index ", "\\xe2\\x80\\x94 ", "\\x0a\\x0a"),
    ),
    "proofs": Target(proof, lambda: [bytes(40), bytes([0, 5, 0, 17, 0, 1, 0, 1]), bytes([0, 8, 0, 40, 0, 1, 0, 0])]),
    "json": Target(
        canonical, lambda: [ENTRY, b'{"a":[1,2.5,-0.000001,1e+21],"\xc3\xa9":"\\u0001"}', b'[{"1":{"":[]}}]'], JSON_WORDS
    ),
    "records": Target(
        record, lambda: [*(b"\x00" + e for e in history()[0]), *(bytes([1, 0, i, 0, 2, 0, 9]) for i in range(60))], JSON_WORDS
    ),
    "corrections": Target(
        correction, lambda: [b"\x00" + digests.canonical(CORRECTION), *(bytes([1, 0, i, 0, 9]) for i in range(30))], JSON_WORDS
    ),
    "rules": Target(rules, lambda: [bytes([0, i, 0, i, 0, 0, 0, i, 0, 3, 0, i]) for i in range(64)]),
    "shares": Target(
        share, lambda: [*(b"\x00" + document for document in DOCUMENTS), *(bytes([1, 0, i, 0, 9]) for i in range(9))], JSON_WORDS
    ),
    "envelopes": Target(
        envelope,
        lambda: [b"\x00" + base64.b64decode(ENVELOPE["main"]), *(bytes([1, 0, 0, 0, i, 0, 3, 0, i]) for i in range(8))],
        ("age-encryption.org/v1", "-> X25519 ", "--- ", "-> "),
    ),
    "definitions": Target(
        competition,
        lambda: [rounds_made.DEFINITION.encode()],
        ("[[tasks]]", "[round]", " = ", "true", "'''", '\\"\\"\\"', "inf", "nan", "0x", "{ ", "1979-05-27T07:32:00Z"),
    ),
    "prompts": Target(
        prompt,
        lambda: [text.encode() for text in PROMPTS],
        ("{{ ", " }}", "{% ", " %}", " | string", " | urlencode", " is defined", "{% endfor %}", "{% endif %}", "range(", " ** ", "'a' * "),
    ),
    "archives": Target(unpacked, lambda: [packed()]),
    "models": Target(submitting.model, submitting.models, submitting.WORDS),
    "configs": Target(building_models.built, building_models.seeds, runs=100),
    "adapters": Target(submitting.adapter, submitting.adapters, submitting.WORDS),
    "requests": Target(witnessing.asked, witnessing.requests, witnessing.WORDS),
    "answers": Target(witnessing.answered, witnessing.answers, witnessing.WORDS),
    "bundles": Target(bundle, lambda: [zipped()], ("PK\\x03\\x04", "PK\\x01\\x02", "PK\\x05\\x06", "../", "MANIFEST")),
}  # fmt: skip
