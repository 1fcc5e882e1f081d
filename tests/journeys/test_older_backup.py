"""Row 14 of the failure matrix: the database is put back from an older backup, and the blobs are the living ones.

The gap in the log is told, what was prepared meanwhile is taken from its manifests, and nothing is made again.
"""

import live as staging
import pytest
from dispatching import rows, send, state_of, states, step_until, wait
from live import Live
from sqlalchemy import func, select

from acclimate import backups, config, installation, log, restoring
from acclimate.checkpoints import Copies
from acclimate.dispatch import Dispatcher
from acclimate.store import Store, log_checkpoints, results, stages
from acclimate_runners.local import LocalRunner


def documents(store):
    """Stage -> what it came to, of all preparations; without what the child said of its machine's network, which no manifest holds."""
    with store.snapshot() as tx:
        query = select(results.c.stage, results.c.document).join(stages, stages.c.key == results.c.stage)
        rows = tx.execute(query.where(stages.c.kind == "prepare")).all()
    return {row.stage: {**row.document, "network": ""} for row in rows}


def newest(store):
    with store.snapshot() as tx:
        return tx.execute(select(func.max(log_checkpoints.c.size))).scalar(), tx.size()


def dispatcher(store, settings):
    return Dispatcher(store, store.blobs, settings, lambda: LocalRunner(settings.work, slots=2))


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_an_older_backup_costs_log_entries_and_no_work(place, tmp_path, request):
    given = {}
    if place == "s3":
        given = {"database": request.getfixturevalue("postgresql_url"), **request.getfixturevalue("s3_place").settings}
    with staging.serve(tmp_path, **given) as server:
        staged = staging.open_round(server, tmp_path)
        sent = [send(staged, name, seed=seed)[1] for seed, name in enumerate(("ada", "bea"), start=1)]
        with dispatcher(server.store, server.settings) as running:
            step_until(running, lambda: {state_of(server, each)[0] for each in sent} == {"accepted"})
        server.clock.set(staged.fields["closes"], seconds=1)
        assert "RoundClosed" in server.tick()
        wait(lambda: len(set(newest(server.store))) == 1)
        found = installation.check(server.store, server.settings)
        wanted = backups.Wanted(blobs=place == "folder", keys=True)
        made = backups.write(
            server.store, server.settings, found, tmp_path / "backup", wanted=wanted, progress=lambda *_: None
        )
        # After the backup everything is prepared, logged, signed and committed; then the database is lost.
        with dispatcher(server.store, server.settings) as running:
            step_until(running, lambda: states(server, "prepare") == {"committed"})
        wait(lambda: len(set(newest(server.store))) == 1)
        _keep_checkpoint(server, found)
        before, size = documents(server.store), newest(server.store)[1]
        assert len(before) == len(rows(server, "prepare")) > 10 and size > made["log"]["size"]
        url = {"blobs": server.settings.blobs, "blobs_endpoint": server.settings.blobs_endpoint}
        clock = server.clock
    settings = config.load(tmp_path / "new", environ={}, given=url)
    gap = restoring.restore(tmp_path / "backup", settings, progress=lambda *_: None)["gap"]
    assert gap.entries == size - made["log"]["size"]
    assert sum(each["stages"] for each in gap.adopted) == len(before)
    assert {each["kind"] for each in gap.adopted} == {"prepare"}
    store = Store.open(settings, clock=clock)
    Copies(store.blobs, settings.data, log.parse_vkey(found.log)).accept(store)
    assert documents(store) == {}
    with dispatcher(store, settings) as running:
        step_until(running, lambda: len(documents(store)) == len(before))
    assert documents(store) == before
    assert list(settings.work.rglob("child.log")) == []
    assert restoring.gap(store, settings, log.parse_vkey(found.log)).adopted == []
    store.close()


def _keep_checkpoint(server: Live, found: installation.Installation) -> None:
    """As the API does twice a minute."""
    with server.store.snapshot() as tx:
        note = tx.execute(select(log_checkpoints.c.note).order_by(log_checkpoints.c.size.desc()).limit(1)).scalar()
    Copies(server.store.blobs, server.settings.data, log.parse_vkey(found.log)).keep(note)
