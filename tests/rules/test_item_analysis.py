"""acclimate.rank, compare and stability by example: against other ways to compute them, invariances, policies, coverage."""

import json
import math

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

import acclimate
from acclimate.cli.main import app
from acclimate_competitions import confidence
from acclimate_competitions.errors import Refusal

ABILITIES = np.linspace(-0.6, 0.6, 11)


def evaluated(*, sets=("one",), n=60, seed=0, abilities=ABILITIES, seeds=1, cluster=1):
    """A long table of right and wrong, of items whose difficulty all entrants share."""
    random = np.random.default_rng(seed)
    rows = []
    for of in sets:
        hard = random.normal(size=n)
        for place, ability in enumerate(abilities):
            for run in range(seeds):
                right = random.normal(size=n) + ability > hard
                rows += [
                    {"entrant": f"e{place:02}", "set": of, "example": f"{of}-{i}", "cluster": f"{of}-{i // cluster}", "seed": run, "score": float(right[i])}
                    for i in range(n)
                ]  # fmt: skip
    frame = pandas.DataFrame(rows)
    kept = [
        "entrant",
        "set",
        "example",
        "score",
        *(["cluster"] if cluster > 1 else []),
        *(["seed"] if seeds > 1 else []),
    ]
    return frame[kept]


def without_names(found):
    return {key: value for key, value in found.items() if key not in ("a", "b", "notes")}


# ---- rank ----------------------------------------------------------------------------------------------------------


def test_ranks_are_those_of_the_joint_covariance():
    frame = evaluated()
    matrix = frame.pivot(index="entrant", columns="example", values="score").to_numpy()
    n = matrix.shape[1]
    covariance = np.cov(matrix) / n
    rows = {row["entrant"]: row for row in acclimate.rank(items=frame)["ranking"]}
    names = sorted(rows)
    assert [rows[name]["score"] for name in names] == pytest.approx(matrix.mean(axis=1).tolist())
    assert [rows[name]["se"] for name in names] == pytest.approx(np.sqrt(np.diag(covariance)).tolist())
    order = sorted(range(len(names)), key=lambda p: (-matrix[p].mean(), rows[names[p]]["se"], names[p]))
    plain = confidence.rank_sets(
        matrix.mean(axis=1)[order], covariance[np.ix_(order, order)], kind="marginal", level=0.95, draws=20_000, seed=1
    )
    expected = dict(
        zip([names[p] for p in order], zip(plain.low.tolist(), plain.high.tolist(), strict=True), strict=True)
    )
    assert {name: (row["rank_low"], row["rank_high"]) for name, row in rows.items()} == expected


def test_items_that_are_hard_for_all_tell_entrants_apart_better_than_their_errors_alone():
    frame = evaluated(n=300, abilities=[0.0, 0.0, 0.3], seed=3)
    hard = frame.groupby("example")["score"].transform("mean")
    frame["score"] = hard * 10 + frame["score"]  # a large part that all share
    joint = acclimate.rank(items=frame)
    means = frame.groupby("entrant")["score"].agg(["mean", "sem"]).reset_index()
    alone = acclimate.rank(means, score="mean", se="sem")
    assert len(joint["top_set"]) < len(alone["top_set"]) == 3


def test_clusters_widen_the_errors_and_are_said():
    frame = evaluated(n=100, cluster=10)
    frame["score"] = frame.groupby(["entrant", "cluster"])["score"].transform("first")
    found = acclimate.rank(items=frame)
    alone = acclimate.rank(items=frame.drop(columns="cluster"))
    assert found["ranking"][5]["se"] > 2 * alone["ranking"][5]["se"]
    assert any("10 clusters" in note for note in found["notes"])


def test_names_that_stand_in_several_sets_are_one_cluster_and_said():
    frame = evaluated(n=40, sets=("one", "two"))
    same = frame.assign(example=frame["example"].str.split("-").str[1])
    note = "40 examples of 40 stand in several sets under one name: errors take them as the same"
    for found in (acclimate.rank(items=same), acclimate.stability(items=same), acclimate.compare(items=same)):
        assert note in found["notes"]
    assert not [note for note in acclimate.rank(items=frame)["notes"] if "under one name" in note]
    few = frame.assign(example=frame["example"].replace("two-3", "one-3"))
    (told,) = [note for note in acclimate.rank(items=few)["notes"] if "under one name" in note]
    assert told.startswith("1 example of 79 stands in several sets")
    of_documents = evaluated(n=40, sets=("one", "two"), cluster=4)
    of_documents["cluster"] = of_documents["cluster"].str.split("-").str[1]
    assert any(note.startswith("10 clusters of 10 stand") for note in acclimate.rank(items=of_documents)["notes"])


