"""Each fact of a bundle changed in kind: true for 1, text for a number, null for a value, a key, row, column or file too many.

And whoever holds a key tries the same with signatures: the log's operator, the evaluator, the organizer.
"""

import base64
import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import made_bundles
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rounds_made

from acclimate import log, verify
from acclimate_competitions import digests, records

ONE_VALUE = ("keys.json", "shares.json", "prepared.json", "ranking.json")
UNSIGNED = ("RoundOpened", "RoundClosed", "PreparationFinished", "HoldoutOpened", "EvaluationFinished")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture
def bundle(made: rounds_made.Made, tmp_path: Path) -> Path:
    return made.write(tmp_path / "bundle")


def failed_checks(path: Path, **options: Any) -> dict[str, str]:
    return {check.name: check.where for check in verify.verify(path, **options).failed}


# ---- JSON ----------------------------------------------------------------------------------------------------------


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    for step in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from nodes(value[step], (*path, step))


def other_kinds(value: Any) -> dict[str, Any]:
    """What could pass for a value with a reader that does not look at its kind."""
    found: dict[str, Any] = {"false for null": False} if value is None else {"null": None}
    if type(value) in (int, float):
        found["text"] = digests.canonical(value).decode()
        if value in (0, 1):
            found["truth"] = bool(value)
    elif isinstance(value, str):
        found["list"] = [value]
    elif isinstance(value, dict):
        found["a key more"] = {**value, "more": None}
        if value:
            found["a key less"] = dict(list(value.items())[1:])
    elif isinstance(value, list):
        found["an element more"] = [*value, value[-1] if value else None]
    return found


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    document = copy.deepcopy(document)
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return document


