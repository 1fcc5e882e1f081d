"""Ledgers: values that share what they have in common, and never see what they have not."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_competitions.ledger import Ledger


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=40))
def test_each_value_stays_what_it_was_whatever_grows_from_it(steps):
    grown, plain = [Ledger()], [{}]
    for number, (base, key) in enumerate(steps):
        place = base % len(grown)
        if key in plain[place]:
            with pytest.raises(ValueError, match="already"):
                grown[place].plus(key, number)
            continue
        grown.append(grown[place].plus(key, number))
        plain.append({**plain[place], key: number})
    for ledger, expected in zip(grown, plain, strict=True):
        assert list(ledger.items()) == list(expected.items())
        assert len(ledger) == len(expected) and all((key in ledger) == (key in expected) for key in range(6))
        assert [ledger.get(key) for key in range(6)] == [expected.get(key) for key in range(6)]


def test_the_order_of_growth_is_part_of_the_value():
    assert Ledger().plus("a", 1).plus("b", 2) == Ledger().plus("a", 1).plus("b", 2)
    assert Ledger().plus("a", 1).plus("b", 2) != Ledger().plus("b", 2).plus("a", 1)
    assert Ledger() != {}


def test_threads_that_grow_one_value_get_values_of_their_own():
    base = Ledger()
    for number in range(100):
        base = base.plus(number, None)
    found, start = [], threading.Barrier(8)

    def grow(name: int) -> None:
        start.wait()
        value = base
        for step in range(200):
            value = value.plus((name, step), name)
        found.append(value)

    threads = [threading.Thread(target=grow, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(list(value)[100][0] for value in found) == list(range(8))
    assert all(len(value) == 300 and len({key[0] for key in list(value)[100:]}) == 1 for value in found)
    assert list(base) == list(range(100))