def test_a_document_of_two_rounds_is_one_cluster_without_harm_where_names_fell_together():
    random = np.random.default_rng(1)
    rejected = {"same": 0, "accident": 0}
    for _ in range(300):
        for kind in rejected:
            first = random.normal(size=20)
            second = first if kind == "same" else random.normal(size=20)
            apart = [common * 0.9 + random.normal(size=20) * 0.4 for common in (first, second)]
            frame = pandas.DataFrame(
                [
                    {"entrant": name, "set": of, "example": f"d{place}", "score": score}
                    for of, scores in zip("ab", apart, strict=True)
                    for place, value in enumerate(scores)
                    for name, score in (("x", value), ("y", 0.0))
                ]
            )
            found = acclimate.compare("x", "y", items=frame, draws=1)
            rejected[kind] += found["low"] > 0 or found["high"] < 0
    assert all(0.02 <= count / 300 <= 0.09 for count in rejected.values())


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.integers(-4, 4))
def test_neither_order_nor_names_nor_a_constant_move_a_ranking_by_items(seed, constant):
    random = np.random.default_rng(seed)
    frame = evaluated(n=20, sets=("one", "two"), seed=seed, abilities=random.normal(size=4))
    names = {f"e{place:02}": f"other {place}" for place in range(4)}
    other = frame.sample(frac=1, random_state=seed % 2**31)
    other["score"] += constant
    places = [
        [
            (row["entrant"], row["rank"], row["rank_low"], row["rank_high"])
            for row in acclimate.rank(items=table, draws=400)["ranking"]
        ]
        for table in (frame, other)
    ]
    assert places[0] == places[1]
    other["entrant"] = other["entrant"].map(names)
    renamed = acclimate.rank(items=other, draws=400)["ranking"]
    assert [(row["entrant"], row["rank"]) for row in renamed] == [(names[row[0]], row[1]) for row in places[0]]


# ---- compare -------------------------------------------------------------------------------------------------------


def test_two_entrants_are_compared_as_textbooks_do():
    frame = evaluated(n=120)
    wide = frame.pivot(index="example", columns="entrant", values="score")
    a, b = wide["e09"], wide["e03"]
    found = acclimate.compare("e09", "e03", items=frame)
    assert found["difference"] == pytest.approx(a.mean() - b.mean())
    assert found["se_paired"] == pytest.approx((a - b).std(ddof=1) / math.sqrt(120))
    assert found["se_unpaired"] == pytest.approx(math.hypot(a.std(ddof=1), b.std(ddof=1)) / math.sqrt(120))
    low, high = stats.t.interval(0.95, 119, loc=found["difference"], scale=found["se_paired"])
    assert (found["low"], found["high"]) == (pytest.approx(low), pytest.approx(high))
    more, less = int((a > b).sum()), int((a < b).sum())
    assert (found["only_a"], found["only_b"]) == (more, less)
    assert found["mcnemar_p"] == pytest.approx(stats.binomtest(more, more + less).pvalue)
    assert found["permutation_p"] == pytest.approx(found["mcnemar_p"])
    theirs = stats.wilcoxon(a - b, zero_method="wilcox", correction=True, method="asymptotic").pvalue
    assert found["wilcoxon_p"] == pytest.approx(theirs)
    turned = acclimate.compare("e03", "e09", items=frame)
    assert turned["difference"] == -found["difference"]
    assert turned["permutation_p"] == found["permutation_p"]
    one_sided = acclimate.compare("e09", "e03", items=frame, alternative="greater")
    assert one_sided["wilcoxon_p"] == found["wilcoxon_p_one_sided"] < found["wilcoxon_p"]


