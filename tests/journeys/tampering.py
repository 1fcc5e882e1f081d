"""Changes to a bundle's files, as whoever wants to deceive would make them: each is called with the bundle's folder."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import rounds_made

from acclimate import log
from acclimate_competitions import digests, tables

Change = Callable[[Path], None]


def replace(name: str, old: bytes, new: bytes) -> Change:
    def change(bundle: Path) -> None:
        data = (bundle / name).read_bytes()
        assert old in data
        (bundle / name).write_bytes(data.replace(old, new, 1))

    return change


def change_json(name: str, edit: Callable[[object], object]) -> Change:
    def change(bundle: Path) -> None:
        value = json.loads((bundle / name).read_bytes())
        edited = edit(value)
        (bundle / name).write_bytes(digests.canonical(value if edited is None else edited))

    return change


def change_lines(name: str, edit: Callable[[list[bytes]], object]) -> Change:
    def change(bundle: Path) -> None:
        lines = (bundle / name).read_bytes().splitlines()
        edit(lines)
        (bundle / name).write_bytes(b"".join(line + b"\n" for line in lines))

    return change


def change_table(name: str, edit: Callable[[pa.Table], pa.Table]) -> Change:
    def change(bundle: Path) -> None:
        tables.write(edit(pq.read_table(bundle / name)), bundle / name)

    return change


def change_cell(name: str, column: str, row: int, value: object) -> Change:
    def edit(table: pa.Table) -> pa.Table:
        values = table.column(column).to_pylist()
        assert values[row] != value
        values[row] = value
        place = table.schema.get_field_index(column)
        return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))

    return change_table(name, edit)


def copy(source: str, target: str) -> Change:
    def change(bundle: Path) -> None:
        shutil.copy(bundle / source, bundle / target)

    return change


def set_(*path: object, to: object) -> Callable[[object], None]:
    def edit(value: object) -> None:
        for step in path[:-1]:
            value = value[step]  # type: ignore[index]
        assert value[path[-1]] != to  # type: ignore[index]
        value[path[-1]] = to  # type: ignore[index]

    return edit


def lines_with(lines: list[bytes], text: bytes) -> list[int]:
    return [number for number, line in enumerate(lines) if text in line]


def change_record(kind: str, old: bytes, new: bytes) -> Change:
    def edit(lines: list[bytes]) -> None:
        number = lines_with(lines, b'"type":"' + kind.encode())[-1]
        assert old in lines[number]
        lines[number] = lines[number].replace(old, new, 1)

    return change_lines("entries.jsonl", edit)


def false_share(shares: list[dict]) -> None:
    raw = bytearray(base64.b64decode(shares[1]["document"]["share"]))
    raw[0] ^= 1
    shares[1]["document"]["share"] = base64.b64encode(raw).decode()


def swap(first: int, second: int) -> Callable[[list], None]:
    def edit(values: list) -> None:
        values[first], values[second] = values[second], values[first]

    return edit


def flip_ciphertext(bundle: Path) -> None:
    path = bundle / "holdout.sealed"
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)


def last_receipt(bundle: Path) -> str:
    return sorted(bundle.glob("receipts/*"))[-1].relative_to(bundle).as_posix()


def rename_receipt(bundle: Path) -> None:
    (bundle / last_receipt(bundle)).rename(bundle / "receipts" / "3.tlog-proof")


def receipt_of_another_entry(bundle: Path) -> None:
    first = sorted(bundle.glob("receipts/*"))[0]
    shutil.copy(first, bundle / last_receipt(bundle))


def rename_checkpoint(bundle: Path) -> None:
    path = sorted(bundle.glob("checkpoints/*"))[0]
    path.rename(path.with_name("1000"))


def old_checkpoint(bundle: Path) -> None:
    sizes = sorted(int(path.name) for path in bundle.glob("checkpoints/*"))
    shutil.copy(bundle / "checkpoints" / str(sizes[-2]), bundle / "checkpoint")


ADA = "predictions/ada/prepared-tint-11.parquet"
FACTS: dict[str, tuple[Change, str, str]] = {
    # what was changed: (how, the check that must fail, what its place must say)
    "a date of the definition": (replace("definition.toml", b'"60s"', b'"61s"'), "definition", "definition.toml"),
    "a public row": (
        change_cell("public/splits/tint/preparation.parquet", "input", 2, "marble"),
        "public files",
        "public/splits/tint/preparation.parquet",
    ),
    "the tokenizer": (replace("public/tokenizer.json", b"1.0", b"1.1"), "public files", "public/tokenizer.json"),
    "a public file more": (
        copy("public/tokenizer.json", "public/more.json"),
        "public files",
        "public/more.json",
    ),
    "the threshold": (change_json("keys.json", set_("threshold", to=1)), "keys", "keys.json, threshold"),
    "a custodian": (
        change_json("keys.json", set_("custodians", 0, "ed25519", to=rounds_made.public("mallory"))),
        "keys",
        "keys.json, custodians",
    ),
    "the log's key": (
        change_json("keys.json", set_("log", to=log.Signer(rounds_made.ORIGIN, rounds_made.key("mallory")).vkey)),
        "checkpoint",
        "checkpoint",
    ),
    "the last checkpoint's size": (replace("checkpoint", b"\n66\n", b"\n67\n"), "checkpoint", "checkpoint"),
    "the last checkpoint for an older one": (old_checkpoint, "entries", "entries.jsonl"),
    "an earlier checkpoint's name": (rename_checkpoint, "earlier checkpoints", "checkpoints/1000"),
    "a signed record": (
        change_record("ModelEvaluated", b'"protocol":"prepared"', b'"protocol":"direct"'),
        "rules",
        "log entry 63",
    ),
    "a scheduled record": (change_record("RoundClosed", b'"count":3', b'"count":2'), "rules", "log entry 18"),
    "who signed": (
        change_record("ShareReleased", rounds_made.public("custodian-c").encode(), rounds_made.public("ada").encode()),
        "rules",
        "log entry",
    ),
    "a time": (change_record("SubmissionAccepted", b"T01:", b"T00:"), "records", "log entry"),
    "a submission after the close": (
        change_record("SubmissionAccepted", b'"at":"2027-03-01', b'"at":"2027-03-31'),
        "entries",
        "entries.jsonl, log entry",
    ),
    "the order of entries": (
        change_lines("entries.jsonl", swap(25, 26)),
        "entries",
        "entries.jsonl, among log entries",
    ),
    "an entry less": (change_lines("entries.jsonl", lambda lines: lines.pop(30)), "entries", "entries.jsonl"),
    "an entry more": (change_lines("entries.jsonl", lambda lines: lines.append(lines[-1])), "entries", "entries.jsonl"),
    "a receipt's name": (rename_receipt, "receipts", "receipts/3.tlog-proof"),
    "a receipt for another's": (receipt_of_another_entry, "receipts", "receipts/"),
    "a title in a manifest": (
        replace("submissions.jsonl", b"bea, model 1", b"bea, model 2"),
        "submissions",
        "submissions.jsonl, line 2",
    ),
    "a nonce": (
        change_lines("submissions.jsonl", lambda lines: lines.__setitem__(0, lines[1].replace(b"x", b"y", 1))),
        "submissions",
        "submissions.jsonl, line 1",
    ),
    "a submission less": (
        change_lines("submissions.jsonl", lambda lines: lines.pop(1)),
        "submissions",
        "submissions.jsonl",
    ),
    "a byte of the ciphertext": (flip_ciphertext, "ciphertext", "holdout.sealed"),
    "a share": (change_json("shares.json", false_share), "shares", "shares.json, row 1, share 3"),
    "a share less": (change_json("shares.json", lambda shares: shares[:1]), "shares", "shares.json"),
    "the order of shares": (change_json("shares.json", swap(0, 1)), "shares", "shares.json, row 1"),
    "a target": (
        change_cell("holdout/size.parquet", "target", 4, "medium"),
        "holdout",
        "holdout/size.parquet, row 4 (size-holdout-4), column target",
    ),
    "the order of the holdout": (
        change_table("holdout/tint.parquet", lambda t: t.take([1, 0, *range(2, t.num_rows)])),
        "holdout",
        "holdout/tint.parquet, row 0",
    ),
    "a row of the holdout less": (
        change_table("holdout/tint.parquet", lambda t: t.slice(0, t.num_rows - 1)),
        "holdout",
        "holdout/tint.parquet, row 11",
    ),
    "a file of the holdout more": (
        copy("holdout/tint.parquet", "holdout/more.parquet"),
        "holdout",
        "holdout/more.parquet",
    ),
    "a prediction": (change_cell(ADA, "loglikelihoods", 5, [-0.5, -0.5, -0.25]), "predictions", ADA),
    "a predictions file for another": (copy("predictions/bea/prepared-tint-11.parquet", ADA), "predictions", ADA),
    "predictions of nobody": (
        copy(ADA, "predictions/ada/prepared-tint-99.parquet"),
        "predictions",
        "predictions/ada/prepared-tint-99.parquet",
    ),
    "a score": (
        change_table(
            "scores/bea.parquet", lambda table: table.set_column(7, "score", pa.array([0.5] * table.num_rows))
        ),
        "scores",
        "scores/bea.parquet, row 0 (direct, tint, none, tint-holdout-0), column score",
    ),
    "a score's reason": (
        change_cell("scores/ada.parquet", "reason", 30, "tired"),
        "scores",
        "scores/ada.parquet, row 30 (prepared, tint, 12, tint-holdout-6), column reason",
    ),
    "a baseline's score": (
        change_cell("scores/majority.parquet", "reason", 2, "tired"),
        "majority",
        "scores/majority.parquet, row 2",
    ),
    "the scores of nobody": (copy("scores/ada.parquet", "scores/eve.parquet"), "scores", "scores/eve.parquet"),
    "which fit was selected": (
        change_json("prepared.json", set_(2, "selected", "epoch", to=5)),
        "prepared",
        "prepared.json, row 2 (ada, tint, seed 13), selected",
    ),
    "what a preparation cost": (
        change_json("prepared.json", set_(7, "cost", "steps", to=13)),
        "prepared",
        "prepared.json, row 7 (bea, tint, seed 12), cost",
    ),
    "why a preparation failed": (
        change_json("prepared.json", set_(11, "failed", "reason", to="lazy")),
        "prepared",
        "prepared.json, row 11 (bea, size, seed 13), failed",
    ),
    "a preparation more": (
        change_json("prepared.json", lambda rows: rows.append(rows[0])),
        "prepared",
        "prepared.json, row 18",
    ),
    "a rank": (
        change_json("ranking.json", set_("ranking", 1, "rank", to=1)),
        "ranking",
        "ranking.json, ranking, row 1, rank",
    ),
    "a task's rank interval": (
        change_json("ranking.json", set_("tasks", "size", 0, "rank_high", to=7)),
        "ranking",
        "ranking.json, tasks, size, row 0, rank_high",
    ),
    "the ranking's policy": (
        change_json("ranking.json", set_("policy", "missing", to="exclude")),
        "ranking",
        "ranking.json, policy, missing",
    ),
}
