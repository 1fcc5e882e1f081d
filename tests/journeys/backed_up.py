"""Backups and restores as tests make them: of a quickly made installation (kept.py), compared by the digests of all that they hold."""

import pytest
from sqlalchemy import insert

from acclimate import backups, config, installation, restoring
from acclimate.store import Store, events, log_entries, outbox
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

AT = "2027-03-01T12:00:00.000000Z"


def quiet(*_):
    pass


def back_up(found, to, **wanted):
    row = installation.check(found.store, found.settings)
    return backups.write(found.store, found.settings, row, to, wanted=backups.Wanted(**wanted), progress=quiet)


def target(found, folder, **given):
    return config.load(folder, environ={}, given={"origin": found.settings.origin, **given})


def restore(backup, settings):
    return restoring.restore(backup, settings, progress=quiet)


def refused(code, call, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        call(*arguments, **named)
    assert caught.value.code == code, caught.value
    assert caught.value.hint
    return str(caught.value)


def contents(settings):
    """Table -> digest, and the blobs' digests."""
    store = Store.open(settings)
    try:
        with store.snapshot() as tx:
            found = {}
            metadata = backups.table_files.tables(tx.connection)
            for table in metadata.sorted_tables:
                tally = backups.table_files.Tally()
                for line in backups.table_files.lines(tx.connection, table, columns=sorted(table.c.keys())):
                    tally.add(line)
                found[table.name] = tally.result()
        blobs = {}
        for each in store.blobs.listing():
            store.blobs.check(each.digest)
            blobs[each.digest] = each.size
        return found, blobs
    finally:
        store.close()


def more(found):
    """Rows of every odd kind: text of all scripts, floats, counted keys, bytes."""
    with found.store.transaction() as tx:
        row = {
            "round": "r",
            "stage": digests.of_bytes(b"s"),
            "payload": {"ü": [0.1, 1e-300, 2**53 + 1, None, '\U0001f600 \\ " \n\u2028']},
        }
        tx.execute(insert(outbox), row)
        event = {"at": AT, "round": "r", "kind": "prepare", "submission": "s", "attempt": "a", "fence": 1, "epoch": 1}
        tx.execute(insert(events), [{**event, "event": "claimed"}, {**event, "event": "running", "reason": "日本語"}])
        tx.execute(insert(log_entries), {"index": tx.size(), "round": "", "type": "t", "data": bytes(range(256))})