def test_without_names_all_pairs_are_adjusted():
    frame = evaluated(n=80, abilities=np.linspace(0, 1, 4))
    found = acclimate.compare(items=frame)
    assert len(found["pairs"]) == 6
    assert all(row["difference"] >= 0 for row in found["pairs"])
    values = [row["permutation_p"] for row in found["pairs"]]
    smallest = min(range(6), key=values.__getitem__)
    assert found["pairs"][smallest]["permutation_p_holm"] == pytest.approx(min(1.0, 6 * values[smallest]))
    both = acclimate.compare("e03", "e00", items=frame, all=True)
    assert (both["a"], len(both["pairs"])) == ("e03", 6)
    assert len(acclimate.compare(items=frame, alternative="greater")["pairs"]) == 12
    losses = acclimate.compare(items=frame.assign(score=1 - frame["score"]), lower_is_better=True)
    for row, loss in zip(found["pairs"], losses["pairs"], strict=True):
        assert (loss["a"], loss["b"], loss["difference"]) == (row["a"], row["b"], pytest.approx(-row["difference"]))
        assert [loss[key] for key in ("only_a", "mcnemar_p", "wilcoxon_p_one_sided")] == [
            row[key] for key in ("only_a", "mcnemar_p", "wilcoxon_p_one_sided")
        ]


def test_entrants_that_answer_alike_do_not_differ():
    frame = evaluated(n=30, abilities=[0.0])
    twin = frame.assign(entrant="twin")
    found = acclimate.compare("e00", "twin", items=pandas.concat([frame, twin]))
    assert (found["difference"], found["se_paired"]) == (0.0, 0.0)
    assert {found[key] for key in ("mcnemar_p", "permutation_p", "wilcoxon_p", "wilcoxon_p_one_sided")} == {1.0}


def test_units_are_clusters_where_there_are_some():
    frame = evaluated(n=100, cluster=10, abilities=[0.0, 0.4])
    found = acclimate.compare("e01", "e00", items=frame)
    wide = frame.pivot(index="example", columns="entrant", values="score")
    cluster = frame.drop_duplicates("example").set_index("example")["cluster"]
    sums = (wide["e01"] - wide["e00"]).groupby(cluster).sum().to_numpy()
    assert found["clusters"] == 10
    assert found["wilcoxon_p"] == pytest.approx(stats.wilcoxon(sums, correction=True, method="asymptotic").pvalue)
    assert found["mcnemar_p"] is None
    assert any("cluster" in note for note in found["notes"])


def test_seeds_are_averaged_and_their_spread_counts():
    frame = evaluated(n=60, seeds=3, abilities=[0.0, 0.3])
    found = acclimate.rank(items=frame)
    means = frame.groupby("entrant")["score"].mean()
    assert {row["entrant"]: row["score"] for row in found["ranking"]} == pytest.approx(means.to_dict())
    assert any("3 seeds" in note for note in found["notes"])
    assert acclimate.compare("e01", "e00", items=frame)["mcnemar_p"] is None


@pytest.mark.parametrize(
    ("names", "options", "says"),
    [
        (("e00", "nobody"), {}, "nobody is called 'nobody'"),
        (("e00", "e00"), {}, "itself"),
        (("e00", None), {}, "alone"),
        (("e00", "e01"), {"alternative": "both"}, "alternative"),
        (("e00", "e01"), {"tasks": ["x"]}, "no set 'x'"),
        (("e00", "e01"), {"protocol": "direct"}, "no column 'protocol'"),
        (("e00", "e01"), {"level": 1.0}, "level"),
    ],
)
def test_what_can_not_be_compared_is_refused(names, options, says):
    with pytest.raises(Refusal, match=says) as refused:
        acclimate.compare(*names, items=evaluated(n=5, abilities=[0.0, 0.1]), **options)
    assert refused.value.code == "scores_invalid"
    assert refused.value.hint


# ---- stability -----------------------------------------------------------------------------------------------------


def test_sets_have_their_accuracies_and_agree_up_to_the_ceiling():
    frame = evaluated(sets=("2026", "2027"), n=200)
    found = acclimate.stability(items=frame)
    assert set(found["sets"]) == {"2026", "2027"}
    one = found["sets"]["2026"]
    assert (one["n"], one["interval"]) == (200, "clopper-pearson")
    for row in one["ranking"]:
        right = int(frame[(frame["set"] == "2026") & (frame["entrant"] == row["entrant"])]["score"].sum())
        assert row["correct"] == right
        assert row["low"] == pytest.approx(stats.beta.ppf(0.025, right, 200 - right + 1))
        assert row["high"] == pytest.approx(stats.beta.ppf(0.975, right + 1, 200 - right))
        assert row["rank_low"] <= row["rank"] <= row["rank_high"]
    wide = frame.pivot_table(index="entrant", columns="set", values="score").round(12)
    assert found["tau_b"] == pytest.approx(stats.kendalltau(wide["2026"], wide["2027"]).statistic)
    assert found["tau_b_low"] <= found["tau_b"] <= found["tau_b_high"]
    assert found["noise_ceiling_low"] < found["noise_ceiling"] < found["noise_ceiling_high"]
    # Both sets rank alike but for noise: halves of two sets agree as halves of one do.
    assert found["half_agreement"] == pytest.approx(found["noise_ceiling"], abs=0.08)
    assert [pair["sets"] for pair in found["pairs"]] == [["2026", "2027"]]
    shuffled = acclimate.stability(items=frame.sample(frac=1, random_state=1))
    assert shuffled == found


