"""A holdout that stays private: what the public bundle lacks, what stands in for it, and what a stranger can still name."""

import base64
import hashlib
import hmac
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import made_bundles
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import revised_rounds
import rounds_made
from stored import fill

from acclimate import bundle, config, custody, drawn_rows, log, rows, sealing, verify
from acclimate.service import judging, publish
from acclimate.store import Store
from acclimate.verify.report import Report
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

AUDITOR = "lab"
GAPS = {"split view", "time", "honest preparation", "re-run"}
WITHHELD = {
    "shares",
    "key",
    "opening",
    "holdout",
    "unseen",
    "predictions",
    "as submitted",
    "scores",
    "majority",
    "ranking",
}
SECRETS = ("shares.json", "holdout/", "predictions/", "scores/")


def private(patch: pytest.MonkeyPatch, *, rows_a_task: int = 40) -> None:
    """Make rounds_made play rounds whose holdout stays private."""
    honest = rounds_made.defined_fields
    text = rounds_made.DEFINITION.replace('"public"\n', f'"private"\nauditor = "{AUDITOR}"\n')
    named = {"name": AUDITOR, "ed25519": rounds_made.public(AUDITOR), "draw": digests.of_bytes(b"a secret")}
    patch.setattr(rounds_made, "DEFINITION", text)
    patch.setattr(rounds_made, "ROWS", rows_a_task)
    patch.setattr(rounds_made, "defined_fields", lambda made: {**honest(made), "auditor": named})


@pytest.fixture(scope="module")
def playing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        private(patch)
        yield


