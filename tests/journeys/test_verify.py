"""A stranger verifies a bundle: honest ones pass, every changed byte and every changed fact is named."""

import json
import random
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import made_bundles
import pyarrow as pa
import pytest
import rounds_made
from tampering import FACTS, change_cell, change_record, flip_ciphertext, lines_with
from waiting import WITHIN

from acclimate import log, verify
from acclimate.verify.report import Report
from acclimate_competitions import digests, tables
from acclimate_competitions.errors import Refusal

HONEST_GAPS = {"split view", "time", "honest preparation", "re-run"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def honest(made: rounds_made.Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def bundle(honest: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(honest, tmp_path / "bundle"))


def by_status(report: Report, status: str) -> dict[str, str]:
    return {check.name: check.where for check in report.checks if check.status == status}


# ---- honest bundles ------------------------------------------------------------------------------------------------


def test_an_honest_bundle_passes_and_says_what_it_can_not_show(made: rounds_made.Made, honest: Path) -> None:
    report = verify.verify(honest, log_key=made.signer.vkey)
    assert by_status(report, "FAILED") == {}
    assert set(by_status(report, "NOT CHECKED")) == HONEST_GAPS
    assert report.exit_code == 0
    assert report.round == made.round
    beside = {"opened rows", "auditor's report", "whose witnesses", "standing", "versions", "earlier rounds"}
    names = {number: rule.name for number, rule in enumerate(verify.CHECKS, start=1) if rule.name not in beside}
    assert {check.number: check.name for check in report.checks} == names


def test_without_the_logs_key_from_elsewhere_it_is_not_checked_whose_log_it_is(honest: Path) -> None:
    report = verify.verify(honest)
    assert set(by_status(report, "NOT CHECKED")) == HONEST_GAPS | {"whose log"}
    assert report.exit_code == 0


def test_another_logs_key_fails(honest: Path) -> None:
    other = log.Signer(rounds_made.ORIGIN, rounds_made.key("another log")).vkey
    assert by_status(verify.verify(honest, log_key=other), "FAILED") == {"whose log": "keys.json, log"}


def test_a_malformed_key_or_level_is_the_auditors_own_mistake(honest: Path) -> None:
    with pytest.raises(Refusal) as refused:
        verify.verify(honest, log_key="not a key")
    assert refused.value.code == "key_refused"
    with pytest.raises(Refusal) as refused:
        verify.verify(honest, levels=["moon"])
    assert refused.value.code == "request_invalid"


def test_a_failed_preparation_is_said_by_name(honest: Path) -> None:
    where = by_status(verify.verify(honest), "ok")["prepared"]
    assert where == "18 preparations of 3 entries; 1 failed: bea, size, seed 13"


def test_manifest_is_what_sha256sum_takes(honest: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "MANIFEST"], cwd=honest, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_evaluated_round_verifies_before_it_is_published(tmp_path: Path) -> None:
    made = rounds_made.make(tmp_path / "round", publish=False)
    path = made.write(tmp_path / "bundle")
    report = verify.verify(path, log_key=made.signer.vkey)
    assert by_status(report, "FAILED") == {}
    assert set(by_status(report, "NOT CHECKED")) == HONEST_GAPS | {"published"}
    assert verify.recompute_ranking(path).document() == made.ranking


def test_scores_and_ranking_can_be_recomputed_for_others(made: rounds_made.Made, honest: Path) -> None:
    assert verify.recompute_ranking(honest).digest == digests.of_json(made.ranking)
    scores = verify.recompute_scores(honest)
    assert scores.schema == tables.SCORES
    assert scores.num_rows == sum(table.num_rows for table in made.scores.values())


def test_nothing_is_recomputed_from_a_bundle_that_fails_on_the_way(bundle: Path) -> None:
    change_cell("predictions/ada/direct-tint-none.parquet", "loglikelihoods", 3, [-1.0, -2.0, -3.0])(bundle)
    made_bundles.mend(bundle)
    with pytest.raises(Refusal) as refused:
        verify.recompute_scores(bundle)
    assert refused.value.code == "bundle_invalid"
    assert "predictions/ada/direct-tint-none.parquet" in refused.value.sentence


def test_a_level_makes_its_checks_and_those_they_build_on(honest: Path) -> None:
    names = {level: {c.name for c in verify.verify(honest, levels=[level]).checks} for level in verify.LEVELS}
    assert "ciphertext" not in names["log"]
    assert {"receipts", "rules"} <= names["log"]
    assert {"holdout", "rules"} <= names["seal"]
    assert "ranking" not in names["seal"]
    assert {"ranking", "holdout", "rules", "submissions"} <= names["scores"]
    assert all({"manifest", "whose log", "entries", "keys"} <= found for found in names.values())


@pytest.mark.parametrize("level", verify.LEVELS)
def test_at_no_level_does_an_altered_log_pass_that_nobody_signed(
    level: str, made: rounds_made.Made, bundle: Path
) -> None:
    """The time of an unsigned record: only the checkpoint speaks against it."""
    change_record("EvaluationFinished", b'.000000Z"', b'.000001Z"')(bundle)
    made_bundles.mend(bundle)
    report = verify.verify(bundle, levels=[level], log_key=made.signer.vkey)
    assert report.exit_code == 1
    assert set(by_status(report, "FAILED")) - {"earlier checkpoints"} == {"entries"}
    assert "entries" in next(check.meaning for check in report.checks if check.name == "rules")
    assert "rules" in by_status(report, "NOT CHECKED")


# ---- bytes ---------------------------------------------------------------------------------------------------------


def test_one_byte_changed_in_any_file_is_named(made: rounds_made.Made, bundle: Path) -> None:
    draw = random.Random(5)
    names = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
    assert len(names) > 60
    for name in names:
        original = (bundle / name).read_bytes()
        changed = bytearray(original)
        place = draw.randrange(len(changed))
        changed[place] ^= 1 << draw.randrange(8)
        (bundle / name).write_bytes(changed)
        report = verify.verify(bundle, log_key=made.signer.vkey)
        (bundle / name).write_bytes(original)
        assert report.exit_code == 1, f"{name}, byte {place}"
        assert report.checks[0].name == "manifest"
        assert report.checks[0].status == "FAILED", f"{name}, byte {place}"
        assert name == "MANIFEST" or report.checks[0].where == name
    assert verify.verify(bundle).exit_code == 0


def test_a_missing_file_is_named_by_a_check_of_its_own(bundle: Path) -> None:
    """MANIFEST mended, so that only the other checks can notice."""
    names = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
    kinds = {name.split("/")[0]: name for name in names}  # the last of each kind
    for name in [kind for kind in kinds.values() if kind != "MANIFEST"]:
        if name.startswith("checkpoints/"):
            continue  # how many there are is no fact of the round
        original = (bundle / name).read_bytes()
        (bundle / name).unlink()
        made_bundles.mend(bundle)
        failed = by_status(verify.verify(bundle), "FAILED")
        (bundle / name).write_bytes(original)
        assert failed and "manifest" not in failed, name
        assert name in failed.values(), f"{name}: {failed}"


def test_no_bytes_whatever_end_the_audit_otherwise_than_with_a_report(bundle: Path) -> None:
    draw = random.Random(6)
    names = [path for path in sorted(bundle.rglob("*")) if path.is_file() and path.name != "MANIFEST"]
    for path in draw.sample(names, 24):
        original = path.read_bytes()
        cut = original[: draw.randrange(len(original))]
        path.write_bytes(
            draw.choice([b"", cut, b"[" * 100_000, b"{}", b"\xff\xfe", original + b"\n", draw.randbytes(400)])
        )
        made_bundles.mend(bundle)
        report = verify.verify(bundle)
        assert report.exit_code == 1, path
        assert all(check.where for check in report.failed)
        path.write_bytes(original)


# ---- facts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", FACTS)
def test_one_fact_changed_and_manifest_mended_is_named_by_its_own_check(
    what: str, made: rounds_made.Made, bundle: Path
) -> None:
    change, check, where = FACTS[what]
    change(bundle)
    made_bundles.mend(bundle)
    report = verify.verify(bundle, log_key=made.signer.vkey)
    failed = by_status(report, "FAILED")
    assert report.exit_code == 1
    assert "manifest" not in failed
    assert check in failed, failed
    assert where in failed[check]
    assert "malformed" not in " ".join(c.meaning for c in report.failed)


def test_every_kind_of_file_has_a_fact_above() -> None:
    """So that a new kind of file gets its own."""
    kinds = {where.split(",")[0].split("/")[0] for _, _, where in FACTS.values()}
    table = {"definition.toml", "public", "keys.json", "checkpoint", "checkpoints", "entries.jsonl", "receipts"}
    table |= {"submissions.jsonl", "holdout.sealed", "shares.json", "holdout", "predictions", "scores"}
    assert table | {"prepared.json", "ranking.json"} <= kinds


def test_a_bad_chunk_of_the_ciphertext_is_named(bundle: Path) -> None:
    flip_ciphertext(bundle)
    report = verify.verify(bundle)
    said = {check.name: check.meaning for check in report.failed}
    assert "block 0" in said["opening"]
    assert {"holdout", "predictions", "scores", "ranking"} <= set(by_status(report, "NOT CHECKED"))


def test_a_check_without_ground_says_which_one_it_stood_on(bundle: Path) -> None:
    (bundle / "shares.json").unlink()
    report = verify.verify(bundle)
    key = next(check for check in report.checks if check.name == "key")
    assert key.status == "NOT CHECKED"
    assert "shares" in key.meaning


# ---- those who hold keys -------------------------------------------------------------------------------------------


def audit_of(made: rounds_made.Made, folder: Path) -> Report:
    return verify.verify(made.write(folder / "bundle"), log_key=made.signer.vkey)


def test_an_evaluator_that_leaves_out_an_example_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest = rounds_made.predict

    def doubled(made: rounds_made.Made, *key: object) -> pa.Table:
        table = honest(made, *key)
        return table.take([0, 0, *range(2, table.num_rows)]) if key[0] == "bea" else table

    monkeypatch.setattr(rounds_made, "predict", doubled)
    monkeypatch.setattr(rounds_made, "rank", lambda made: {})
    made = rounds_made.make(tmp_path / "round")
    failed = by_status(audit_of(made, tmp_path), "FAILED")
    assert failed["predictions"] == "predictions/bea/direct-tint-none.parquet, row 1"


def test_an_organizer_who_signs_another_ranking_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest = rounds_made.rank

    def favourite_first(made: rounds_made.Made) -> dict:
        document = honest(made)
        first, second = document["ranking"][:2]
        first["entrant"], second["entrant"] = second["entrant"], first["entrant"]
        return document

    monkeypatch.setattr(rounds_made, "rank", favourite_first)
    report = audit_of(rounds_made.make(tmp_path / "round"), tmp_path)
    assert by_status(report, "FAILED") == {"ranking": "ranking.json, ranking, row 0, entrant"}
    assert "published" in by_status(report, "ok"), "the false ranking is the organizer's own"


def test_an_organizer_who_signed_another_ranking_than_is_shown_is_named(tmp_path: Path) -> None:
    made = rounds_made.make(tmp_path / "round", publish=False)
    fields = {"ranking": digests.of_bytes(b"another"), "policy": made.competition.ranking.digest, "reason": ""}
    made.signed("RankingPublished", fields, by="organizer")
    assert set(by_status(audit_of(made, tmp_path), "FAILED")) == {"published"}


def test_an_entry_prepared_from_another_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rounds_made, "base_of", lambda manifest: digests.of_bytes(b"a better one"))
    failed = by_status(audit_of(rounds_made.make(tmp_path / "round"), tmp_path), "FAILED")
    assert failed == {"prepared": "ModelPrepared of ada, tint, seed 11"}


def test_a_rate_chosen_against_the_rule_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest = rounds_made.fit_of

    def favoured(entrant: str, task: str, seed: int) -> dict:
        fit = honest(entrant, task, seed)
        return {**fit, "selected": {"lr": 0.005, "epoch": 6}} if entrant == "bea" else fit

    monkeypatch.setattr(rounds_made, "fit_of", favoured)
    failed = by_status(audit_of(rounds_made.make(tmp_path / "round"), tmp_path), "FAILED")
    assert failed == {"selection": "ModelPrepared of bea, tint, seed 11"}


def test_a_dealer_who_dealt_inconsistent_shares_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from acclimate import custody

    honest = custody.split

    def crooked(secret: bytes, *, k: int, n: int, random: Callable[[int], bytes]) -> list[bytes]:
        first, second, third = honest(secret, k=k, n=n, random=random)
        return [first, bytes(32), third]

    monkeypatch.setattr(custody, "split", crooked)
    report = audit_of(rounds_made.make(tmp_path / "round"), tmp_path)
    assert set(by_status(report, "FAILED")) == {"key"}
    assert "2" in next(check.meaning for check in report.failed)


def test_a_server_that_rewrites_the_log_contradicts_the_receipts(
    made: rounds_made.Made, bundle: Path, tmp_path: Path
) -> None:
    """It has the log's key, and signs a second history in which one acceptance came later."""
    entries = (bundle / "entries.jsonl").read_bytes().splitlines()
    number = lines_with(entries, b"SubmissionAccepted")[-1]
    document = json.loads(entries[number])
    document["at"] = document["at"].replace(".000000Z", ".000001Z")
    entries[number] = digests.canonical(document)
    (bundle / "entries.jsonl").write_bytes(b"".join(entry + b"\n" for entry in entries))
    root = log.root([digests.leaf_hash(entry) for entry in entries])
    (bundle / "checkpoint").write_text(log.sign_checkpoint(made.signer, len(entries), root), "utf-8")
    made_bundles.mend(bundle)
    failed = by_status(verify.verify(bundle, log_key=made.signer.vkey), "FAILED")
    assert set(failed) == {"earlier checkpoints", "receipts"}
    assert failed["receipts"] == f"receipts/{number}.tlog-proof"


# ---- ZIP -----------------------------------------------------------------------------------------------------------


def pack(folder: Path, to: Path, *, inside: str = "", method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(to, "w", method) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, inside + path.relative_to(folder).as_posix())
    return to


@pytest.mark.parametrize("inside", ["", "marbles-2027-1/"])
def test_the_same_bundle_in_a_zip_passes(made: rounds_made.Made, honest: Path, tmp_path: Path, inside: str) -> None:
    report = verify.verify(pack(honest, tmp_path / "bundle.zip", inside=inside), log_key=made.signer.vkey)
    assert by_status(report, "FAILED") == {}
    assert set(by_status(report, "NOT CHECKED")) == HONEST_GAPS


def test_a_byte_of_a_file_changed_in_a_zip_is_found(honest: Path, tmp_path: Path) -> None:
    path = pack(honest, tmp_path / "bundle.zip", method=zipfile.ZIP_STORED)
    original, draw = path.read_bytes(), random.Random(8)
    with zipfile.ZipFile(path) as archive:
        data = [m.header_offset + 30 + len(m.filename) + draw.randrange(m.compress_size) for m in archive.infolist()]
    for place in draw.sample(data, 12):
        changed = bytearray(original)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        report = verify.verify(path)
        assert report.exit_code == 1, place
        assert report.failed[0].where


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "a\\b", ".hidden", "a//b", "c:x"])
def test_a_zip_can_not_write_outside_its_folder(honest: Path, tmp_path: Path, name: str) -> None:
    path = pack(honest, tmp_path / "bundle.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), "mine")
    report = verify.verify(path)
    assert report.exit_code == 1
    assert "outside" in report.failed[0].where or "member" in report.failed[0].where
    assert not list(tmp_path.parent.glob("**/outside"))


def test_a_zip_with_a_link_a_doubled_name_or_a_bomb_is_refused(honest: Path, tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    path = pack(honest, tmp_path / "link.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    assert "link" in verify.verify(path).failed[0].where

    path = pack(honest, tmp_path / "double.zip")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("ranking.json", "{}")
    assert "ranking.json" in verify.verify(path).failed[0].where

    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("MANIFEST", "x")
    raw = bytearray(path.read_bytes())
    # The directory's record of the member claims 4 GiB less one byte.
    at = raw.index(b"PK\x01\x02") + 24
    raw[at : at + 4] = b"\xff\xff\xff\xfe"[::-1]
    path.write_bytes(raw)
    assert "bytes" in verify.verify(path).failed[0].meaning


def test_what_is_no_bundle_at_all_fails_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_text("hello", "utf-8")
    (tmp_path / "empty").mkdir()
    for name in ("text.zip", "empty", "absent"):
        report = verify.verify(tmp_path / name)
        assert report.exit_code == 1
        assert report.failed[0].where


def test_a_link_in_a_folder_is_refused(bundle: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    shutil.move(bundle / "ranking.json", target)
    (bundle / "ranking.json").symlink_to(target)
    assert by_status(verify.verify(bundle), "FAILED")["manifest"] == "ranking.json"


# ---- command -------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "acclimate", "verify", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=WITHIN, check=False)


def test_the_command_prints_numbered_lines_and_exits_0_or_1(
    made: rounds_made.Made, honest: Path, bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(made.signer.vkey + "\n", "utf-8")
    done = run(str(honest), "--log-key", str(tmp_path / "key"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"Round {made.round}"
    assert "\n 8  ok:          whose log: " in done.stdout
    assert "NOT CHECKED: split view: " in done.stdout
    # Two checks are of private holdouts, one of witnesses, two of earlier rounds and one of later versions, and get no line;
    # split view, time, honest preparation and re-run have no evidence.
    named = "split view, time, honest preparation, re-run"
    said = f"Nothing FAILED: {len(verify.CHECKS) - 10} checks ok, 4 NOT CHECKED: {named}."
    assert done.stdout.splitlines()[-1] == said
    assert "\x1b" not in done.stdout

    (bundle / "\x1b[2J").write_text("clears the screen", "utf-8")
    FACTS["a rank"][0](bundle)
    done = run(str(bundle), "--level", "scores")
    assert done.returncode == 1
    assert "FAILED:      ranking: ranking.json, ranking, row 1, rank: " in done.stdout
    assert "NOT CHECKED: whose log" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_command_gives_json_and_refuses_its_own_misuse(honest: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from acclimate.cli.main import app

    done = CliRunner().invoke(app, ["verify", str(honest), "--json"])
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert document["ok"] is True
    assert {"number", "name", "status", "meaning", "where"} == set(document["checks"][0])
    for arguments in ([str(tmp_path / "absent")], [str(honest), "--log-key", "k"], [str(honest), "--level", "moon"]):
        assert isinstance(CliRunner().invoke(app, ["verify", *arguments]).exception, Refusal)