def test_the_ceiling_is_the_agreement_of_random_halves():
    frame = evaluated(n=100, seed=5)
    wide = frame.pivot(index="example", columns="entrant", values="score").to_numpy()
    random = np.random.default_rng(0)
    taus = []
    for _ in range(400):
        order = random.permutation(100)
        taus.append(
            stats.kendalltau(wide[order[:50]].mean(axis=0).round(9), wide[order[50:]].mean(axis=0).round(9)).statistic
        )
    found = acclimate.stability(items=frame)
    assert found["noise_ceiling"] == pytest.approx(np.mean(taus), abs=0.025)
    assert found["noise_ceiling_low"] == pytest.approx(np.quantile(taus, 0.025), abs=0.06)
    assert found["tau_b"] is None and found["pairs"] == []


def test_other_scores_have_intervals_by_t():
    frame = evaluated(n=40)
    frame["score"] = frame["score"] * 2 + np.random.default_rng(1).normal(size=len(frame))
    one = acclimate.stability(items=frame)["sets"]["one"]
    row = one["ranking"][0]
    values = frame[frame["entrant"] == row["entrant"]]["score"]
    low, high = stats.t.interval(0.95, 39, loc=values.mean(), scale=values.sem())
    assert (one["interval"], row["correct"]) == ("t", None)
    assert (row["low"], row["high"]) == (pytest.approx(low), pytest.approx(high))


def test_few_entrants_are_not_informative_and_equal_ones_have_no_agreement():
    found = acclimate.stability(items=evaluated(sets=("a", "b"), n=20, abilities=[0.0, 0.5]))
    assert found["tau_b_low"] is None
    assert any("not informative" in note for note in found["notes"])
    equal = evaluated(sets=("a", "b"), n=20)
    equal["score"] = 1.0
    found = acclimate.stability(items=equal)
    assert (found["tau_b"], found["noise_ceiling"], found["half_agreement"]) == (None, None, None)
    assert {(row["rank"], row["rank_low"], row["rank_high"]) for row in found["sets"]["a"]["ranking"]} == {(1, 1, 11)}


# ---- policies, and little of everything ----------------------------------------------------------------------------


def test_missing_scores_are_refused_left_out_or_counted_as_wrong():
    frame = evaluated(n=30, abilities=[0.0, 0.2, 0.4])
    gap = frame.drop(index=frame.index[3:10]).reset_index(drop=True)
    gap.loc[20, "score"] = np.nan
    for call in (
        lambda **o: acclimate.rank(items=gap, **o),
        lambda **o: acclimate.compare("e00", "e01", items=gap, **o),
        lambda **o: acclimate.stability(items=gap, **o),
    ):
        with pytest.raises(Refusal, match="8 scores are missing") as refused:
            call()
        assert refused.value.problems == ("'e00': 8 of 30 in one",)
        with pytest.raises(Refusal, match="policy"):
            call(missing="guess")
    known = gap[gap["entrant"] == "e00"]["score"].dropna()
    left = acclimate.rank(items=gap, missing="exclude")
    rows = {row["entrant"]: row["score"] for row in left["ranking"]}
    assert rows["e00"] == pytest.approx(known.mean())
    assert any("8 of 30" in note for note in left["notes"])
    worst = acclimate.rank(items=gap, missing="worst")
    assert {row["entrant"]: row["score"] for row in worst["ranking"]}["e00"] == pytest.approx(known.sum() / 30)
    pair = acclimate.compare("e00", "e01", items=gap, missing="exclude")
    assert (pair["n"], pair["left_out"]) == (22, 8)
    assert acclimate.compare("e02", "e01", items=gap)["n"] == 30
    with pytest.raises(Refusal, match="worst is not known"):
        acclimate.rank(items=gap.assign(score=gap["score"] * 3), missing="worst")


