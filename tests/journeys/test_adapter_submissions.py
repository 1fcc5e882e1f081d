"""Adapters as submissions: tried at home, sent, prepared, evaluated, ranked beside whole models, and made again by a stranger."""

import json
import shutil
from pathlib import Path
from typing import Any

import adapted
import pyarrow.parquet as pq
import pytest
import tiny
from players import Players, invitations
from typer.testing import CliRunner

import acclimate
from acclimate import demo_servers, round_jobs, verify
from acclimate.bundle_rerun import EntrantRerun
from acclimate.cli import competition as command
from acclimate.cli.main import app
from acclimate.client import connection, entrant, organizer, public_files
from acclimate_competitions import definition, digests, splits
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase
from acclimate_runners import adapter_files

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standing") / "competition"
    tiny.competition(folder)
    adapted.with_base(folder)
    return folder


def refused(call: Any, code: str = "model_invalid") -> str:
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.code == code
    return "\n".join([caught.value.sentence, *caught.value.problems])


def test_a_competition_with_bases_is_checked_with_them(built: Path, tmp_path: Path) -> None:
    assert command.checked(built)["competition"] == "marbles"
    assert sorted(splits.public_files(built))[:3] == [
        f"bases/small/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")
    ]
    folder = tmp_path / "competition"
    shutil.copytree(built, folder)
    (folder / "bases/small/tokenizer.json").write_text("{}", "utf-8")
    said = refused(lambda: command.checked(folder), "splits_invalid")
    assert "bases/small: the digest of its files is sha256:" in said and "the definition says" in said
    shutil.rmtree(folder / "bases")
    assert "bases/small: the base is missing" in refused(lambda: command.checked(folder), "splits_invalid")
    shutil.copytree(built / "bases/small", folder / "bases/small")
    shutil.copytree(built / "bases/small", folder / "bases/more")
    assert "the definition names no such base" in refused(lambda: command.checked(folder), "splits_invalid")


