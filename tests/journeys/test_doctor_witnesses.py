"""What `acclimate doctor` says of a log's witnesses, each a real one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import live
import partners
import pytest
import rounds_made
from partners import Partner, log_key
from waiting import until

from acclimate import doctor_witnesses, log
from acclimate.doctor_machine import Finding
from acclimate.doctor_witnesses import Own
from acclimate.witness_client import parse_endpoint

NAMES = ("w1.example.org", "w2.example.org")
Look = Callable[..., dict[str, Finding]]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Partner]]:
    with partners.partners(tmp_path / "witnesses", *NAMES) as made:
        yield made


@pytest.fixture
def running(two: list[Partner], tmp_path: Path) -> Iterator[live.Live]:
    with partners.server(tmp_path / "server", two, quorum=2) as found:
        yield found


@pytest.fixture
def look(running: live.Live) -> Look:
    def findings(**changed: object) -> dict[str, Finding]:
        return {one.name: one for one in doctor_witnesses.witnesses(replace(running.settings, **changed))}

    return findings


def test_witnesses_of_an_empty_log_are_well(running: live.Live, two: list[Partner], look: Look) -> None:
    for one in two:
        one.start(log_key(running.settings, running.store))
    found = look()
    assert {finding.state for finding in found.values()} == {"ok"} and set(found) == {
        f"witness {name}" for name in NAMES
    }
    # What nobody asks is no quorum.
    assert look(quorum=0)["quorum"].state == "warning" and "without witnesses" in look(quorum=0)["quorum"].found


def test_addresses_that_were_exchanged_are_told(running: live.Live, two: list[Partner], look: Look) -> None:
    for one in two:
        one.start(log_key(running.settings, running.store))
    (first, mine), (second, other) = (one.text.split() for one in two)
    found = look(witnesses=(f"{first} {other}", f"{second} {mine}"))
    assert [finding.state for finding in found.values()] == ["warning", "warning"]
    assert mine in found[f"witness {NAMES[1]}"].found and "exchanged" in found[f"witness {NAMES[1]}"].hint


def test_a_witness_that_knows_another_key_of_the_log_is_told_with_the_new_one(
    running: live.Live, two: list[Partner], look: Look
) -> None:
    old = log.Signer(running.settings.origin, rounds_made.key("before")).vkey
    own = log_key(running.settings, running.store)
    two[0].start(own)
    two[1].start(old)
    found = look()
    assert found[f"witness {NAMES[0]}"].state == "ok"
    late = found[f"witness {NAMES[1]}"]
    assert late.state == "warning" and old in late.found and own in late.hint
    two[1].stop()
    assert "does not answer" in look()[f"witness {NAMES[1]}"].found


def test_how_far_a_witness_is_behind_is_held_against_the_log(
    running: live.Live, two: list[Partner], tmp_path: Path
) -> None:
    own = log_key(running.settings, running.store)
    for one in two:
        one.start(own)
    live.create(running, tmp_path)
    size = until(lambda: two[0].size(running.settings.origin))
    endpoint, now = parse_endpoint(two[0].text), datetime.now(UTC)
    with httpx.Client() as client:

        def said(more: int, ago: timedelta) -> Finding:
            known = Own(own, [(size + more, now - ago)])
            return doctor_witnesses._finding(running.settings, endpoint, known, client)

        assert said(0, timedelta(days=1)).state == "ok"
        assert said(5, timedelta(seconds=5)).state == "ok"  # it is about to be asked
        behind = said(5, timedelta(minutes=5))
    assert behind.state == "warning" and f"{size} of {size + 5} entries" in behind.found


def test_a_witness_that_cosigned_more_than_the_database_has_tells_of_lost_entries(
    running: live.Live, two: list[Partner], tmp_path: Path
) -> None:
    """As after a restore from an older backup with new blobs, where nothing else tells of what came after."""
    own = log_key(running.settings, running.store)
    for one in two:
        one.start(own)
    live.seal(live.create(running, tmp_path))
    size = until(lambda: (found := two[0].size(running.settings.origin)) > 1 and found)
    endpoint, older = parse_endpoint(two[0].text), Own(own, [(size - 1, datetime.now(UTC))])
    elsewhere = replace(running.settings, database=f"sqlite:///{tmp_path / 'older.db'}")
    with httpx.Client() as client:
        # The log may grow between two questions.
        assert doctor_witnesses._finding(running.settings, endpoint, older, client).state == "ok"
        lost = doctor_witnesses._finding(elsewhere, endpoint, older, client)
    assert lost.state == "warning" and "put back" in lost.hint
    assert f"has cosigned {size} entries of {running.settings.origin}, the database has {size - 1}" in lost.found