def test_an_entrant_without_a_set_is_left_out_and_named():
    frame = evaluated(sets=("a", "b"), n=10)
    gap = frame[(frame["set"] != "b") | (frame["entrant"] != "e04")]
    found = acclimate.rank(items=gap, missing="exclude")
    assert found["left_out"] == ["e04"]
    assert len(found["ranking"]) == 10
    assert acclimate.stability(items=gap, missing="exclude")["entrants"] == 10


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: pandas.concat([t, t[:1]]), "two rows of the same key: entrant 'e00', set 'one', example 'one-0'"),
        (lambda t: t.assign(protocol=["direct", "prepared"] * (len(t) // 2)), "mixes 2 protocols"),
        (lambda t: t.assign(metric=["acc", "f1"] * (len(t) // 2)), "mixes 2 metrics"),
        (lambda t: t.assign(score="good"), "should be a finite number"),
        (lambda t: t.assign(cluster=[f"c{i % 3}" for i in range(len(t))]), "more than one cluster"),
        (lambda t: t.drop(columns="example"), "no table of scores by example"),
        (lambda t: t.assign(example=None), "without 'example'"),
    ],
)
def test_tables_that_are_none_are_refused(change, says):
    frame = evaluated(n=4, abilities=[0.0, 0.1])
    for call in (acclimate.rank, acclimate.stability):
        with pytest.raises(Refusal, match=says) as refused:
            call(items=change(frame))
        assert refused.value.code == "scores_invalid"


def test_rounds_and_tasks_in_one_table_are_sets_each():
    frame = evaluated(sets=("a", "b"), n=10, abilities=[0.0, 0.4]).rename(columns={"set": "task"})
    both = pandas.concat([frame.assign(round="1"), frame.assign(round="2", score=1 - frame["score"])])
    found = acclimate.stability(items=both)
    assert set(found["sets"]) == {"a / 1", "a / 2", "b / 1", "b / 2"}
    assert any("combination of 'task', 'round'" in note for note in found["notes"])
    assert set(acclimate.stability(items=frame.assign(round="1"))["sets"]) == {"a", "b"}


def test_one_protocol_of_two_is_chosen_and_said():
    frame = evaluated(n=10)
    both = pandas.concat([frame.assign(protocol="direct"), frame.assign(protocol="prepared", score=1 - frame["score"])])
    found = acclimate.rank(items=both, protocol="direct")
    assert found["ranking"] == acclimate.rank(items=frame)["ranking"]
    assert any("110 of 220 rows" in note for note in found["notes"])
    with pytest.raises(Refusal, match="no protocol 'other'"):
        acclimate.rank(items=both, protocol="other")


def test_several_tables_are_joined_by_what_their_columns_are(tmp_path):
    frame = evaluated(sets=("a", "b"), n=10, abilities=[0.0, 0.4, 0.8])
    own = [part for _, part in frame.groupby("entrant")]
    own[1] = own[1].rename(columns={"entrant": "Model", "set": "task", "example": "doc_id"}).assign(note="x")
    own[2].to_csv(tmp_path / "third.csv", index=False)
    joined = acclimate.stability(items=[own[0], own[1], tmp_path / "third.csv"])
    assert {**joined, "notes": []} == {**acclimate.stability(items=frame), "notes": []}
    assert any("not looked at: 'note'" in note for note in joined["notes"])


@pytest.mark.parametrize(
    ("change", "says", "problem"),
    [
        (lambda other: other.assign(seed=1), "can't be joined", "seed: not in table 1"),
        (lambda other: other.assign(round="1"), "can't be joined", "round: not in table 1"),
        (lambda other: other.drop(columns="entrant"), "can't be joined", "entrant: not in table 2"),
        (lambda other: other.assign(entrant="e00"), "10 scores stand twice", "e00, a-0, a: table 1 row 1, table 2 row 1"),
    ],
)  # fmt: skip
def test_tables_that_can_not_be_joined_are_refused(change, says, problem):
    first, other = (part for _, part in evaluated(sets=("a",), n=10, abilities=[0.0, 0.4]).groupby("entrant"))
    with pytest.raises(Refusal, match=says) as caught:
        acclimate.rank(items=[first, change(other)])
    assert caught.value.problems[0] == problem


def test_a_round_is_not_joined_with_tables(tmp_path):
    (tmp_path / "MANIFEST").touch()
    with pytest.raises(Refusal, match="is a round, which isn't joined with other tables"):
        acclimate.rank(items=[evaluated(n=10), tmp_path])
    with pytest.raises(Refusal, match="no table is given"):
        acclimate.rank(items=[])


@pytest.mark.parametrize("m", [0, 1])
def test_nobody_and_one(m):
    frame = evaluated(n=6, abilities=[0.0])[: 6 * m]
    frame = frame.astype({"entrant": str, "set": str, "example": str})
    found = acclimate.rank(items=frame)
    assert [(row["rank"], row["rank_low"], row["rank_high"]) for row in found["ranking"]] == [(1, 1, 1)] * m
    assert acclimate.compare(items=frame)["pairs"] == []
    assert acclimate.stability(items=frame)["tau_b"] is None


def test_one_example_has_no_error_and_tells_nobody_apart():
    frame = evaluated(n=1, abilities=[-9.0, 9.0])
    found = acclimate.rank(items=frame)
    assert [(row["se"], row["rank_low"], row["rank_high"]) for row in found["ranking"]] == [(None, 1, 2)] * 2
    pair = acclimate.compare("e00", "e01", items=frame)
    assert (pair["se_paired"], pair["low"], pair["mcnemar_p"]) == (None, None, 1.0)


def test_one_table_of_one_kind_is_asked_for():
    frame = evaluated(n=4)
    for call in (acclimate.rank, acclimate.stability):
        with pytest.raises(Refusal, match="no table"):
            call()
    with pytest.raises(Refusal, match="two kinds"):
        acclimate.rank(frame, items=frame)


# ---- coverage ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simultaneous_sets_of_identical_entrants_cover():
    covered = 0
    for seed in range(1000):
        frame = evaluated(n=150, seed=seed, abilities=np.zeros(6))
        rows = acclimate.rank(items=frame, sets="simultaneous", draws=1000)["ranking"]
        covered += all((row["rank_low"], row["rank_high"]) == (1, 6) for row in rows)
    assert 0.93 <= covered / 1000 <= 0.97


@pytest.mark.slow
def test_tests_of_identical_entrants_reject_as_often_as_they_say():
    rejected = dict.fromkeys(("mcnemar_p", "permutation_p", "wilcoxon_p"), 0)
    for seed in range(600):
        found = acclimate.compare("e00", "e01", items=evaluated(n=200, seed=seed, abilities=[0.0, 0.0]))
        for test in rejected:
            rejected[test] += found[test] <= 0.05
    assert all(count / 600 <= 0.07 for count in rejected.values())
    assert rejected["wilcoxon_p"] / 600 >= 0.025


# ---- the commands --------------------------------------------------------------------------------------------------


def test_the_commands_print_what_the_functions_return_and_explain_it(tmp_path, monkeypatch):
    frame = evaluated(sets=("a", "b"), n=30)
    frame.to_parquet(tmp_path / "items.parquet", index=False)
    frame.to_csv(tmp_path / "items.csv", index=False)

    monkeypatch.chdir(tmp_path)

    def run(*words):
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    found = json.loads(run("stability", "--items", "items.parquet", "--json"))
    assert found == json.loads(json.dumps(acclimate.stability(items="items.parquet")))
    text = run("compare", "e10", "e00", "--items", "items.csv", "--tasks", "a")
    for words in ("difference", "± paired", "McNemar, exact", "sign-flip permutation", "Wilcoxon signed rank", "note:"):
        assert words in text
    assert ("differ" in text) or ("can't be told apart" in text)
    text = run("compare", "--items", "items.csv", "--tasks", "a")
    assert len([line for line in text.splitlines() if line.startswith("e")]) == 55
    assert "of 55 pairs differ at 0.05" in text
    text = run("stability", "--items", "items.csv")
    assert "Clopper-Pearson" in text and "ceiling that noise sets" in text
    assert "can be the best" in run("rank", "--items", "items.csv")
    (tmp_path / "casp.csv").write_text("group,T1,T2\na,1,2\nb,2,\nc,3,1\n", encoding="utf-8")
    text = run("rank", "--method", "casp", "--scores", "casp.csv", "--threshold", "-2", "--missing", "penalty")
    assert "rank by average" in text and "costs -2 each" in text
