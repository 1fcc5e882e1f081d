"""What docs/protocol.md promises, claim by claim: ok with the evidence, said to be missing without it, FAILED with false evidence.

One round with all that a round can have (witnesses, drawn re-runs) is made once; each case changes a copy of its bundle, and mends MANIFEST, as
whoever wants to deceive would. What a stranger may not have (keys, cosignatures, re-runs, what a private holdout withholds)
is NOT CHECKED without the evidence; a file that every bundle must have is named as missing.
"""

import base64
import re
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import made_bundles
import pytest
import rounds_made
from recosigning import CLOSES, NAMES, recosign, then
from rounds_made import Made, cosigned, public
from tampering import Change, change_cell, change_json, change_record, flip_ciphertext, receipt_of_another_entry, set_

from acclimate import verify
from acclimate.verify import Check
from acclimate.verify.report import Failed
from acclimate_competitions import digests, records
from acclimate_competitions.records import Record

PAGE = (Path(__file__).parent.parent.parent / "docs" / "protocol.md").read_text("utf-8")
SECRET = b"thirty-two bytes of an auditor's"
LAB = {"name": "lab", "ed25519": public("lab"), "draw": digests.of_bytes(SECRET)}
OTHER = rounds_made.log.Signer("other.example.org", rounds_made.key("other")).vkey
AGREES = {"agrees": True, "tolerance": 0, "hardware": "cpu/x86_64", "reason": "the same bytes"}


@pytest.fixture(scope="module")
def playing() -> Iterator[None]:
    """rounds_made plays rounds with witnesses and a second operator."""
    fields, prepare = rounds_made.defined_fields, rounds_made.prepare_all
    text = rounds_made.DEFINITION.replace("audits = 0", 'audits = 2\nauditor = "lab"')

    def prepare_and_audit(made: Made) -> None:
        prepare(made)
        made.signed("AuditDrawn", {"secret": base64.b64encode(SECRET).decode()}, by="lab")
        state = made.fold()
        for key in state.drawn or ():
            first = state.prepared[key]
            outcome = {"prepared": first.fields.get("prepared"), **AGREES}
            made.signed(
                "PreparationAudited", dict(zip(("submission", "task", "seed"), key, strict=True)) | outcome, by="lab"
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "QUORUM", 2)
        patch.setattr(rounds_made, "WITNESSES", NAMES)
        patch.setattr(rounds_made, "DEFINITION", text)
        patch.setattr(rounds_made, "defined_fields", lambda made: {**fields(made), "auditor": LAB})
        patch.setattr(rounds_made, "prepare_all", prepare_and_audit)
        yield


