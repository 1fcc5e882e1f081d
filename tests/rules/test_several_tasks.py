"""Tests over several tasks: Demšar's example, scipy, and the ends."""

import math

import numpy as np
import pandas
import pytest
from scipy import stats
from typer.testing import CliRunner

import acclimate
from acclimate.cli.main import app
from acclimate_competitions import several_tasks
from acclimate_competitions.errors import Refusal


def test_the_average_ranks_of_demsar_give_his_numbers():
    found = several_tasks.friedman([3.143, 2.000, 2.893, 1.964], 14)
    assert found.chi2 == pytest.approx(9.28, abs=0.005)
    assert found.f == pytest.approx(3.69, abs=0.005)
    assert found.critical_difference == pytest.approx(1.25, abs=0.005)
    assert found.chi2_p == pytest.approx(stats.chi2.sf(found.chi2, 3))


def test_without_ties_it_is_scipys():
    scores = np.random.default_rng(1).normal(size=(5, 9))
    ranks = several_tasks.average_ranks(scores)
    found, theirs = several_tasks.friedman(ranks, 9), stats.friedmanchisquare(*scores)
    assert (found.chi2, found.chi2_p) == (pytest.approx(theirs.statistic), pytest.approx(theirs.pvalue))
    assert ranks[int(np.argmax(scores.mean(axis=1)))] < 3.5


@pytest.mark.parametrize(("k", "n"), [(0, 0), (1, 5), (5, 1)])
def test_too_little_is_undefined(k, n):
    assert several_tasks.friedman([1.0] * k, n) is None


def test_one_order_everywhere_and_no_order_at_all():
    same = several_tasks.friedman([1.0, 2.0, 3.0], 6)
    assert (same.chi2, same.f, same.f_p) == (pytest.approx(12.0), math.inf, 0.0)
    tied = several_tasks.friedman(several_tasks.average_ranks(np.ones((3, 6))), 6)
    assert (tied.chi2, tied.chi2_p, tied.f_p) == (0.0, 1.0, 1.0)


def test_pairs_are_adjusted_by_holm():
    scores = np.vstack(
        [np.arange(12.0) + 3, np.arange(12.0), np.arange(12.0) + np.random.default_rng(1).normal(size=12)]
    )
    found = several_tasks.wilcoxon_holm(scores)
    assert set(found) == {(0, 1), (0, 2), (1, 2)}
    assert found[0, 1][1] <= 3 * found[0, 1][0] + 1e-12
    assert found[0, 1][1] < 0.01 < found[1, 2][1]


# ---- acclimate.compare of a table entrants × tasks -----------------------------------------------------------------


def frame(scores):
    names = [f"e{place}" for place in range(len(scores))]
    return pandas.DataFrame(scores, columns=[f"t{place}" for place in range(scores.shape[1])]).assign(who=names)[
        ["who", *(f"t{place}" for place in range(scores.shape[1]))]
    ]


def test_a_table_is_compared_over_its_tasks():
    random = np.random.default_rng(1)
    scores = random.normal(size=(4, 14)) + np.array([1.5, 0.5, 0.0, -1.0])[:, None]
    found = acclimate.compare(scores=frame(scores))
    theirs = stats.friedmanchisquare(*scores)
    assert (found["entrants"], found["tasks"], len(found["pairs"])) == (4, 14, 6)
    assert found["friedman_chi2"] == pytest.approx(theirs.statistic)
    assert found["critical_difference"] == pytest.approx(1.2535, abs=1e-4)
    averages = [row["average_rank"] for row in found["ranking"]]
    assert averages == sorted(several_tasks.average_ranks(scores))
    assert [row["rank"] for row in found["ranking"]] == [1 + sum(a < b - 1e-9 for a in averages) for b in averages]
    assert all(row["rank_low"] <= row["rank"] <= row["rank_high"] for row in found["ranking"])
    for row in found["pairs"]:
        assert row["difference"] >= 0
        assert row["nemenyi"] == (row["difference"] > found["critical_difference"])
        i, j = int(row["a"][1]), int(row["b"][1])
        expected = stats.wilcoxon(scores[i] - scores[j], correction=True, method="asymptotic").pvalue
        assert row["wilcoxon_p"] == pytest.approx(expected)
    lowered = acclimate.compare(scores=frame(scores * np.r_[np.ones(13), -1.0]), lower=["t13"])
    assert lowered["ranking"] == found["ranking"]
    order = random.permutation(14)
    assert acclimate.compare(scores=frame(scores[:, order]))["ranking"] == found["ranking"]


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (3, 1)])
def test_too_little_to_compare_over_tasks(shape):
    found = acclimate.compare(scores=frame(np.arange(float(shape[0] * shape[1])).reshape(shape)))
    assert found["friedman_p"] is None
    assert len(found["ranking"]) == shape[0]
    assert any("not informative" in note for note in found["notes"])


def test_tables_that_lack_scores_or_are_asked_for_two_entrants_are_refused():
    scores = np.arange(12.0).reshape(3, 4)
    scores[1, 2] = np.nan
    with pytest.raises(Refusal, match="1 entrant without a score in some task"):
        acclimate.compare(scores=frame(scores))
    found = acclimate.compare(scores=frame(scores), missing="exclude")
    assert (found["entrants"], found["iman_davenport_f"], found["iman_davenport_p"]) == (2, None, 0.0)
    assert found["notes"][0] == "left out, as a score is missing: 'e1'"
    with pytest.raises(Refusal, match="all entrants"):
        acclimate.compare("e0", "e1", scores=frame(scores))
    with pytest.raises(Refusal, match="no task 'x'"):
        acclimate.compare(scores=frame(scores), lower=["x"])


def test_the_command_says_whether_entrants_differ(tmp_path):
    scores = np.random.default_rng(1).normal(size=(4, 14)) + np.arange(4)[:, None]
    frame(scores).to_csv(tmp_path / "t.csv", index=False)
    done = CliRunner().invoke(app, ["compare", "--scores", str(tmp_path / "t.csv")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "Over 14 tasks the 4 entrants differ" in done.output
    assert "(Nemenyi)" in done.output
