"""acclimate.rank and acclimate.stability on score tables: published numbers, invariances, declared policies."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

import acclimate
from acclimate.cli.main import app
from acclimate_competitions.errors import Refusal

SHARED = Path(os.environ.get("ACCLIMATE_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data"))
PAGE = Path(__file__).parents[2] / "docs/analysts.md"
CORPORA = ["wiki_2025", "stackexchange_2025", "arxiv_2025"]


def table(scores, *, names=None, tasks=None):
    scores = np.asarray(scores, dtype=float)
    names = names or [f"e{place:03}" for place in range(len(scores))]
    tasks = tasks or [f"t{place}" for place in range(scores.shape[1])]
    return pa.table({"model": pa.array(names, pa.string()), **dict(zip(tasks, scores.T, strict=True))})


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "acclimate", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


# ---- published numbers, by the commands ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def harmony():
    folder = SHARED / "lm-harmony"
    if not folder.is_dir():
        pytest.skip("the reference score tables are not on this machine (ACCLIMATE_REFERENCE_DATA)")
    tables = {"direct": folder / "direct_eval.csv", "prepared": folder / "train_before_test.csv"}
    with tables["direct"].open(encoding="utf-8") as stream:
        header = next(csv.reader(stream))
    return tables, [task for task in header[1:] if task not in CORPORA]


@pytest.fixture(scope="module")
def pisa():
    path = SHARED / "rank-confidence" / "pisa2018_math.csv"
    if not path.is_file():
        pytest.skip("the reference score tables are not on this machine (ACCLIMATE_REFERENCE_DATA)")
    return path, json.loads(path.with_name("expected.json").read_text(encoding="utf-8"))


def test_the_command_gives_the_published_agreement_of_benchmarks(harmony):
    tables, tasks = harmony
    given_tables = [f"--scores={name}={path}" for name, path in tables.items()]
    done = command("stability", *given_tables, "--tasks", ",".join(tasks), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = {
        "direct": (0.517332, 0.450, 0.574, 0.6958, 218),
        "prepared": (0.755234, 0.704, 0.796, 0.8636, 225),
    }
    for name, (mean, low, high, component, ties) in expected.items():
        row = found[name]
        assert (row["models"], row["tasks"], row["pairs"], row["ties"]) == (61, 24, 276, ties)
        assert row["mean_tau_b"] == pytest.approx(mean, abs=5e-7)
        assert (row["tau_b_low"], row["tau_b_high"]) == pytest.approx((low, high), abs=0.01)
        assert row["pc1_share"] == pytest.approx(component, abs=6e-5)
        assert row["noise_ceiling"] is None
    assert (found["pairs_risen"], found["same_winner"]) == (274, 9)


def test_one_family_and_perplexity_are_as_published(harmony):
    tables, tasks = harmony
    family = acclimate.stability(tables, tasks=tasks, models=["*qwen*"])
    assert family["direct"]["models"] == 26
    found = [family[name]["pc1_share"] for name in tables]
    assert found == pytest.approx([0.7366, 0.9280], abs=6e-5)
    beside = acclimate.stability(tables, lower=CORPORA, against=CORPORA, missing="exclude")
    assert (beside["direct"]["models"], beside["direct"]["tasks"], beside["against"]["direct"]["pairs"]) == (53, 24, 72)
    found = [beside["against"][name]["mean_tau_b"] for name in tables]
    assert found == pytest.approx([0.477, 0.740], abs=6e-4)
    assert any("left out" in note and "gemma" in note for note in beside["notes"])


def test_the_command_gives_the_published_top_set_and_interval(pisa):
    path, expected = pisa
    words = ["--scores", str(path), "--score", "math_score", "--se", "math_se", "--top", "5", "--json"]
    done = CliRunner().invoke(app, ["rank", *words])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert sorted(found["top_set"]) == expected["tau_best_5_coverage_0.95"]
    assert found["level"] == 0.95
    assert set(found["ranking"][0]) == {"entrant", "rank", "rank_low", "rank_high", "score", "se"}
    row = next(row for row in found["ranking"] if row["entrant"] == "United Kingdom")
    assert row["rank"] == 13
    assert abs(row["rank_low"] - 8) <= 1 and abs(row["rank_high"] - 23) <= 1
    assert acclimate.rank(path, score="math_score", se="math_se", top=5) == found
    wider = acclimate.rank(path, score="math_score", se="math_se", top=5, level=0.9)
    assert sorted(wider["top_set"]) == expected["tau_best_5_coverage_0.90"]


BLOCKS = re.findall(r"^```console\n\$ acclimate (.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("file", ["pisa2018_math.csv", "train_before_test.csv"])
def test_what_the_page_shows_is_what_the_command_prints(file, monkeypatch):
    (path,) = list(SHARED.rglob(file)) or pytest.skip("the reference score tables are not on this machine")
    monkeypatch.chdir(path.parent)
    (block,) = [block for block in BLOCKS if file in block]
    line, _, shown = block.replace("\\\n", " ").partition("\n")
    done = CliRunner().invoke(app, shlex.split(line), catch_exceptions=False)
    said = "\n".join(line.rstrip() for line in done.output.splitlines())
    for part in shown.split("…\n"):
        assert part.strip("\n") in said


def test_a_core_install_ranks_tables_and_names_what_the_rest_needs(tmp_path):
    (tmp_path / "t.csv").write_text("m,a,b\nx,1,0.1\ny,2,0.1\n", encoding="utf-8")
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("scipy", "pandas", "sklearn", "mlflow", "matplotlib"):
            raise ModuleNotFoundError(f"not in a core install: {name}")
sys.meta_path.insert(0, Block())
import acclimate
from acclimate_competitions.errors import Refusal
print(acclimate.rank("t.csv", score="a", se="b")["top_set"], acclimate.rank("t.csv", method="casp")["top"])
print(acclimate.stability({"t": "t.csv"})["t"]["pairs"])
for call in (acclimate.compare, acclimate.stability):
    try:
        call(items="t.csv")
    except Refusal as refusal:
        print(refusal.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split("\n") == ["['y'] 1", "1", "extra_missing", "extra_missing", ""], done.stderr


# ---- invariances ---------------------------------------------------------------------------------------------------


def numbers(found):
    return {key: value for key, value in found.items() if key != "tau_b"}


def near(one, other):
    return {key: pytest.approx(value, abs=1e-9, nan_ok=True) if isinstance(value, float) else value for key, value in one.items()} == other  # fmt: skip


@settings(max_examples=25)
@given(st.integers(10, 14), st.integers(2, 4), st.integers(0, 2**32 - 1), st.integers(-1000, 1000))
def test_neither_order_nor_names_nor_a_constant_move_a_stability(m, count, seed, constant):
    random = np.random.default_rng(seed)
    scores = random.integers(0, 6, size=(m, count)).astype(float)
    one = acclimate.stability({"t": table(scores)}, draws=50)["t"]
    rows, columns = random.permutation(m), random.permutation(count)
    names = [f"other {place}" for place in rows]
    other = acclimate.stability({"t": table(scores[rows][:, columns] + constant / 8, names=names)}, draws=50)["t"]
    keys = [tuple(sorted(stats.rankdata(column)[row] for column in scores.T)) for row in range(m)]
    if len(set(keys)) == len({tuple(row) for row in scores.tolist()}):
        assert near(numbers(one), numbers(other))
    else:  # only names tell some rows apart, and the draws of the bootstrap with them
        for key in ("mean_tau_b", "pc1_share", "ties"):
            assert near({key: one[key]}, {key: other[key]})


@settings(max_examples=25)
@given(
    st.integers(0, 9), st.integers(0, 2**32 - 1), st.integers(-64, 64), st.sampled_from(["marginal", "simultaneous"])
)
def test_neither_order_nor_names_nor_a_constant_move_a_ranking(m, seed, constant, sets):
    random = np.random.default_rng(seed)
    scores, errors = random.integers(0, 20, size=m) / 4, random.integers(0, 5, size=m) / 4
    names = [f"e{place}" for place in range(m)]

    def rank(places, shift=0.0, sign=1):
        found = acclimate.rank(
            pa.table({"who": pa.array([names[p] for p in places], pa.string()), "s": sign * scores[places] + shift, "e": errors[places]}),
            score="s", se="e", top=2, sets=sets, draws=300, lower_is_better=sign < 0,
        )  # fmt: skip
        rows = [(row["entrant"], row["rank"], row["rank_low"], row["rank_high"]) for row in found["ranking"]]
        return rows, found["top_set"]

    first = rank(np.arange(m))
    assert rank(random.permutation(m), constant) == first
    assert rank(random.permutation(m), sign=-1) == first
    held = {name: low <= place <= high for name, place, low, high in first[0]}
    assert all(held.values())
    assert [row[1] for row in first[0]] == [1 + int((scores > scores[names.index(row[0])]).sum()) for row in first[0]]


def test_a_duplicate_of_an_entrant_shares_its_rank_and_adds_ties():
    scores = np.random.default_rng(3).normal(size=(12, 3))
    twice = np.vstack([scores, scores[:1]])
    one, two = (acclimate.stability({"t": table(part)})["t"] for part in (scores, twice))
    assert (one["ties"], two["ties"]) == (0, 3)
    rows = acclimate.rank(
        pa.table({"m": ["a", "b", "copy of a"], "s": [1.0, 0.0, 1.0], "e": [0.1, 0.1, 0.1]}), score="s", se="e"
    )["ranking"]
    assert [(row["rank"], row["rank_low"], row["rank_high"]) for row in rows] == [(1, 1, 2), (1, 1, 2), (3, 3, 3)]


# ---- little, equal, missing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, 1])
def test_nobody_and_one_have_no_agreement(m):
    found = acclimate.stability({"t": table(np.ones((m, 3)))})
    row = found["t"]
    assert (row["models"], row["tasks"], row["pairs"], row["undefined_pairs"], row["ties"]) == (m, 3, 3, 3, 0)
    assert {row[key] for key in ("mean_tau_b", "tau_b_low", "tau_b_high", "pc1_share")} == {None}
    assert any("not informative" in note for note in found["notes"])
    found = acclimate.rank(
        pa.table({"m": pa.array(["x"][:m], pa.string()), "s": [0.5][:m], "e": [0.1][:m]}), score="s", se="e"
    )
    assert [(row["rank"], row["rank_low"], row["rank_high"]) for row in found["ranking"]] == [(1, 1, 1)][:m]
    assert found["top_set"] == ["x"][:m]


def test_a_constant_task_is_undefined_and_not_zero():
    scores = np.random.default_rng(1).normal(size=(12, 3))
    scores[:, 2] = 0.1  # whose mean is not 0.1
    found = acclimate.stability({"t": table(scores)})
    row = found["t"]
    assert row["undefined_pairs"] == 2
    assert row["mean_tau_b"] == pytest.approx(stats.kendalltau(scores[:, 0], scores[:, 1]).statistic)
    assert row["tau_b"]["t0"]["t2"] is None
    assert any("all models are equal in 't2'" in note for note in found["notes"])
    alone = acclimate.stability({"t": table(scores[:, :2])})["t"]
    assert row["pc1_share"] == pytest.approx(alone["pc1_share"])
    assert row["tau_b_low"] == pytest.approx(alone["tau_b_low"])


def test_all_tied_have_one_rank_and_all_of_it_is_open():
    found = acclimate.rank(table([[0.5, 0.1]] * 4, tasks=["s", "e"]), score="s", se="e")
    assert {(row["rank"], row["rank_low"], row["rank_high"]) for row in found["ranking"]} == {(1, 1, 4)}
    assert len(found["top_set"]) == 4


@pytest.mark.parametrize("count", [0, 1])
def test_one_task_has_no_pairs(count):
    row = acclimate.stability({"t": table(np.arange(24.0).reshape(12, 2))}, tasks=["t0"])["t"]
    assert (row["tasks"], row["pairs"], row["mean_tau_b"]) == (1, 0, None)


def test_missing_scores_are_refused_or_left_out_and_named():
    scores = np.random.default_rng(1).normal(size=(12, 3))
    scores[4, 1] = np.nan
    with pytest.raises(Refusal) as refused:
        acclimate.stability({"t": table(scores)})
    assert (refused.value.code, refused.value.problems) == ("scores_invalid", ("t, 'e004': 't1'",))
    found = acclimate.stability({"t": table(scores)}, missing="exclude")
    assert found["t"]["models"] == 11
    assert found["notes"] == ["left out, as a score is missing: 'e004'"]
    ranked = table(scores[:, :2], tasks=["s", "e"])
    ranked = ranked.set_column(2, "e", pa.array(np.abs(scores[:, 1])))
    with pytest.raises(Refusal, match="without score or se"):
        acclimate.rank(ranked, score="s", se="e")
    found = acclimate.rank(ranked, score="s", se="e", missing="exclude")
    assert (len(found["ranking"]), found["left_out"]) == (11, ["e004"])
    for call in (acclimate.rank, lambda t, **o: acclimate.stability({"t": t}, missing=o["missing"])):
        with pytest.raises(Refusal, match="unknown policy for missing scores 'guess'"):
            call(ranked, score="s", se="e", missing="guess")


def test_two_tables_are_compared_by_the_same_models_and_tasks():
    scores = np.random.default_rng(1).normal(size=(12, 3))
    one, other = (
        table(scores),
        table(scores[1:, ::-1], names=[f"e{p:03}" for p in range(1, 12)], tasks=["t2", "t1", "t0"]),
    )
    with pytest.raises(Refusal, match="different models") as refused:
        acclimate.stability({"one": one, "other": other})
    assert refused.value.problems == ("other lacks 'e000'",)
    found = acclimate.stability({"one": one, "other": other}, common=True)
    assert found["notes"] == ["left out: other lacks 'e000'"]
    assert found["one"] == found["other"]
    assert (found["pairs_risen"], found["same_winner"]) == (0, 3)
    with pytest.raises(Refusal, match="different tasks"):
        acclimate.stability({"one": one, "other": table(scores, tasks=["t0", "t1", "t3"])})


def test_a_task_in_which_lower_is_better_is_turned_or_asked_about():
    scores = np.random.default_rng(1).normal(size=(12, 1)) + 0.01 * np.random.default_rng(2).normal(size=(12, 3))
    scores[:, 2] *= -1
    found = acclimate.stability({"t": table(scores)})
    assert any("is lower better there" in note for note in found["notes"])
    turned = acclimate.stability({"t": table(scores)}, lower=["t2"])
    assert acclimate.stability({"t": table(scores)}, lower="t2", tasks="t0, t1,t2") == turned
    assert turned["t"]["mean_tau_b"] > 0.8
    assert turned["notes"] == []
    for wrong in ({"lower": ["t9"]}, {"against": ["t9"]}, {"tasks": ["t9"]}):
        with pytest.raises(Refusal, match="t9"):
            acclimate.stability({"t": table(scores)}, **wrong)


@pytest.mark.parametrize("name", ["pairs_risen", "same_winner", "notes", ""])
def test_reserved_names_are_refused(name):
    with pytest.raises(Refusal) as refused:
        acclimate.stability({name: table(np.eye(3))})
    assert refused.value.code == "name_invalid"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"score": "s"}, "no column of se"),
        ({"score": "s", "se": "x"}, "no column 'x'"),
        ({"score": "s", "se": "e", "level": 95}, "level"),
        ({"score": "s", "se": "e", "top": 0}, "top set"),
        ({"score": "s", "se": "e", "sets": "both"}, "sets"),
        ({"score": "s", "se": "s"}, "below 0"),
    ],
)
def test_what_can_not_be_ranked_is_refused(options, says):
    with pytest.raises(Refusal, match=says) as refused:
        acclimate.rank(table([[-1, 0.1], [0, 0.1]], tasks=["s", "e"]), **options)
    assert refused.value.hint


# ---- for people ----------------------------------------------------------------------------------------------------


def test_the_tables_for_people_say_what_they_show(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("model,s,e,f\nann,3,1,1\nbob,2,0.1,2\ncy,-9,1,3\n", encoding="utf-8")
    done = CliRunner().invoke(app, ["rank", "--scores", str(path), "--score", "s", "--se", "e"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["rank", "0.95", "set", "entrant", "score", "±", "se", "1", "3"]
    assert lines[1].split() == ["1", "1–2", "ann", "3.0", "1.0", "●┤"]
    assert "can be the best" in done.stdout
    done = CliRunner().invoke(app, ["stability", "--scores", f"mine={path}"])
    assert "not informative" in done.stdout
    assert "mean Kendall tau-b" in done.stdout
    refused = command("stability", "--scores", f"same_winner={path}", "--json")
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["code"] == "name_invalid"
    for words in (["--scores", str(path)], ["--scores", f"a={path}", "--scores", f"a={path}"], ["--scores", "=x"]):
        assert CliRunner().invoke(app, ["stability", *words]).exit_code == 2