@pytest.fixture(scope="module")
def made(playing: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def whole(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = made.write(tmp_path_factory.mktemp("bundle"))
    early = CLOSES - timedelta(hours=1)
    recosign(path, lambda size, note: cosigned(note, at=then(made, size, early), by=NAMES))
    made_bundles.mend(path)
    return path


def checks(path: Path, made: Made, **given: object) -> dict[str, Check]:
    made_bundles.mend(path)
    options = {"log_key": made.signer.vkey, "witnesses": [rounds_made.witness(NAMES[0])], **given}
    options = {"rerun": lambda audit: "ada: 6 preparations, 8 evaluations", **options}
    return {check.name: check for check in verify.verify(path, **options).checks}  # type: ignore[arg-type]


def remove(name: str) -> Change:
    def change(bundle: Path) -> None:
        path = bundle / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def change_time(bundle: Path) -> None:
    """A submission is said to have come a day after the close."""
    lines = (bundle / "entries.jsonl").read_bytes().splitlines()
    for number, line in enumerate(lines):
        if b'"type":"SubmissionAccepted"' in line:
            record = records.parse(line)
            late = CLOSES + timedelta(days=1)
            lines[number] = Record(record.type, record.round, late, record.fields, record.by, record.sig).encode()
    (bundle / "entries.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))


def swap_records(first: str, second: str) -> Change:
    """Two records change places: the order is another one."""

    def change(bundle: Path) -> None:
        lines = (bundle / "entries.jsonl").read_bytes().splitlines()
        here, there = (
            next(n for n, line in enumerate(lines) if f'"type":"{kind}"'.encode() in line) for kind in (first, second)
        )
        lines[here], lines[there] = lines[there], lines[here]
        (bundle / "entries.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))

    return change


# The promise's clauses -> (words of it on the page, checks that carry it, evidence taken away, evidence that is false, where that shows)
PROMISES: dict[str, tuple[tuple[str, ...], Change, Change, str]] = {
    "the holdout was fixed before\nthe round opened": (
        ("rules", "ciphertext", "definition", "public files"), remove("holdout.sealed"), flip_ciphertext, "ciphertext",
    ),
    "nobody could read it from the platform before submissions were closed": (
        ("rules", "shares", "key"), remove("shares.json"), swap_records("RoundClosed", "ShareReleased"), "entries",
    ),
    "the entries were frozen": (
        ("rules", "submissions", "time"), remove("submissions.jsonl"), change_record("RoundClosed", b'"count":3', b'"count":2'), "entries",
    ),
    "every prepared model fixed,\nbefore the key was released": (
        ("rules", "prepared"), remove("prepared.json"), change_json("prepared.json", set_(0, "prepared", to="sha256:" + "0" * 64)), "prepared",
    ),
    "what was opened is what was sealed": (
        ("opening", "holdout"), remove("holdout/tint.parquet"), change_cell("holdout/tint.parquet", "input", 3, "another"), "holdout",
    ),
    "every receipt is in the log": (
        ("receipts",), remove("receipts"), receipt_of_another_entry, "receipts",
    ),
    "every score follows from logged predictions\non the opened holdout": (
        ("predictions", "scores"), remove("predictions/ada"), change_cell("scores/ada.parquet", "score", 0, 0.25), "scores",
    ),
    "the published ranking follows from the scores": (
        ("ranking", "published"), remove("ranking.json"), change_json("ranking.json", set_("ranking", 0, "rank", to=7)), "ranking",
    ),
}  # fmt: skip


def test_the_promises_are_those_of_the_page():
    promise = PAGE.split("**The promise.**")[1].split("What can't be shown")[0]
    words = " ".join(promise.split())
    for clause in PROMISES:
        assert " ".join(clause.split()) in words, clause
    assert len(re.findall(r";|, and every prepared model", words)) == len(PROMISES) - 1


def test_with_the_evidence_every_line_is_ok(made: Made, whole: Path):
    found = checks(whole, made)
    assert {name: check.meaning for name, check in found.items() if check.status != "ok"} == {}
    assert {name for names, *_ in PROMISES.values() for name in names} <= set(found)


@pytest.mark.parametrize("clause", PROMISES, ids=lambda clause: clause.replace("\n", " "))
def test_without_its_evidence_or_with_false_evidence_a_promise_fails_by_name(
    clause: str, made: Made, whole: Path, tmp_path: Path
):
    carried, without, false, where = PROMISES[clause]
    for what, change in (("missing", without), ("false", false)):
        bundle = Path(shutil.copytree(whole, tmp_path / what))
        change(bundle)
        found = checks(bundle, made)
        failed = [check for check in found.values() if check.status == "FAILED"]
        assert failed, (what, clause)
        assert all(check.where and check.meaning for check in failed)
        if what == "false":
            assert found[where].status == "FAILED", {check.name: check.meaning for check in failed}
        else:
            assert {check.name for check in failed} & set(carried) and "missing" in failed[0].meaning


def test_a_late_record_is_named(made: Made, whole: Path, tmp_path: Path):
    bundle = Path(shutil.copytree(whole, tmp_path / "bundle"))
    change_time(bundle)
    assert checks(bundle, made)["records"].status == "FAILED"


# ---- each NOT CHECKED ----------------------------------------------------------------------------------------------

Options = dict[str, object]


def _rerun_fails(audit: object) -> str:
    raise Failed("ada, tint, seed 11", "prepared again: sha256:1, the log says sha256:2")


def _late(bundle: Path) -> None:
    recosign(bundle, lambda _, note: cosigned(note, at=CLOSES + timedelta(hours=1), by=NAMES))


def _forged(bundle: Path) -> None:
    path = bundle / "checkpoint"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    lines[-1] = lines[-1].replace(lines[-1][-12:-6], "AAAAAA")
    path.write_text("".join(lines), "utf-8")


def _unsigned(bundle: Path) -> None:
    recosign(bundle, lambda _, note: note)


def _same(bundle: Path) -> None:
    pass


# check -> ((how the evidence goes, options then), (how it is false, options then))
GAPS: dict[str, tuple[tuple[Change, Options], tuple[Change, Options]]] = {
    "whose log": ((_same, {"log_key": None, "witnesses": []}), (_same, {"log_key": OTHER})),
    "whose witnesses": ((_same, {"witnesses": []}), (_forged, {"witnesses": [rounds_made.witness(NAMES[2])]})),
    "split view": ((_unsigned, {}), (_forged, {})),
    "time": ((_unsigned, {}), (_late, {})),
    "re-run": ((_same, {"rerun": None}), (_same, {"rerun": _rerun_fails})),
}  # fmt: skip


@pytest.mark.parametrize("name", GAPS)
def test_without_evidence_it_is_not_checked_and_false_evidence_fails(
    name: str, made: Made, whole: Path, tmp_path: Path
):
    assert checks(whole, made)[name].status == "ok"
    for status, (change, options) in zip(("NOT CHECKED", "FAILED"), GAPS[name], strict=True):
        bundle = Path(shutil.copytree(whole, tmp_path / status))
        change(bundle)
        found = checks(bundle, made, **options)[name]
        assert found.status == status, found
        assert found.meaning and (found.where if status == "FAILED" else True)


def test_without_audits_honest_preparation_is_not_checked_and_a_re_run_that_disagrees_stops_the_round(
    made: Made, whole: Path, tmp_path: Path
):
    assert checks(whole, made)["honest preparation"].where.startswith("2 of 18 preparations drawn")
    bundle = Path(shutil.copytree(whole, tmp_path / "disagrees"))
    lines = (bundle / "entries.jsonl").read_bytes().splitlines()
    number = next(n for n, line in enumerate(lines) if b'"type":"PreparationAudited"' in line)
    fields = {**records.parse(lines[number]).fields, "prepared": digests.of_bytes(b"another"), "agrees": False}
    request = records.sign("PreparationAudited", made.round, fields, key=rounds_made.key("lab"))
    at = records.parse(lines[number]).at
    lines[number] = Record(
        "PreparationAudited", made.round, at, request["fields"], request["by"], request["sig"]
    ).encode()
    (bundle / "entries.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    found = checks(bundle, made)
    assert found["rules"].status == "FAILED" and "does not agree" in found["rules"].meaning
    assert found["honest preparation"].status == "NOT CHECKED"


def test_before_it_is_published_nobody_has_signed_a_ranking(playing: None, tmp_path: Path):
    made = rounds_made.make(tmp_path / "round", publish=False)
    assert checks(made.write(tmp_path / "bundle"), made)["published"].status == "NOT CHECKED"


def test_every_gap_that_the_page_tells_is_tried_here_or_in_the_tests_of_private_holdouts():
    section = PAGE.split("What stays NOT CHECKED, and when:")[1].split("**time**")[0]
    told = {
        name
        for line in section.splitlines()
        if line.startswith("| ")
        for name in line.split("|")[1].strip().split(", ")
    }
    private = "shares key opening holdout unseen predictions scores majority ranking versions".split()
    # test_verify_standing.py has `standing`, test_verify_earlier.py `earlier rounds`, test_verify_zips.py `nothing else`.
    here = {
        *GAPS,
        "standing",
        "earlier rounds",
        "nothing else",
        "honest preparation",
        "published",
        *private,
        "as submitted",
        "auditor's report",
        "check",
        "---",
    }
    assert told <= here, told - here
