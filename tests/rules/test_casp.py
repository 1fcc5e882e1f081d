"""CASP's ranking: by hand, by another way to compute it, and its invariances."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import acclimate
from acclimate_competitions import casp
from acclimate_competitions.errors import Refusal

TABLE = {"group": ["a", "b", "c", "d"], "T1": [4.0, 3.0, 2.0, 1.0], "T2": [1.0, 2.0, None, 3.0]}


def frame(columns):
    import pyarrow as pa

    return pa.table(columns)


def plainly(column, threshold):
    """One target, by the definition, word by word."""
    known = {i: x for i, x in enumerate(column) if not math.isnan(x)}

    def z(of):
        mean = sum(of.values()) / len(of)
        sd = math.sqrt(sum((x - mean) ** 2 for x in of.values()) / len(of))
        return {i: (x - mean) / sd if sd > 1e-12 else 0.0 for i, x in known.items()}

    first = z(known)
    second = z({i: x for i, x in known.items() if first[i] >= -2})
    return {i: max(threshold, value) for i, value in second.items()}


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.one_of(st.integers(-9, 9).map(float), st.just(math.nan)), min_size=7, max_size=7), min_size=1, max_size=5),
    st.sampled_from(casp.THRESHOLDS),
    st.booleans(),
)  # fmt: skip
def test_it_is_what_the_definition_says(targets, threshold, penalty):
    scores = np.array(targets).T
    found = casp.stand(scores, threshold=threshold, penalty=penalty)
    by_target = [plainly(column, threshold) if any(not math.isnan(x) for x in column) else {} for column in targets]
    for place in range(7):
        own = [z[place] for z in by_target if place in z]
        missing = len(targets) - len(own)
        assert found.sums[place] == pytest.approx(sum(own) + missing * threshold * penalty, abs=1e-9)
        assert found.attempted[place] == len(own)
        if own:
            assert found.averages[place] == pytest.approx(sum(own) / len(own), abs=1e-9)
        else:
            assert math.isnan(found.averages[place])
    order = np.random.default_rng(0).permutation(7)
    again = casp.stand(3 * scores[order][:, ::-1] + 5, threshold=threshold, penalty=penalty)
    assert again.sums == pytest.approx(found.sums[order], abs=1e-9)


def test_a_far_outlier_does_not_widen_the_field():
    column = np.array([[10.0], [11.0], [12.0], [13.0], [14.0], [15.0], [-900.0]])
    found = casp.stand(column, threshold=-2.0, penalty=True)
    rest = column[:6, 0]
    assert found.z[:6, 0] == pytest.approx((rest - rest.mean()) / rest.std())
    assert found.z[6, 0] == -2.0


def test_a_baseline_has_a_score_and_moves_nobody():
    scores = np.array([[1.0], [2.0], [3.0], [99.0]])
    with_it = casp.stand(scores, threshold=-2.0, penalty=True, baselines=np.array([False, False, False, True]))
    assert with_it.sums[:3] == pytest.approx(casp.stand(scores[:3], threshold=-2.0, penalty=True).sums)
    assert with_it.sums[3] > 10


def test_missing_targets_cost_the_threshold_or_nothing_and_it_is_said():
    found = acclimate.rank(frame(TABLE), method="casp", threshold=-2)
    rows = {row["entrant"]: row for row in found["ranking"]}
    z1 = (2 - 2.5) / math.sqrt(1.25)
    assert rows["c"]["sum"] == rows["c"]["score"] == pytest.approx(z1 - 2)
    assert (rows["c"]["attempted"], rows["c"]["missing"], rows["c"]["average"]) == (1, 1, pytest.approx(z1))
    assert any("costs -2 each" in note for note in found["notes"])
    skipped = acclimate.rank(frame(TABLE), method="casp", missing="skip", threshold=0)
    assert {row["entrant"]: row["sum"] for row in skipped["ranking"]}["c"] == 0.0
    assert any("costs nothing" in note for note in skipped["notes"])
    assert [row["rank"] for row in found["ranking"]] == sorted(row["rank"] for row in found["ranking"])
    assert all(row["rank_low"] <= row["rank"] <= row["rank_high"] for row in found["ranking"])


def test_equal_sums_share_a_rank_and_who_tried_nothing_is_last():
    columns = {"g": ["a", "b", "c", "d"], "T1": [1.0, 1.0, 0.0, None], "T2": [2.0, 2.0, 1.0, None]}
    found = acclimate.rank(frame(columns), method="casp")
    assert [(row["entrant"], row["rank"]) for row in found["ranking"]] == [("a", 1), ("b", 1), ("c", 3), ("d", 4)]
    assert found["ranking"][3]["average"] is None
    lower = acclimate.rank(frame(columns), method="casp", lower_is_better=True)
    assert lower["ranking"][0]["entrant"] == "c"


def test_baselines_are_beside_the_ranking():
    found = acclimate.rank(frame(TABLE), method="casp", baselines=["a"])
    assert [row["entrant"] for row in found["baselines"]] == ["a"]
    assert "a" not in {row["entrant"] for row in found["ranking"]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threshold": -1}, "threshold"),
        ({"missing": "worst"}, "missing targets"),
        ({"baselines": ["z"]}, "no baseline 'z'"),
        ({"method": "elo"}, "unknown method"),
        ({"tasks": ["T9"]}, "T9"),
    ],
)
def test_what_casp_does_not_know_is_refused(options, says):
    with pytest.raises(Refusal, match=says):
        acclimate.rank(frame(TABLE), **{"method": "casp", **options})
