import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from acclimate.cli import competition as command
from acclimate_competitions import definition, digests, splits, tables
from acclimate_competitions.errors import Refusal


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("digits") / "data"
    command.build_into(definition.shipped("digits"), out)
    return out


def rows(path: Path) -> list[dict[str, Any]]:
    return tables.read(path).to_pylist()


def test_the_splits_have_their_sizes_and_columns(built: Path):
    for task in ("digit", "parity", "at-least-five", "prime"):
        for split, size in (("preparation", 800), ("validation", 197), ("holdout", 800)):
            table = tables.read(built / "splits" / task / f"{split}.parquet")
            assert (table.num_rows, table.schema.names) == (size, ["example", "input", "target", "cluster"])
    assert (built / "competition.toml").read_bytes() == (definition.shipped("digits") / "competition.toml").read_bytes()


def test_all_images_stand_in_exactly_one_split_and_the_tasks_agree(built: Path):
    images: dict[str, tuple[str, int]] = {}
    for split in splits.REQUIRED:
        for row in rows(built / f"splits/digit/{split}.parquet"):
            assert row["cluster"] not in images
            images[row["cluster"]] = (split, int(row["target"][1:]))
    assert sorted(images) == [f"image-{number:04d}" for number in range(1797)]
    truth = {
        "parity": lambda label: ("even", "odd")[label % 2],
        "at-least-five": lambda label: "five-or-more" if label > 4 else "below-five",
        "prime": lambda label: "is-prime" if label in {2, 3, 5, 7} else "not-prime",
    }
    for task, answer in truth.items():
        for split in splits.REQUIRED:
            found = rows(built / f"splits/{task}/{split}.parquet")
            assert {row["cluster"] for row in found} == {name for name, (s, _) in images.items() if s == split}
            assert all(row["target"] == answer(images[row["cluster"]][1]) for row in found)
            assert all(row["example"].removeprefix(task) == row["cluster"].removeprefix("image") for row in found)


def test_pixels_are_means_of_blocks_rounded_half_up(built: Path):
    from sklearn.datasets import load_digits

    image = load_digits().images[0]
    block = [[int(image[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].sum()) for x in range(4)] for y in range(4)]
    expected = " ".join(f"p{int(total / 4 + 0.5)}" for line in block for total in line)
    found = [row for split in splits.REQUIRED for row in rows(built / f"splits/prime/{split}.parquet")]
    assert next(row["input"] for row in found if row["cluster"] == "image-0000") == f"<prime> {expected}"


def test_every_word_is_one_known_token(built: Path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(built / "tokenizer.json"))
    unknown = tokenizer.token_to_id("<unk>")
    assert [tokenizer.token_to_id(word) for word in ("<pad>", "<bos>", "<unk>")] == [0, 1, 2]
    for task in definition.load(built).tasks:
        for row in rows(built / f"splits/{task.name}/holdout.parquet"):
            assert re.fullmatch(rf"<{task.name}>( p([0-9]|1[0-6])){{16}}", row["input"])
            ids = tokenizer.encode(f"{row['input']} {row['target']}").ids
            assert len(ids) == 18
            assert unknown not in ids
        assert {len(tokenizer.encode(choice).ids) for choice in task.choices} == {1}


