"""A made round (rounds_made.py) in a store, as if a server had taken it in."""

import pyarrow.compute as pc
import rounds_made
from sqlalchemy import insert

from acclimate import store
from acclimate.store import Store
from acclimate_competitions import digests, records, tables
from acclimate_competitions.records import format_time


def fill(target: Store, made: rounds_made.Made, *, entries: int | None = None) -> None:
    """Put a made round into a store, as if a server had taken it in."""
    blobs = target.blobs
    for path in [p for p in made.folder.rglob("*") if p.is_file()]:
        blobs.put(path)
    for data in (rounds_made.DEFINITION.encode(), digests.canonical(made.ranking)):
        blobs.put_bytes(data)
    parsed = [(index, data, records.parse(data)) for index, data in enumerate(made.entries[:entries])]
    with target.transaction() as tx:

        def add(table: object, **row: object) -> None:
            tx.execute(insert(table), row)

        for index, data, record in parsed:
            add(store.log_entries, index=index, round=record.round, type=record.type, data=data)
        for size, note in [pair for pair in made.notes.items() if pair[0] <= len(parsed)]:
            add(store.log_checkpoints, size=size, note=note, at=format_time(made.now))
        now = format_time(made.now)
        for name, role in (("organizer", "organizer"), *((entrant, "entrant") for entrant in rounds_made.SKILL)):
            key = {"ed25519": rounds_made.public(name), "token_hash": digests.of_bytes(name.encode())}
            add(store.accounts, id=name, role=role, created=now, **key)
        defined = {"definition": digests.of_bytes(rounds_made.DEFINITION.encode()), "created": now}
        add(store.rounds, id=made.round, competition="marbles", name="2027-1", owner="organizer", **defined)
        seal = {"header": made.seal, "envelopes": [], "received": now}
        add(store.seals, seal=made.seal["seal"], round=made.round, kind="real", **seal)
        for index in (1, 3):
            add(store.share_documents, seal=made.seal["seal"], index=index, document=made.documents[index])
        opened = made.folder / "opened"
        files = {p.relative_to(opened).as_posix(): digests.of_file(p) for p in opened.rglob("*") if p.is_file()}
        add(store.openings, round=made.round, files=files, at=now)
        for row in made.submissions:
            given = {name: row[name] for name in ("entrant", "nonce", "manifest", "commitment")}
            indices = {"committed_index": row["committed"], "accepted_index": row["index"]}
            rest = {"owner": row["entrant"], "acceptance": {}, "state": "accepted", "created": now}
            add(store.submissions, id=str(row["index"]), round=made.round, **given, **indices, **rest)
        evaluations(target, made, add)


def evaluations(target: Store, made: rounds_made.Made, add: object) -> None:
    """A stage and a result for each evaluation: its part of the score table."""
    newest = {row["entrant"]: str(row["index"]) for row in made.submissions}
    for name in made.predictions:
        entrant, stage = name.removeprefix("predictions/").removesuffix(".parquet").split("/")
        protocol, task, seed = stage.split("-")
        table = made.scores[entrant]
        mine = pc.and_(pc.equal(table["protocol"], protocol), pc.equal(table["task"], task))
        if seed != "none":
            mine = pc.and_(mine, pc.equal(table["seed"], int(seed)))
        path = made.folder / "part.parquet"
        tables.write(table.filter(mine), path)
        place = {"task": task, "seed": None if seed == "none" else int(seed), "protocol": protocol}
        key = digests.of_bytes(name.encode())
        add(
            store.stages,
            key=key,
            round=made.round,
            kind="evaluate",
            submission=newest[entrant],
            state="committed",
            **place,
        )
        add(store.results, stage=key, document={"scores": target.blobs.put(path)}, at=format_time(made.now))
