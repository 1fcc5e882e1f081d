import hashlib

from hypothesis import given
from hypothesis import strategies as st

from acclimate import schedule
from acclimate.schedule import Work

WORKS = st.lists(
    st.builds(Work, st.text(max_size=8), st.floats(0, 1e12), st.integers(0, 2)),
    unique_by=lambda w: w.entrant,
    max_size=8,
)


@given(WORKS, st.text(max_size=20), st.randoms())
def test_the_order_is_longest_first_and_does_not_depend_on_how_it_was_asked(works, checkpoint, random) -> None:
    ordered = schedule.order(works, checkpoint=checkpoint)
    random.shuffle(works)
    assert schedule.order(works, checkpoint=checkpoint) == ordered
    ranks = [(w.priority, -w.cost) for w in ordered]
    assert ranks == sorted(ranks) and sorted(map(repr, works)) == sorted(map(repr, ordered))


def test_equals_come_in_the_order_that_the_checkpoint_draws() -> None:
    works = [Work(name, 5.0) for name in ("ada", "bob", "eve", "zoe")]
    drawn = {w.entrant: hashlib.sha256(b"origin\n7\nroot\n" + w.entrant.encode()).digest() for w in works}
    assert [w.entrant for w in schedule.order(works, checkpoint="origin\n7\nroot\n")] == sorted(drawn, key=drawn.get)
    orders = {tuple(w.entrant for w in schedule.order(works, checkpoint=str(n))) for n in range(200)}
    assert len(orders) == 24


@given(WORKS, st.integers(1, 5))
def test_the_makespan_is_within_grahams_bound(works, slots) -> None:
    ordered = schedule.order([Work(w.entrant, w.cost) for w in works], checkpoint="")
    total, longest = sum(w.cost for w in works), max((w.cost for w in works), default=0.0)
    span = schedule.makespan(ordered, slots=slots)
    assert max(total / slots, longest) * (1 - 1e-9) <= span <= (total / slots + longest * (1 - 1 / slots)) * (1 + 1e-9)