def test_a_base_that_no_rule_allows_is_the_organizers_fault(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "competition"
    shutil.copytree(built, folder)
    toml = folder / "competition.toml"
    toml.write_text(toml.read_text("utf-8").replace('["llama", "mamba"]', '["mamba"]'), "utf-8")
    adapter = adapted.adapter(tmp_path / "adapter", seed=1)
    for call in (lambda: command.checked(folder), lambda: acclimate.check(adapter, folder)):
        assert "bases/small: config.json: model_type is 'llama', allowed are mamba" in refused(call, "splits_invalid")


def test_kinds_and_bases_go_together(built: Path) -> None:
    raw = (built / "competition.toml").read_text("utf-8")
    line = next(line for line in raw.splitlines() if line.startswith("bases = "))
    for text, part in (
        (raw.replace(line, ""), "submission.bases names none, and kinds has 'lora-adapter'"),
        (raw.replace(', "lora-adapter"]', "]"), "submission.bases needs 'lora-adapter' among the kinds"),
        (raw.replace("small = ", "Small = "), "a base's name, and the digest of its files"),
        (raw.replace('"sha256:', '"md5:'), "a base's name, and the digest of its files"),
    ):
        assert part in refused(lambda text=text: definition.parse(text.encode()), "definition_invalid")
    assert definition.parse(raw.encode()).effective()["submission.bases.small"].startswith("sha256:")


def test_an_adapter_is_checked_prepared_and_evaluated_at_home(built: Path, tmp_path: Path) -> None:
    model = adapted.adapter(tmp_path / "adapter", seed=1)
    checked = acclimate.check(model, built)
    assert checked["architecture"] == "llama" and checked["fits"]
    (digest,) = definition.load(built).submission.bases.values()
    assert checked["base"] == {"name": "small", "digest": digest}
    assert acclimate.check(built / "bases/small", built)["base"] is None
    said = CliRunner().invoke(app, ["check", str(model), "--competition", str(built)]).stdout
    assert f"an adapter on the base small, {digest}" in said
    said = CliRunner().invoke(app, ["competition", "check", str(built)]).stdout
    assert f"base for adapters: small, {digest}" in said
    assert checked["bytes"] == sum(path.stat().st_size for path in model.iterdir())
    made = acclimate.prepare(model, built, out=tmp_path / "out", task="tint", lr=2e-2, seed=11)
    seed = made["tasks"]["tint"]["seeds"]["11"]
    assert seed["steps"] == 6 and seed["losses"][-1] < seed["losses"][0]
    # What is prepared is a whole model, which anybody may go on with.
    whole = tmp_path / "out" / seed["folder"]
    assert sorted(path.name for path in whole.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    told: dict[str, Any] = {"task": "tint", "entrant": "ada"}
    before = acclimate.evaluate(built / "bases/small", built, examples=tmp_path / "base.parquet", **told)
    on_it = acclimate.evaluate(model, built, examples=tmp_path / "adapter.parquet", **told)
    assert before["tasks"]["tint"]["n"] == on_it["tasks"]["tint"]["n"] == 8
    assert (tmp_path / "base.parquet").read_bytes() != (tmp_path / "adapter.parquet").read_bytes()
    assert acclimate.evaluate(whole, built, task="tint")["tasks"]["tint"]["n"] == 8
    # Files of several seeds are one entrant's repetitions.
    repeated = [tmp_path / f"{seed}.parquet" for seed in (11, 12)]
    for path in repeated:
        acclimate.evaluate(whole, built, examples=path, seed=int(path.stem), **told)
    ranked = acclimate.rank(items=repeated)
    assert [row["entrant"] for row in ranked["ranking"]] == ["ada"]
    assert any("means over 2 seeds" in note for note in ranked["notes"])
    # A prepared model's folder is called by its seed: it is named for the folder of its preparation.
    acclimate.evaluate(whole, built, task="tint", examples=tmp_path / "named.parquet", seed=11)
    assert set(pq.read_table(tmp_path / "named.parquet")["entrant"].to_pylist()) == {"out"}
    # Of one that lies elsewhere nobody knows whose it is.
    shutil.copytree(whole, tmp_path / "11")
    with pytest.raises(Refusal, match="called by a number alone") as caught:
        acclimate.evaluate(tmp_path / "11", built, task="tint", examples=tmp_path / "lost.parquet")
    assert (caught.value.code, caught.value.hint) == ("request_invalid", "--entrant NAME")
    assert not (tmp_path / "lost.parquet").exists()


def test_what_is_no_adapter_on_a_base_is_refused_at_home(built: Path, tmp_path: Path) -> None:
    other = adapted.adapter(tmp_path / "other", seed=1, base_model_name_or_path="hub/large")
    assert "base_model_name_or_path is 'hub/large'; the competition's bases are: small" in refused(
        lambda: acclimate.evaluate(other, built)
    )
    wide = adapted.adapter(tmp_path / "wide", seed=1, rank=8, r=4)
    assert "r and the base ask for [4, 16]" in refused(lambda: acclimate.evaluate(wide, built))
    plain = tmp_path / "plain"
    tiny.competition(plain)
    adapter = adapted.adapter(tmp_path / "adapter", seed=1)
    assert "is a lora-adapter by its files, allowed: hf-causal-lm" in refused(
        lambda: acclimate.evaluate(adapter, plain)
    )


class Standing(Players):
    """The people of a round in which ada and bela send adapters, celik-team a Mamba, and dora a Llama."""

    def __enter__(self) -> "Standing":
        super().__enter__()
        self.competition = adapted.with_base(self.built)
        return self

    def gather(self) -> "Standing":
        super().gather()
        models = self.where / "models"
        for name in ("ada", "bela", "celik-team"):
            shutil.rmtree(models / name)
        adapted.adapter(models / "ada", seed=1)
        adapted.adapter(models / "bela", seed=2, rank=2, use_rslora=True)
        adapted.mamba(models / "celik-team", seed=3)
        return self

    def submit(self) -> None:
        # Of the base an entrant gets all that the round commits to, and what stands on no base of it is refused before it is sent.
        theirs, own = self.people["ada"]
        found = public_files.download(theirs, self.id, self.where / "files")
        assert {f"bases/small/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")} < set(found)
        assert definition.load(self.where / "files").digest == self.competition.digest
        wrong = adapted.adapter(self.where / "wrong", seed=1, base_model_name_or_path="large")
        about: dict[str, Any] = {"title": "A model", "weights_after": "publish"}
        self.refuses("no base", lambda: entrant.submit(theirs, own, self.id, wrong, **about))
        other = {**about, "base": "large"}
        ada = self.where / "models" / "ada"
        self.refuses("another base", lambda: entrant.submit(theirs, own, self.id, ada, **other))
        super().submit()


@pytest.mark.slow
def test_a_whole_round_of_adapters_a_mamba_and_a_llama_is_ranked_and_made_again(tmp_path: Path) -> None:
    data = tmp_path / "server"
    with (
        demo_servers.Servers(data, runner="local") as servers,
        Standing(tmp_path, [servers.url], invitations(data), servers.check) as people,
    ):
        people.play()
        state, bundle = people.state(), people.bundle()
        with connection.Client(servers.url) as anybody:
            assert "bases/small/config.json" in dict(state.defined["files"])
            anybody.file(state.id, "bases/small/config.json", tmp_path / "config.json")
    assert state.phase == Phase.PUBLISHED and len(state.prepared) == 4 * 2 * 3
    assert people.refused["no base"].code == "model_invalid"
    assert people.refused["another base"].code == "manifest_invalid"
    rows = verify.recompute_ranking(bundle).document()["ranking"]
    assert len(rows) == 4 and all(row["score"] is not None for row in rows)
    for name in ("ada", "celik-team"):
        checks = verify.verify(bundle, rerun=EntrantRerun(name, people.where / "models" / name)).checks
        assert [check for check in checks if check.status == "FAILED"] == []
        (again,) = [check for check in checks if check.name == "re-run"]
        assert again.status == "ok", again


def test_whoever_makes_it_again_gets_its_own_base_and_no_other(built: Path) -> None:
    from types import SimpleNamespace

    files = {name: digests.of_file(path) for name, path in splits.public_files(built).items()}
    state: Any = SimpleNamespace(
        competition=definition.load(built),
        defined={"files": {**files, "bases/large/config.json": "sha256:" + "1" * 64}},
    )
    manifest = {"kind": "lora-adapter", "base": "small", "files": [{"name": "a", "sha256": "sha256:" + "2" * 64}]}
    model = round_jobs.model(state, manifest)
    assert set(model.base) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert model == round_jobs.with_base(state, dict(model.files), "small")
    shared = {f"splits/tint/{split}.parquet" for split in ("preparation", "validation")} | {"tokenizer.json"}
    assert set(round_jobs.public_files(state, ["tint"], model)) == shared | {f"bases/small/{n}" for n in model.base}
    whole = round_jobs.model(state, {**manifest, "kind": "hf-causal-lm"})
    assert whole.base == {} and whole.digest == model.digest
    assert set(round_jobs.public_files(state, ["tint"], whole)) == shared


def test_a_server_refuses_what_a_client_let_pass(tmp_path: Path, built: Path) -> None:
    """The files say one base, the manifest another: the strict reading of the server looks at both."""
    folder = adapted.adapter(tmp_path / "adapter", seed=1)
    given = adapter_files.of_folder(folder)
    rules, config = definition.load(built).submission, built / "bases/small/config.json"
    assert adapter_files.inspect_submitted(given, rules, on=("small", config)).architecture == "llama"
    said = refused(lambda: adapter_files.inspect_submitted(given, rules, on=("large", config)))
    assert "the competition's bases are: large" in said
    assert json.loads((folder / "adapter_config.json").read_text("utf-8"))["r"] == 4
    assert organizer._checked(built).digest == definition.load(built).digest