@pytest.fixture(scope="module")
def made(playing: None, tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def bundles(made: rounds_made.Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `public` and `whole`, as the server writes them."""
    return written(made, tmp_path_factory.mktemp("bundles"))


def written(made: rounds_made.Made, folder: Path) -> Path:
    opened = Store.open(config.load(folder / "data", environ={}))
    fill(opened, made)
    bundle.write(opened, opened.blobs, made.round, folder / "public")
    bundle.write(opened, opened.blobs, made.round, folder / "whole", whole=True)
    opened.close()
    return folder


@pytest.fixture
def public(bundles: Path, tmp_path: Path) -> Path:
    """A copy of the public bundle, to change."""
    return Path(shutil.copytree(bundles / "public", tmp_path / "public"))


def by_status(report: Report, status: str) -> dict[str, str]:
    return {check.name: check.where for check in report.checks if check.status == status}


def failed(path: Path) -> dict[str, str]:
    """What FAILED in a changed bundle whose MANIFEST agrees."""
    made_bundles.mend(path)
    return by_status(verify.verify(path), "FAILED")


def names(path: Path) -> set[str]:
    return {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}


# ---- honest bundles ------------------------------------------------------------------------------------------------


def test_the_public_bundle_lacks_the_holdout_and_all_that_tells_of_it(made: rounds_made.Made, bundles: Path) -> None:
    public, whole = names(bundles / "public"), names(bundles / "whole")
    assert {name for name in public if name.startswith(SECRETS)} == set()
    assert whole - public == {name for name in whole if name.startswith(SECRETS)} and public <= whole
    assert {name.partition("/")[0] + "/" for name in whole - public} | {"shares.json"} >= set(SECRETS)
    same = {
        name for name in public if (bundles / "public" / name).read_bytes() == (bundles / "whole" / name).read_bytes()
    }
    assert public - same == {"MANIFEST"}
    # All of it, but for the drawn rows and what is public anyway: not an example stands there in clear.
    lines = (bundles / "public" / "rows.jsonl").read_bytes()
    there = b"".join((bundles / "public" / name).read_bytes() for name in public - {"rows.jsonl"})
    examples = [name.encode() for table in made.holdout.values() for name in table.column("example").to_pylist()]
    assert sum(b'"%s"' % name in lines for name in examples) == 32
    assert not [name for name in examples if name in there]


def test_a_stranger_is_told_line_by_line_what_the_public_bundle_can_not_show(
    made: rounds_made.Made, bundles: Path
) -> None:
    report = verify.verify(bundles / "public", log_key=made.signer.vkey)
    assert by_status(report, "FAILED") == {}
    assert set(by_status(report, "NOT CHECKED")) == GAPS | WITHHELD | {"auditor's report"}
    assert by_status(report, "ok")["opened rows"] == "32 of 80 rows"
    assert {"published", "ciphertext", "rules", "prepared", "receipts"} <= set(by_status(report, "ok"))
    said = {check.name: check.meaning for check in report.checks}
    assert "stays private" in said["shares"]
    assert f"{AUDITOR}, the round's auditor, has not reported" in said["auditor's report"]


def test_a_stranger_is_told_which_evaluations_were_given_up(
    playing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = rounds_made.predict

    def given_up(entrant: str, protocol: str) -> dict[str, str]:
        return {"given_up": "it crashes"} if (entrant, protocol) == ("bea", "direct") else {}

    def predict(made: rounds_made.Made, entrant: str, task: str, seed: int | None, protocol: str) -> pa.Table:
        table = honest(made, entrant, task, seed, protocol)
        nothing = pa.nulls(table.num_rows, table.schema.field("loglikelihoods").type)
        return table.set_column(5, "loglikelihoods", nothing) if given_up(entrant, protocol) else table

    monkeypatch.setattr(rounds_made, "ended", given_up)
    monkeypatch.setattr(rounds_made, "predict", predict)
    made = rounds_made.make(tmp_path / "round")
    folder = written(made, tmp_path / "bundles")
    for name in ("public", "whole"):
        report = verify.verify(folder / name, log_key=made.signer.vkey)
        assert by_status(report, "FAILED") == {}
        said = by_status(report, "ok")["prepared"]
        told = (
            "2 evaluations were given up by the organizer, as the evaluator says: bea, tint, direct; bea, size, direct"
        )
        assert said.endswith(told), (name, said)


def test_the_whole_bundle_is_checked_like_any_other(made: rounds_made.Made, bundles: Path) -> None:
    report = verify.verify(bundles / "whole", log_key=made.signer.vkey)
    assert by_status(report, "FAILED") == {}
    assert set(by_status(report, "NOT CHECKED")) == GAPS | {"auditor's report"}
    assert verify.recompute_ranking(bundles / "whole").document() == made.ranking


@pytest.mark.parametrize("recompute", [verify.recompute_scores, verify.recompute_ranking])
def test_nothing_is_recomputed_from_the_public_bundle(recompute: Callable[[Path], object], bundles: Path) -> None:
    with pytest.raises(Refusal) as refused:
        recompute(bundles / "public")
    assert refused.value.code == "holdout_private"
    assert "--whole" in refused.value.hint


def test_the_opened_rows_are_those_that_the_protocol_describes(made: rounds_made.Made, bundles: Path) -> None:
    """Told again by another hand: the draw, the salts, the tree."""
    opening = next(i for i, entry in enumerate(made.entries) if b'"type":"HoldoutOpened"' in entry)
    root = log.root([digests.leaf_hash(entry) for entry in made.entries[: opening + 1]])
    seed, count, drawn, block = hashlib.sha256(b"acclimate/row-draw/v1\0" + root).digest(), 80, list[int](), 0
    while len(drawn) < 32:
        number = int.from_bytes(hashlib.sha256(seed + block.to_bytes(8, "big")).digest()[:8], "big")
        drawn += [number % count] if number < 2**64 - 2**64 % count and number % count not in drawn else []
        block += 1
    row_key = _row_key(made)
    texts = [text for task in ("size", "tint") for text in rows.texts(made.folder / "opened" / f"{task}.parquet")]
    salts = [hmac.new(row_key, index.to_bytes(8, "big"), "sha256").digest() for index in range(count)]
    hashes = [hashlib.sha256(b"\0" + salt + text).digest() for salt, text in zip(salts, texts, strict=True)]
    assert log.root(hashes).hex() == made.seal["row_root"].removeprefix("sha256:")
    expected = [
        {
            "index": index,
            "row": json.loads(texts[index]),
            "salt": base64.b64encode(salts[index]).decode(),
            "path": [base64.b64encode(node).decode() for node in log.inclusion_proof(hashes, index, count)],
        }
        for index in drawn
    ]
    lines = (bundles / "public" / "rows.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == expected
    assert lines == [digests.canonical(line) for line in expected]


def _row_key(made: rounds_made.Made) -> bytes:
    secret = custody.recover([custody.parse_document(made.documents[index]) for index in (1, 3)])
    return sealing.row_key(made.folder / "holdout.sealed", secret, round_id=made.round, fields=made.seal)


@pytest.mark.parametrize("count", [1, 2, 3, 32, 33, 100, 257])
def test_rows_of_a_holdout_of_any_size_open(count: int, tmp_path: Path) -> None:
    """All of them where there are no more than 32: such a holdout does not stay private."""
    for name, part in (("a.parquet", count // 2), ("b.parquet", count - count // 2)):
        pq.write_table(pa.table({"example": [f"{name} {i}" for i in range(part)], "x": [0.5] * part}), tmp_path / name)
    files = {name: tmp_path / name for name in ("a.parquet", "b.parquet")}
    committed = rows.commit(files, b"k" * 32)
    fields = {"rows": count, "row_root": committed.root}
    found = [json.loads(line) for line in drawn_rows.lines(files, b"k" * 32, fields=fields, root=b"r" * 32)]
    assert [line["index"] for line in found] == drawn_rows.drawn(b"r" * 32, count)
    assert len({line["index"] for line in found}) == min(count, 32)
    for line in found:
        salt, *path = (base64.b64decode(text) for text in (line["salt"], *line["path"]))
        leaf = digests.leaf_hash(salt + digests.canonical(line["row"]))
        root = bytes.fromhex(committed.root.removeprefix("sha256:"))
        log.verify_inclusion(leaf, path, index=line["index"], size=count, root=root)
    with pytest.raises(Refusal) as refused:
        drawn_rows.lines(files, b"l" * 32, fields=fields, root=b"r" * 32)
    assert refused.value.code == "seal_mismatch"


# ---- false ones ----------------------------------------------------------------------------------------------------

Change = Callable[[list[bytes]], list[bytes]]


def edited(number: int, **values: object) -> Change:
    def change(lines: list[bytes]) -> list[bytes]:
        lines[number] = digests.canonical(json.loads(lines[number]) | values)
        return lines

    return change


def another_index(number: int) -> Change:
    def change(lines: list[bytes]) -> list[bytes]:
        return edited(number, index=(json.loads(lines[number])["index"] + 1) % 80)(lines)

    return change


def flipped(number: int, name: str, place: int) -> Change:
    def change(lines: list[bytes]) -> list[bytes]:
        row = json.loads(lines[number])
        texts = [row["salt"]] if name == "salt" else row["path"]
        raw = bytearray(base64.b64decode(texts[0]))
        raw[place] ^= 1
        texts[0] = base64.b64encode(raw).decode()
        return edited(number, **{name: texts[0] if name == "salt" else texts})(lines)

    return change


FALSE_ROWS: dict[str, tuple[Change, str]] = {
    "another target": (
        lambda lines: [lines[0].replace(b'"target":"', b'"target":"not '), *lines[1:]],
        "rows.jsonl, line 1",
    ),
    "two rows swapped": (lambda lines: [lines[1], lines[0], *lines[2:]], "rows.jsonl, line 1"),
    "an index that was not drawn": (another_index(3), "rows.jsonl, line 4"),
    "an index that is true": (edited(3, index=True), "rows.jsonl, line 4"),
    "a kind row in place of the drawn one": (lambda lines: [*lines[:5], lines[6], *lines[6:]], "rows.jsonl, line 6"),
    "another salt": (flipped(2, "salt", 31), "rows.jsonl, line 3"),
    "another path": (flipped(31, "path", 0), "rows.jsonl, line 32"),
    "no path": (edited(7, path=[]), "rows.jsonl, line 8"),
    "a path of text": (edited(7, path="none"), "rows.jsonl, line 8"),
    "a short salt": (edited(7, salt="AAAA"), "rows.jsonl, line 8"),
    "a row that is no object": (edited(7, row=[]), "rows.jsonl, line 8"),
    "one more field": (edited(7, note=""), "rows.jsonl, line 8"),
    "one row fewer": (lambda lines: lines[:-1], "rows.jsonl, line 32"),
    "one row more": (lambda lines: [*lines, lines[0]], "rows.jsonl, line 33"),
    "no row": (lambda lines: [], "rows.jsonl, line 1"),
    "not canonical": (lambda lines: [lines[0].replace(b":", b": ", 1), *lines[1:]], "rows.jsonl, line 1"),
}


@pytest.mark.parametrize("what", FALSE_ROWS)
def test_a_false_row_is_named(what: str, public: Path) -> None:
    change, where = FALSE_ROWS[what]
    lines = change((public / "rows.jsonl").read_bytes().splitlines())
    (public / "rows.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    assert failed(public) == {"opened rows": where}


def test_rows_that_are_missing_are_named(public: Path) -> None:
    (public / "rows.jsonl").unlink()
    assert failed(public) == {"opened rows": "rows.jsonl"}


def test_another_ranking_than_the_signed_one_is_named(public: Path) -> None:
    document = json.loads((public / "ranking.json").read_bytes())
    rows_ = document["ranking"]
    rows_[0]["entrant"], rows_[1]["entrant"] = rows_[1]["entrant"], rows_[0]["entrant"]
    (public / "ranking.json").write_bytes(digests.canonical(document))
    assert failed(public) == {"published": "the log's last ranking record"}


@pytest.mark.parametrize("kept", ["shares.json", "scores/ada.parquet"])
def test_a_bundle_that_withholds_only_what_does_not_fit_is_no_public_one(
    kept: str, bundles: Path, public: Path
) -> None:
    """Whoever shows a part of the holdout must show all of it."""
    (public / kept).parent.mkdir(exist_ok=True)
    shutil.copyfile(bundles / "whole" / kept, public / kept)
    assert set(failed(public)) & {"shares", "holdout", "predictions"}


def test_a_public_round_can_not_pass_for_a_private_one(playing: None, tmp_path: Path) -> None:
    text = rounds_made.DEFINITION.replace(f'"private"\nauditor = "{AUDITOR}"\n', '"public"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "DEFINITION", text)
        patch.setattr(rounds_made, "defined_fields", _without_auditor(rounds_made.defined_fields))
        path = rounds_made.make(tmp_path / "round").write(tmp_path / "bundle")
    for name in [name for name in names(path) if name.startswith(SECRETS)]:
        (path / name).unlink()
    assert failed(path)["shares"] == "shares.json"
    (path / "rows.jsonl").write_bytes(b"")
    assert failed(path)["opened rows"] == "rows.jsonl"


def test_a_correction_of_a_private_holdout_is_in_the_whole_bundle_alone(playing: None, tmp_path: Path) -> None:
    played = revised_rounds.play(tmp_path / "round")
    opened = Store.open(config.load(tmp_path / "data", environ={}))
    fill(opened, played.made)
    for document in (played.first, played.correction):
        opened.blobs.put_bytes(digests.canonical(document))
    for name in ("public", "whole"):
        bundle.write(opened, opened.blobs, played.made.round, tmp_path / name, whole=name == "whole")
    assert judging.versions(opened, played.made.round)[1]["corrected"] is None
    # The server judges the stored predictions again to the same ranking.
    assert publish.ranking(opened, played.made.round).document() == played.made.ranking
    opened.close()
    withheld = names(tmp_path / "whole") - names(tmp_path / "public")
    assert {name for name in withheld if name.startswith("versions/")} == {"versions/2/correction.json"}
    whole = verify.verify(tmp_path / "whole", log_key=played.made.signer.vkey)
    assert by_status(whole, "FAILED") == {} and "versions" in by_status(whole, "ok")
    public = verify.verify(tmp_path / "public", log_key=played.made.signer.vkey)
    assert by_status(public, "FAILED") == {}
    assert {"versions", "ranking"} <= set(by_status(public, "NOT CHECKED"))
    assert by_status(public, "ok")["published"].startswith("version 2,")


def _without_auditor(fields: Callable[[rounds_made.Made], dict]) -> Callable[[rounds_made.Made], dict]:
    return lambda made: {name: value for name, value in fields(made).items() if name != "auditor"}


# ---- the auditor's report ------------------------------------------------------------------------------------------


def reported(tmp_path: Path, *, revised: bool = False, **counts: int) -> dict[str, tuple[str, str]]:
    """What each check says of a round's public bundle that holds a report with these counts."""
    made = rounds_made.make(tmp_path / "round")
    checks = {"ok": 30, "failed": 0, "not_checked": 5, **counts}
    ranking = digests.of_json(made.ranking)
    whole = digests.of_file(written(made, tmp_path / "first") / "whole" / "MANIFEST")
    made.signed("RoundAudited", {"bundle": whole, "ranking": ranking, "checks": checks}, by=AUDITOR)
    if revised:
        fields = {"ranking": digests.of_bytes(b"a newer one"), "policy": made.competition.ranking.digest}
        made.signed("RankingRevised", {**fields, "reason": "a mistake"}, by="organizer")
        # The bundle shows the older document: what the newest names is nobody's concern here.
        path = tmp_path / "bundle"
        made.write(path)
        for name in [name for name in names(path) if name.startswith(SECRETS)]:
            (path / name).unlink()
        made_bundles.mend(path)
    else:
        path = written(made, tmp_path / "second") / "public"
    report = verify.verify(path, log_key=made.signer.vkey)
    return {check.name: (check.status, f"{check.where} {check.meaning}") for check in report.checks}


def test_the_auditors_report_stands_for_what_the_public_bundle_withholds(playing: None, tmp_path: Path) -> None:
    found = reported(tmp_path)
    assert found["auditor's report"][0] == "ok"
    assert "lab: 30 checks ok, 0 FAILED, 5 NOT CHECKED; MANIFEST sha256:" in found["auditor's report"][1]
    whole = digests.of_file(tmp_path / "first" / "whole" / "MANIFEST")
    assert whole in found["auditor's report"][1]


def test_a_report_of_what_failed_fails(playing: None, tmp_path: Path) -> None:
    status, said = reported(tmp_path, failed=2)["auditor's report"]
    assert status == "FAILED" and "RoundAudited of lab" in said and "2 FAILED" in said


def test_a_report_of_nothing_says_nothing(playing: None, tmp_path: Path) -> None:
    assert reported(tmp_path, ok=0)["auditor's report"][0] == "NOT CHECKED"


def test_a_report_of_an_older_ranking_says_nothing_of_the_newest(playing: None, tmp_path: Path) -> None:
    status, said = reported(tmp_path, revised=True)["auditor's report"]
    assert status == "NOT CHECKED" and "revised since" in said


def test_a_ranking_that_is_revised_after_a_report_of_what_failed_makes_nothing_good(
    playing: None, tmp_path: Path
) -> None:
    status, said = reported(tmp_path, revised=True, failed=2)["auditor's report"]
    assert status == "FAILED" and "2 FAILED" in said and "the ranking was revised since" in said


def test_a_report_that_somebody_else_signed_is_named(playing: None, tmp_path: Path) -> None:
    made = rounds_made.make(tmp_path / "round")
    fields = {"bundle": digests.of_bytes(b"?"), "ranking": digests.of_json(made.ranking)}
    made.signed("RoundAudited", {**fields, "checks": {"ok": 35, "failed": 0, "not_checked": 0}}, by="organizer")
    report = verify.verify(made.write(tmp_path / "bundle"))
    (rules,) = [check for check in report.checks if check.name == "rules"]
    assert rules.status == "FAILED" and "RoundAudited" in rules.meaning
    assert "auditor's report" in by_status(report, "NOT CHECKED")
