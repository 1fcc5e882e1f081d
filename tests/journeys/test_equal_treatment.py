"""Nobody's result depends on who else takes part: other entrants in another order, more of them side by side, and neighbours that fail.

That other machines change nothing either is tried on Ray (test_whole_round.py, tests/cluster/test_chaos_on_ray.py).
"""

from pathlib import Path
from typing import Any

import live as staging
import pytest
import tiny
from dispatching import give_shares, send, state_of, step_until

from acclimate.dispatch import Dispatcher
from acclimate.service import publish
from acclimate_runners.local import LocalRunner

BOTH = {"ada": 1, "bea": 2}


def played(folder: Path, entrants: dict[str, int], *, poisoned: str = "", slots: int) -> dict[str, Any]:
    """What a round comes to for the entrants of BOTH: digests of their prepared models and predictions, and their scores.

    Args:
        folder: of its server.
        entrants: name -> seed of the model, in the order of their submissions.
        poisoned: whose model holds a NaN.
        slots: attempts at once.
    """
    folder.mkdir()
    with staging.serve(folder) as server:
        staged = staging.open_round(server, folder)
        sent = {name: send(staged, name, seed=seed, poisoned=name == poisoned)[1] for name, seed in entrants.items()}
        store, work = server.store, server.settings.work
        with Dispatcher(store, store.blobs, server.settings, lambda: LocalRunner(work, slots=slots)) as working:
            step_until(working, lambda: all(state_of(server, each)[0] != "checking" for each in sent.values()))
            server.clock.set(staged.fields["closes"], seconds=1)
            step_until(working, lambda: server.phase(staged.round) == "prepared")
            give_shares(staged)
            step_until(working, lambda: server.phase(staged.round) == "evaluated")
        with store.snapshot() as tx:
            state = tx.round(staged.round)
        names = {entry.submission: entry.entrant for entry in state.entries}
        assert set(names.values()) == set(entrants) - {poisoned}
        digests = {(names[key[0]], *key[1:]): record["prepared"] for key, record in state.prepared.items()}
        digests |= {(names[key[0]], *key[1:]): record["predictions"] for key, record in state.evaluated.items()}
        rows = publish.ranking(store, staged.round).document()["ranking"]
        scores = {(row["entrant"], "score"): row["score"] for row in rows}
    return {key: value for key, value in {**digests, **scores}.items() if key[0] in BOTH}


@pytest.mark.timeout(600)
def test_the_order_of_the_entrants_and_who_works_beside_them_change_no_byte(tmp_path: Path) -> None:
    alone = played(tmp_path / "alone", BOTH, slots=1)
    among = {"cal": 3, "bea": 2, "dan": 4, "ada": 1}
    beside = played(tmp_path / "beside", among, poisoned="cal", slots=3)
    assert beside == alone
    # Two tasks with three seeds are prepared, and evaluated beside the model as submitted; no two models are alike.
    fits = len(tiny.TASKS) * 3
    assert len(alone) == len(BOTH) * (fits + fits + len(tiny.TASKS) + 1)
    prepared = [value for key, value in alone.items() if len(key) == 3]
    assert len(set(prepared)) == len(prepared) == len(BOTH) * fits