def changes(document: Any, *, name: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> dict[Any, Any]:
    """One changed document for each place of a kind (rows of a list are of one kind) and each other kind of value."""
    draw, found = random.Random(3), dict[Any, list[tuple[tuple[Any, ...], Any]]]()
    for path, value in nodes(document):
        for what, other in other_kinds(value).items():
            found.setdefault((name(path), what), []).append((path, other))
    return {key: put(document, *draw.choice(cases)) for key, cases in found.items()}


def without_rows(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple("*" if isinstance(step, int) or step in rounds_made.TASKS else step for step in path)


def refuses_all(bundle: Path, name: str, contents: dict[Any, bytes], *, most: int = 20, **options: Any) -> None:
    """Each of the contents fails, by another check than the manifest; of very many, those that a seed draws."""
    original = (bundle / name).read_bytes()
    drawn = random.Random(name).sample(sorted(contents, key=repr), min(most, len(contents)))
    for what, data in [(what, contents[what]) for what in drawn]:
        assert data != original, what
        (bundle / name).write_bytes(data)
        made_bundles.mend(bundle)
        assert set(failed_checks(bundle, **options)) - {"manifest"}, f"{name}: {what}"
    (bundle / name).write_bytes(original)
    made_bundles.mend(bundle)
    assert failed_checks(bundle) == {}


@pytest.mark.parametrize("name", ONE_VALUE)
def test_no_value_of_another_kind_passes_in_json(name: str, bundle: Path) -> None:
    found = changes(json.loads((bundle / name).read_bytes()), name=without_rows)
    assert len(found) > 15
    refuses_all(bundle, name, {what: digests.canonical(value) for what, value in found.items()})


def joined(lines: Any) -> bytes:
    return b"".join(digests.canonical(line) + b"\n" for line in lines)


def test_no_value_of_another_kind_passes_in_lines_of_submissions(bundle: Path) -> None:
    rows = [json.loads(line) for line in (bundle / "submissions.jsonl").read_bytes().splitlines()]
    found = changes(rows, name=without_rows)
    found = {what: lines for what, lines in found.items() if isinstance(lines, list)}
    assert len(found) > 30
    refuses_all(bundle, "submissions.jsonl", {what: joined(lines) for what, lines in found.items()})


def test_no_value_of_another_kind_passes_in_the_log(bundle: Path) -> None:
    rows = [json.loads(line) for line in (bundle / "entries.jsonl").read_bytes().splitlines()]
    found = changes(rows, name=lambda path: (rows[path[0]]["type"], *path[1:2]) if path else ())
    found = {what: lines for what, lines in found.items() if isinstance(lines, list)}
    assert len(found) > 200
    refuses_all(
        bundle, "entries.jsonl", {what: joined(lines) for what, lines in found.items()}, most=100, levels=["log"]
    )


def rewrite(made: rounds_made.Made, bundle: Path, rows: list[Any]) -> None:
    """As a server can that has the log's key: all of the log signed anew over other entries."""
    leaves = [digests.canonical(row) for row in rows]
    hashes = [digests.leaf_hash(leaf) for leaf in leaves]

    def note(size: int) -> str:
        return log.sign_checkpoint(made.signer, size, log.root(hashes[:size]))

    (bundle / "entries.jsonl").write_bytes(b"".join(leaf + b"\n" for leaf in leaves))
    (bundle / "checkpoint").write_text(note(len(leaves)), "utf-8")
    for path in bundle.glob("checkpoints/*"):
        path.write_text(note(int(path.name)), "utf-8")
    for path in bundle.glob("receipts/*"):
        index = int(path.name.partition(".")[0])
        proof = tuple(log.inclusion_proof(hashes[: index + 1], index, index + 1))
        path.write_text(log.Receipt(index, leaves[index], proof, note(index + 1)).text(), "utf-8")
    made_bundles.mend(bundle)


def test_a_server_that_signs_another_kind_of_value_is_named(made: rounds_made.Made, bundle: Path) -> None:
    """In the records that nobody else signs: each value in them must be recomputed, kind and all."""
    rows = [json.loads(entry) for entry in made.entries]
    tried = 0
    for index, row in enumerate(rows):
        if row["type"] not in UNSIGNED:
            continue
        for what, other in changes(row, name=lambda path: path).items():
            if not isinstance(other, dict):
                continue
            rewrite(made, bundle, [*rows[:index], other, *rows[index + 1 :]])
            failed = failed_checks(bundle, levels=["log"], log_key=made.signer.vkey)
            assert {"records", "rules"} & set(failed), (row["type"], what)
            assert "entries" not in failed
            tried += 1
    assert tried > 60
    rewrite(made, bundle, rows)
    assert failed_checks(bundle) == {}


FORMS: dict[str, dict[str, Any]] = {
    "failed is null": {"failed": None},
    "failed is text": {"failed": "out of memory"},
    "failed for no reason": {"failed": {"reason": " ", "log": digests.of_bytes(b"a log")}},
    "failed with a log that is no digest": {"failed": {"reason": "out of memory", "log": "on request"}},
    "failed and not given up": {"failed": {"reason": "x", "log": digests.of_bytes(b"a log"), "given_up": False}},
    "failed with more to say": {"failed": {"reason": "x", "log": digests.of_bytes(b"a log"), "rival": True}},
    "no digest of the model": {"prepared": None},
    "another kind of base": {"base": ["sha256:0"]},
    "no hardware": {"hardware": None},
    "a validation as text": {"candidates": [{"lr": None, "epoch": 0, "validation": "0.5"}]},
    "a candidate with more to say": {"candidates": [{"lr": None, "epoch": 0, "validation": 0.5, "test": 0.9}]},
    "a choice with more to say": {"selected": {"lr": 0.002, "epoch": 6, "why": "we liked it"}},
    "an epoch that is true": {"selected": {"lr": 0.002, "epoch": True}},
    "it diverged for no reason": {"diverged": ""},
}


@pytest.mark.parametrize("what", FORMS)
def test_an_evaluator_who_signs_another_form_is_named(what: str, made: rounds_made.Made, bundle: Path) -> None:
    rows = [json.loads(entry) for entry in made.entries]
    index = next(number for number, row in enumerate(rows) if row["type"] == "ModelPrepared")
    fields = {k: v for k, v in rows[index].items() if k not in ("v", "type", "round", "at", "by", "sig")}
    if "failed" in FORMS[what]:
        fields = {k: v for k, v in fields.items() if k not in ("prepared", "candidates", "selected", "cost")}
    fields |= FORMS[what]
    signature = rounds_made.key("evaluator").sign(
        records.statement("ModelPrepared", made.round, fields, by=rows[index]["by"])
    )
    outside = {name: rows[index][name] for name in ("v", "type", "round", "at", "by")}
    rows[index] = {**outside, **fields, "sig": base64.b64encode(signature).decode()}
    rewrite(made, bundle, rows)
    assert failed_checks(bundle, log_key=made.signer.vkey) == {"records": f"log entry {index}"}


# ---- Parquet -------------------------------------------------------------------------------------------------------
OTHER_TYPES: dict[str, tuple[pa.DataType, ...]] = {
    "string": (pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())),
    "int64": (pa.int32(), pa.float64(), pa.string()),
    "double": (pa.float32(), pa.string()),
    "list<element: double>": (pa.list_(pa.float32()), pa.large_list(pa.float64())),
}


def other_tables(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    for place, field in enumerate(table.schema):
        column, name = table.column(place), field.name
        for kind in OTHER_TYPES[str(field.type)]:
            yield f"{name} as {kind}", table.set_column(place, name, column.cast(kind))
        if column[1].is_valid:
            values = [column[0].as_py(), None, *column[2:].to_pylist()]
            yield f"{name} with a null", table.set_column(place, name, pa.array(values, field.type))
        yield f"no {name}", table.remove_column(place)
        yield f"{name} twice", table.append_column(name, column)
    yield "a column more", table.append_column("more", pa.array([None] * table.num_rows, pa.string()))
    yield "columns in another order", table.select(table.schema.names[::-1])
    yield "a row more", pa.concat_tables([table, table.slice(table.num_rows - 1)])
    yield "a row less", table.slice(0, table.num_rows - 1)
    yield "no row", table.slice(0, 0)


@pytest.mark.parametrize(
    "name",
    [
        "scores/ada.parquet",
        pytest.param("scores/majority.parquet", marks=pytest.mark.slow),
        "holdout/tint.parquet",
        "predictions/ada/direct-tint-none.parquet",
        "public/splits/size/validation.parquet",
    ],
)
def test_no_column_of_another_type_passes(name: str, bundle: Path, tmp_path: Path) -> None:
    found = dict[Any, bytes]()
    for what, table in other_tables(pq.read_table(bundle / name)):
        pq.write_table(table, tmp_path / "other.parquet")
        found[what] = (tmp_path / "other.parquet").read_bytes()
    assert len(found) > 15
    refuses_all(bundle, name, found)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("seed", pa.float64()),
        ("example", pa.large_string()),
        ("loglikelihoods", pa.list_(pa.float32())),
        ("text", pa.binary()),
    ],
)
def test_an_evaluator_whose_predictions_have_other_types_is_named(
    column: str, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Logged with their right digest, so only their form speaks against them."""
    honest = rounds_made.predict

    def cast(made: rounds_made.Made, *key: Any) -> pa.Table:
        table = honest(made, *key)
        place = table.schema.get_field_index(column)
        return table.set_column(place, column, table.column(column).cast(kind)) if key[0] == "bea" else table

    monkeypatch.setattr(rounds_made, "predict", cast)
    monkeypatch.setattr(rounds_made, "rank", lambda made: {})
    made = rounds_made.make(tmp_path / "round")
    bundle = made.write(tmp_path / "bundle")
    (bundle / "scores").rmdir()
    failed = failed_checks(bundle)
    assert failed == {"predictions": f"predictions/bea/direct-tint-none.parquet, column {column}"}


# ---- files ---------------------------------------------------------------------------------------------------------
MORE = {
    # name of the file more: (what it is a copy of, the check that names it)
    "scores/eve.parquet": ("scores/ada.parquet", "scores"),
    "scores/ada.json": ("prepared.json", "scores"),
    "predictions/ada/prepared-tint-14.parquet": ("predictions/ada/prepared-tint-11.parquet", "predictions"),
    "predictions/ada.parquet": ("predictions/ada/prepared-tint-11.parquet", "predictions"),
    "predictions/majority/direct-tint-none.parquet": ("predictions/ada/direct-tint-none.parquet", "predictions"),
    "holdout/old/tint.parquet": ("holdout/tint.parquet", "holdout"),
    "holdout/row_key": ("keys.json", "holdout"),
    "public/splits/tint/holdout.parquet": ("holdout/tint.parquet", "public files"),
    "public/splits/tint/practice.parquet": ("public/splits/tint/validation.parquet", "public files"),
    "receipts/0.tlog-proof": ("checkpoint", "receipts"),
    "receipts/notes.txt": ("checkpoint", "receipts"),
    "checkpoints/7": ("checkpoint", "earlier checkpoints"),
    "checkpoints/066": ("checkpoint", "earlier checkpoints"),
    "ranking-2.json": ("ranking.json", "nothing else"),
    "report.html": ("ranking.json", "nothing else"),
    "notes/ranking.json": ("ranking.json", "nothing else"),
    "prepared/ada.json": ("prepared.json", "nothing else"),
}


@pytest.mark.parametrize("name", MORE)
def test_no_file_more_passes_under_whatever_name(name: str, bundle: Path) -> None:
    source, check = MORE[name]
    (bundle / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(bundle / source, bundle / name)
    made_bundles.mend(bundle)
    assert failed_checks(bundle)[check] == name


@pytest.mark.parametrize(
    ("baselines", "name"), [('"untrained"', "majority"), ('"majority", "phantom", "untrained"', "phantom")]
)
def test_scores_of_a_baseline_that_nobody_scored_do_not_pass(
    baselines: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = rounds_made.DEFINITION.replace('baselines = ["majority", "untrained"]', f"baselines = [{baselines}]")
    monkeypatch.setattr(rounds_made, "DEFINITION", other)
    bundle = rounds_made.make(tmp_path / "round").write(tmp_path / "bundle")
    assert failed_checks(bundle) == {}
    shutil.copy(bundle / "scores" / "ada.parquet", bundle / "scores" / f"{name}.parquet")
    made_bundles.mend(bundle)
    assert failed_checks(bundle) == {"scores": f"scores/{name}.parquet"}


# ---- what the organizer seals --------------------------------------------------------------------------------------


def sealed_with(
    monkeypatch: pytest.MonkeyPatch, folder: Path, edit: Callable[[rounds_made.Made], None]
) -> dict[str, str]:
    """FAILED checks of a round whose organizer edited the holdout before sealing it."""
    honest = rounds_made.make_splits

    def edited(made: rounds_made.Made) -> None:
        honest(made)
        edit(made)
        for task, table in made.holdout.items():
            rounds_made.tables.write(table, made.folder / "holdout" / f"{task}.parquet")

    monkeypatch.setattr(rounds_made, "make_splits", edited)
    return failed_checks(rounds_made.make(folder / "round").write(folder / "bundle"))


@pytest.mark.parametrize("name", ["old/tint.parquet", "more.parquet", "tint.v2.parquet", "Size/size.parquet"])
def test_a_second_table_in_the_seal_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def second(made: rounds_made.Made) -> None:
        (made.folder / "holdout" / name).parent.mkdir(exist_ok=True)
        other = made.holdout["tint"].set_column(2, "target", pa.array(["red"] * rounds_made.ROWS))
        rounds_made.tables.write(other, made.folder / "holdout" / name)

    assert sealed_with(monkeypatch, tmp_path, second) == {"holdout": f"holdout/{name}"}


def shown(column: str, value: str, task: str = "tint") -> Callable[[rounds_made.Made], None]:
    def edit(made: rounds_made.Made) -> None:
        table = made.holdout[task]
        place = table.schema.get_field_index(column)
        values = [value, *table.column(column).to_pylist()[1:]]
        made.holdout[task] = table.set_column(place, column, pa.array(values))

    return edit


PUBLIC_ROWS = {
    "an example": (shown("example", "tint-validation-3"), "holdout/tint.parquet", "example ids"),
    "an input": (shown("input", "marble tint-preparation-0"), "holdout/tint.parquet", "inputs"),
    "an input in other letters": (shown("input", " Marble  TINT-preparation-0"), "holdout/tint.parquet", "inputs"),
    "an input of another task": (
        shown("input", "marble tint-preparation-0", task="size"),
        "holdout/size.parquet",
        "inputs",
    ),
    "a cluster": (shown("cluster", "preparation-2"), "holdout/tint.parquet", "clusters"),
}


@pytest.mark.parametrize("what", PUBLIC_ROWS)
def test_a_holdout_that_shows_public_rows_is_named(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    edit, where, said = PUBLIC_ROWS[what]
    assert sealed_with(monkeypatch, tmp_path, edit) == {"unseen": where}
    report = verify.verify(tmp_path / "bundle")
    assert said in report.failed[0].meaning


def test_a_target_that_is_no_choice_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rounds_made, "TASKS", {**rounds_made.TASKS, "tint": ("red", "green", "blue", "purple")})
    monkeypatch.setattr(rounds_made, "rank", lambda made: {})
    honest = rounds_made.rows_of

    def rows_of(made: rounds_made.Made, split: str, task: str, count: int) -> pa.Table:
        table = honest(made, split, task, count)
        targets = table.column("target").to_pylist()
        known = [target if target != "purple" else "red" for target in targets]
        return table.set_column(2, "target", pa.array(known))

    monkeypatch.setattr(rounds_made, "rows_of", rows_of)
    assert sealed_with(monkeypatch, tmp_path, shown("target", "purple"))["unseen"] == "holdout/tint.parquet"


# ---- who is ranked -------------------------------------------------------------------------------------------------


def test_an_entrant_with_a_declared_conflict_is_unranked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rounds_made, "CONFLICTS", {"bea": ["friend of the organizer"]})
    bundle = rounds_made.make(tmp_path / "round").write(tmp_path / "bundle")
    assert failed_checks(bundle) == {}
    document = json.loads((bundle / "ranking.json").read_bytes())
    assert [row["entrant"] for row in document["ranking"]] == ["ada"]
    assert "bea" in [row["entrant"] for row in document["baselines"]]


def test_a_forfeited_commitment_is_counted_and_rooted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest = rounds_made.submit_all

    def submit_all(made: rounds_made.Made) -> None:
        honest(made)
        for number in range(3):
            commitment = digests.of_bytes(b"never sent %d" % number)
            made.signed("SubmissionCommitted", {"entrant": "bea", "commitment": commitment}, by="bea")

    monkeypatch.setattr(rounds_made, "submit_all", submit_all)
    made = rounds_made.make(tmp_path / "round")
    bundle = made.write(tmp_path / "bundle")
    assert failed_checks(bundle) == {}
    rows = [json.loads(entry) for entry in made.entries]
    closed = next(row for row in rows if row["type"] == "RoundClosed")
    assert closed["forfeited"]["count"] == 3
    closed["forfeited"]["count"] = 2
    rewrite(made, bundle, rows)
    assert failed_checks(bundle) == {"rules": f"log entry {rows.index(closed)}"}