def test_a_second_build_writes_the_same_bytes_and_replaces_the_first(built: Path, tmp_path: Path):
    before = digests.of_tree((str(p.relative_to(built)), p) for p in sorted(built.rglob("*")) if p.is_file())
    out = tmp_path / "again"
    for _ in range(2):
        result = CliRunner().invoke(command.app, ["build", "digits", "--out", str(out), "--json"])
        assert result.exit_code == 0, result.output
    assert digests.of_tree((str(p.relative_to(out)), p) for p in sorted(out.rglob("*")) if p.is_file()) == before
    assert json.loads(result.stdout)["tasks"]["digit"]["holdout"]["rows"] == 800
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_a_build_beside_its_own_result_builds_what_is_shipped(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As the organizers' page has it, typed a second time: `digits` is a folder without a build.py by then."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(built, tmp_path / "digits")
    result = CliRunner().invoke(command.app, ["build", "digits", "--out", "digits"])
    assert result.exit_code == 0, result.output
    (tmp_path / "mine").mkdir()
    refused = CliRunner().invoke(command.app, ["build", "mine", "--out", "out"])
    assert isinstance(refused.exception, Refusal) and "mine" in str(refused.exception)
    # What is there is shown, not what is shipped.
    (tmp_path / "digits" / "competition.toml").write_text("nonsense = 1\n", "utf-8")
    assert isinstance(CliRunner().invoke(command.app, ["show", "digits"]).exception, Refusal)


def test_build_leaves_a_folder_of_other_things_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work", "utf-8")
    with pytest.raises(Refusal, match="something else than a built competition") as caught:
        command.build_into(definition.shipped("digits"), tmp_path)
    assert caught.value.code == "file_unreadable"
    assert (tmp_path / "thesis.txt").exists()


def test_a_build_that_needs_a_missing_package_says_so(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "competition.toml").write_bytes((definition.shipped("digits") / "competition.toml").read_bytes())
    (source / "build.py").write_text("import a_package_that_nobody_has\n", "utf-8")
    with pytest.raises(Refusal, match="a_package_that_nobody_has") as caught:
        command.build_into(source, tmp_path / "out")
    assert caught.value.code == "extra_missing"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_check_and_show(built: Path):
    runner = CliRunner()
    checked = runner.invoke(command.app, ["check", str(built), "--json"])
    assert json.loads(checked.stdout)["digest"] == definition.load(built).digest
    assert (
        "parity: preparation 800, validation 197, holdout 800"
        in runner.invoke(command.app, ["check", str(built)]).stdout
    )
    shown = json.loads(runner.invoke(command.app, ["show", "digits", "--json"]).stdout)["values"]
    assert shown["preparation.seeds"] == {"value": [11, 12, 13], "from": "line 71"}
    assert shown["round.opens"] == {"value": None, "from": "default"}
    assert re.search(r"custody\.threshold +2  # line 17\n", runner.invoke(command.app, ["show", str(built)]).stdout)


def test_check_names_what_is_wrong(built: Path, tmp_path: Path):
    (tmp_path / "competition.toml").write_bytes((built / "competition.toml").read_bytes())
    result = CliRunner().invoke(command.app, ["check", str(tmp_path)])
    assert isinstance(result.exception, Refusal)
    assert "is not built" in result.exception.sentence
    # Begun, all that is missing is named at once.
    (tmp_path / "splits" / "digit").mkdir(parents=True)
    (tmp_path / "splits" / "digit" / "holdout.parquet").write_bytes(b"")
    result = CliRunner().invoke(command.app, ["check", str(tmp_path)])
    assert isinstance(result.exception, Refusal)
    assert len(result.exception.problems) == 12


def test_the_readme_says_that_the_data_are_public():
    readme = (definition.shipped("digits") / "README.md").read_text("utf-8")
    assert "The data are public. A round on them shows the protocol, not blindness" in readme
    assert "CC BY 4.0" in readme


def test_the_page_draws_two_rounds_whose_holdouts_share_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    repository = Path(__file__).parents[2]
    page = (repository / "competitions" / "digits" / "README.md").read_text("utf-8")
    found = re.search(r"## A next round\n.*?```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    (tmp_path / "competitions").symlink_to(repository / "competitions")
    monkeypatch.chdir(tmp_path)
    exec(found[1], {})
    images: list[set[str]] = []
    for number in (1, 2):
        folder = tmp_path / f"digits-{number}"
        loaded = definition.load(folder)
        assert splits.check(folder, loaded)["tasks"]["digit"]["holdout"]["rows"] == 400
        images.append({row["input"] for row in rows(folder / "splits" / "digit" / "holdout.parquet")})
    assert [len(one) for one in images] == [400, 400]
    assert not images[0] & images[1]
