"""A small whole round made of pure functions: no server, no database, no model; predictions as if models had given them.

`make(folder)` plays every actor once and gives a `Made`; `Made.write(folder)` writes its bundle after the table of
the protocol, without any code of bundle.py, so that writer and reader are held against a third hand.
Everything is drawn from a seed, except for the age envelopes.
"""

import base64
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import made_bundles
import pyarrow as pa
import pyrage
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from marbles import DEFINITION

from acclimate import custody, log, notes, sealing
from acclimate_competitions import definition, digests, metrics, ranking, records, rounds, tables
from acclimate_competitions.records import Record, format_time

ORIGIN = "log.example.org"
START = datetime(2027, 3, 1, tzinfo=UTC)
CODE = digests.of_bytes(b"a wheel")
TASKS = {"tint": ("red", "green", "blue"), "size": ("small", "large")}
SEEDS = (11, 12, 13)
SKILL = {"ada": 2.0, "bea": 1.0, "untrained": 0.0}
SUBMISSIONS = [("ada", 1), ("bea", 1), ("ada", 2), ("untrained", 1)]
CONFLICTS: dict[str, list[str]] = {}
FAILED = ("bea", "size", 13)
FAILURE = {"reason": "out of memory", "log": digests.of_bytes(b"a log")}
ROWS = 12
TOKENIZER = b'{"version": "1.0"}'
WITNESSES: tuple[str, ...] = ()
QUORUM = 0
OLDER = False
"""Whether the round is as rounds were made once: an id of 12 digits, share documents of version 1."""
DEAL: Callable[[custody.Share], custody.Share] | None = None
"""What a dealer with a program of its own makes of each share."""


def key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def public(name: str) -> str:
    return records.public_text(key(name).public_key())


def witness(name: str) -> str:
    """A witness's vkey."""
    public_bytes = key(name).public_key().public_bytes_raw()
    return notes.Verifier(name, notes.COSIGNATURE, public_bytes).text()


def cosigned(note: str, *, at: datetime, by: tuple[str, ...] | None = None) -> str:
    """A checkpoint with the cosignatures of these witnesses, else of all of WITNESSES."""
    text, seconds = notes.parse_note(note).text, int(at.timestamp())
    names = WITNESSES if by is None else by
    return note + "".join(notes.cosign(text, name=name, key=key(name), time=seconds).line() for name in names)


@dataclass
class Made:
    """A played round: everything a bundle is made of."""

    folder: Path
    signer: log.Signer
    random: random.Random
    now: datetime = START
    entries: list[bytes] = field(default_factory=list)
    tree: log.Tree = field(default_factory=log.Tree)
    notes: dict[int, str] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    round: str = ""
    seal: dict = field(default_factory=dict)
    documents: dict[int, bytes] = field(default_factory=dict)
    submissions: list[dict] = field(default_factory=list)
    receipts: dict[int, str] = field(default_factory=dict)
    prepared: list[dict] = field(default_factory=list)
    identities: dict[str, str] = field(default_factory=dict)
    envelopes: list[dict] = field(default_factory=list)
    holdout: dict[str, pa.Table] = field(default_factory=dict)
    predictions: dict[str, pa.Table] = field(default_factory=dict)
    scores: dict[str, pa.Table] = field(default_factory=dict)
    ranking: dict = field(default_factory=dict)

    @property
    def competition(self):
        return definition.parse(DEFINITION.encode())

    def append(self, request: dict, *, keep: bool = False, after: timedelta = timedelta(seconds=1)) -> int:
        """Log a signed or unsigned request; `keep` its checkpoint for the bundle."""
        self.now += after
        given = {name: request.get(name) for name in ("by", "sig")}
        record = Record(request["type"], request["round"], self.now, request["fields"], **given)
        self.entries.append(record.encode())
        self.tree.append(digests.leaf_hash(self.entries[-1]))
        size = len(self.entries)
        self.notes[size] = cosigned(log.sign_checkpoint(self.signer, size, self.tree.root()), at=self.now)
        if keep:
            self.kept.add(size)
        return size - 1

    def signed(self, kind: str, fields: dict, *, by: str, keep: bool = False) -> int:
        return self.append(records.sign(kind, self.round, fields, key=key(by)), keep=keep)

    def scheduled(self, kind: str, fields: dict, **options) -> int:
        return self.append({"type": kind, "round": self.round, "fields": fields}, keep=True, **options)

    def receipt(self, index: int) -> str:
        size = index + 1
        proof = tuple(self.tree.inclusion_proof(index, size))
        return log.Receipt(index, self.entries[index], proof, self.notes[size]).text()

    def fold(self) -> rounds.Round:
        numbered = [(i, records.parse(entry)) for i, entry in enumerate(self.entries)]
        return rounds.fold([(i, r) for i, r in numbered if r.round == self.round], self.competition)

    def write(self, folder: Path) -> Path:
        """Write the bundle after the table of protocol.md."""
        made_bundles.write(self, folder, definition=DEFINITION, defined=defined_fields(self), public=public_files(self))
        return folder


def make(folder: Path, *, publish: bool = True) -> Made:
    """Play the round; files that the bundle needs are made below folder."""
    made = Made(folder, log.Signer(ORIGIN, key("log")), random.Random(7))
    make_splits(made)
    other = dict(defined_fields(made), name="elsewhere")
    other.pop("auditor", None)  # a draw is for one round
    made.append(records.sign("RoundDefined", "", other, key=key("organizer")))
    request = records.sign("RoundDefined", "", defined_fields(made), key=key("organizer"))
    made.round = request["round"]
    made.append(request, keep=True)
    seal_holdout(made)
    made.scheduled("RoundOpened", {"seal": made.seal["seal"]}, after=timedelta(hours=1))
    submit_all(made)
    close = made.fold()
    entries = close.frozen_entries()
    made.scheduled(
        "RoundClosed",
        {"count": len(entries), "entries_root": rounds.entries_root(entries), "forfeited": close.forfeited()},
        after=timedelta(days=31),
    )
    prepare_all(made)
    release(made)
    evaluate_all(made)
    made.ranking = rank(made)
    if publish:
        fields = {
            "ranking": digests.of_json(made.ranking),
            "policy": made.competition.ranking.digest,
            "reason": "first",
        }
        made.signed("RankingPublished", fields, by="organizer", keep=True)
    return made


def rows_of(made: Made, split: str, task: str, count: int) -> pa.Table:
    names = [f"{task}-{split}-{i}" for i in range(count)]
    clusters = [f"{split}-{i // 2}" for i in range(count)]
    targets = [made.random.choice(TASKS[task]) for _ in range(count)]
    return pa.table(
        {"example": names, "input": [f"marble {name}" for name in names], "target": targets, "cluster": clusters}
    )


def make_splits(made: Made) -> None:
    for task in TASKS:
        for split in ("preparation", "validation"):
            path = made.folder / "public" / "splits" / task / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            tables.write(rows_of(made, split, task, 8), path)
        made.holdout[task] = rows_of(made, "holdout", task, ROWS)
        (made.folder / "holdout").mkdir(exist_ok=True)
        tables.write(made.holdout[task], made.folder / "holdout" / f"{task}.parquet")
    (made.folder / "public" / "tokenizer.json").write_bytes(TOKENIZER)


def public_files(made: Made) -> dict[str, Path]:
    root = made.folder / "public"
    return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}


def defined_fields(made: Made) -> dict:
    competition = made.competition
    return {
        "competition": competition.slug,
        "name": "2027-1",
        "definition": competition.digest,
        "files": {name: digests.of_file(path) for name, path in public_files(made).items()},
        "recipe": competition.preparation.digest,
        "scorer": rounds.scorer_digest(competition),
        "policy": competition.ranking.digest,
        "code": CODE,
        "opens": format_time(START + timedelta(hours=1)),
        "closes": format_time(START + timedelta(days=30)),
        "closes_latest": format_time(START + timedelta(days=40)),
        "grace": 60,
        "release_by": format_time(START + timedelta(days=60)),
        "k": 2,
        "custodians": [
            {"name": name, "age": f"age1{name}", "ed25519": public(name), "backup": None}
            for name in competition.custody.custodians
        ],
        "log": made.signer.vkey,
        "witnesses": [witness(name) for name in WITNESSES],
        "quorum": QUORUM,
        "organizer": {"ed25519": public("organizer")},
        "evaluators": [public("evaluator")],
        **({} if OLDER else {"id_digits": records.ID_DIGITS}),
    }


def seal_holdout(made: Made) -> None:
    identities = {name: pyrage.x25519.Identity.generate() for name in made.competition.custody.custodians}
    recipients = [sealing.Recipient(name, str(i.to_public()), None) for name, i in identities.items()]
    root = made.folder / "holdout"
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    sealed = sealing.seal(
        files,
        made.folder / "holdout.sealed",
        round_id=made.round,
        recipients=recipients,
        k=2,
        random=made.random.randbytes,
    )
    made.identities = {name: str(identity) for name, identity in identities.items()}
    made.seal, made.envelopes = sealed.fields, sealed.envelopes
    if OLDER or DEAL is not None:
        redeal(made, recipients, DEAL or (lambda share: replace(share, round=None)))
    made.signed("HoldoutSealed", made.seal, by="organizer", keep=True)
    for share, envelope in zip(made.seal["shares"], made.envelopes, strict=True):
        identity = made.identities[share["to"]]
        if DEAL is None:
            made.documents[share["index"]] = custody.open_envelope(envelope, identity, share=share, of=split_of(made))
        else:  # no custodian's client would take it
            made.documents[share["index"]] = custody.unwrap(base64.b64decode(envelope["main"]), identity)
        fields = {"seal": made.seal["seal"], "index": share["index"], "commitment": share["commitment"]}
        made.signed("ShareAcknowledged", fields, by=share["to"])


def split_of(made: Made) -> custody.Split:
    defined = next(r for r in map(records.parse, made.entries) if r.round == made.round)
    return custody.Split.of(defined, made.seal["seal"])


def redeal(made: Made, recipients: list[sealing.Recipient], deal: Callable[[custody.Share], custody.Share]) -> None:
    """The same seal with other share documents, as a dealer with a program of its own makes it."""
    shares, envelopes = [], []
    for envelope, to, identity in zip(made.envelopes, recipients, made.identities.values(), strict=True):
        own = custody.unwrap(base64.b64decode(envelope["main"]), identity)
        document = deal(custody.parse_document(own)).encode()
        envelopes.append(custody.envelope(document, index=envelope["index"], to=to.name, main=to.age, backup=to.backup))
        digests_ = {
            "commitment": custody.document_digest(document),
            "envelope": custody.envelope_digest(envelopes[-1]),
        }
        shares.append({"index": envelope["index"], "to": to.name, **digests_})
    made.envelopes, made.seal = envelopes, made.seal | {"shares": shares}


def submit_all(made: Made) -> None:
    for entrant in SKILL:
        baseline = entrant == "untrained"
        fields = {
            "entrant": entrant,
            "ed25519": public(signer_of(entrant)),
            "conflicts": ["baseline"] if baseline else CONFLICTS.get(entrant, []),
        }
        made.signed("EntrantRegistered", fields, by=signer_of(entrant))
    for entrant, version in SUBMISSIONS:
        manifest = manifest_of(made, entrant, version)
        nonce = made.random.randbytes(32)
        fields = {"entrant": entrant, "commitment": digests.of_bytes(nonce + digests.canonical(manifest))}
        committed = made.signed("SubmissionCommitted", fields, by=signer_of(entrant), keep=True)
        index = made.signed("SubmissionAccepted", fields, by=signer_of(entrant), keep=True)
        made.receipts[index] = made.receipt(index)
        row = {"entrant": entrant, "index": index, "nonce": base64.b64encode(nonce).decode(), "manifest": manifest}
        made.submissions.append({**row, "committed": committed, "commitment": fields["commitment"]})


def signer_of(entrant: str) -> str:
    return "organizer" if entrant == "untrained" else entrant


def manifest_of(made: Made, entrant: str, version: int) -> dict:
    names = ("config.json", "model.safetensors")
    given = {name: digests.of_bytes(f"{entrant} {version} {name}".encode()) for name in names}
    # The competition fixes it.
    given["tokenizer.json"] = digests.of_bytes(TOKENIZER)
    return {
        "v": 1,
        "round": made.round,
        "entrant": entrant,
        "title": f"{entrant}, model {version}",
        "kind": "hf-causal-lm",
        "files": [{"name": name, "size": 100, "sha256": digest} for name, digest in given.items()],
        "family": None,
        "base": None,
        "parameters": 1000,
        "released": None,
        "weights_after": "publish",
    }


def base_of(manifest: dict) -> str:
    return digests.of_json({file["name"]: file["sha256"] for file in manifest["files"]})


def prepare_all(made: Made) -> None:
    state = made.fold()
    rows = {row["index"]: row for row in made.submissions}
    leaves = []
    for submission, task, seed in state.preparation_plan():
        row = rows[submission]
        fields = {
            "submission": submission,
            "task": task,
            "seed": seed,
            "recipe": state.defined["recipe"],
            "base": base_of(row["manifest"]),
            "code": CODE,
            "hardware": "cpu/x86_64",
        }
        fit = fit_of(row["entrant"], task, seed)
        failed = {"failed": FAILURE}
        missing = (row["entrant"], task, seed) == FAILED
        index = made.signed("ModelPrepared", {**fields, **(failed if missing else fit)}, by="evaluator")
        leaves.append(made.entries[index])
        shown = {"prepared": None, "selected": None, "cost": None, **(failed if missing else fit)}
        shown.pop("candidates", None)
        made.prepared.append(
            {"entrant": row["entrant"], "task": task, "seed": seed, "recipe": fields["recipe"], **shown}
        )
    made.scheduled("PreparationFinished", {"count": len(leaves), "root": digests.root_of_leaves(leaves)})


def fit_of(entrant: str, task: str, seed: int) -> dict:
    """What a preparation gives: the rate is chosen by the validation score at the selection seed."""
    validations = {(None, 0): 1.5, (0.002, 6): 0.5, (0.005, 6): 0.75}
    return {
        "prepared": digests.of_bytes(f"{entrant} {task} {seed}".encode()),
        "candidates": [{"lr": lr, "epoch": epoch, "validation": v} for (lr, epoch), v in validations.items()],
        "selected": {"lr": 0.002, "epoch": 6},
        "cost": {"tokens": 4096, "steps": 12, "seconds": 1.25, "flops": 1e9},
    }


def release(made: Made) -> None:
    for index, name in ((1, "custodian-a"), (3, "custodian-c")):
        digest = custody.document_digest(made.documents[index])
        fields = {"seal": made.seal["seal"], "index": index, "document": digest}
        made.signed("ShareReleased", fields, by=name, keep=index == 3)
    secret = custody.recover([custody.parse_document(made.documents[i]) for i in (1, 3)])
    opened = sealing.open_(
        made.folder / "holdout.sealed", secret, made.folder / "opened", round_id=made.round, fields=made.seal
    )
    made.scheduled("HoldoutOpened", opened.fields)


def evaluate_all(made: Made) -> None:
    state = made.fold()
    entrants = {entry.submission: entry.entrant for entry in state.entries}
    models, leaves = state.model_digests(), []
    for key_ in state.evaluation_plan():
        submission, task, seed, protocol = key_
        entrant = entrants[submission]
        name = f"predictions/{entrant}/{protocol}-{task}-{'none' if seed is None else seed}.parquet"
        made.predictions[name] = predict(made, entrant, task, seed, protocol)
        path = made.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        tables.write(made.predictions[name], path)
        fields = {
            "submission": submission,
            "task": task,
            "seed": seed,
            "protocol": protocol,
            "prepared": models[key_],
            "predictions": digests.of_file(path),
            "count": ROWS,
        }
        if (hardware := ran_on(entrant, task, seed)) is not None:
            fields["hardware"] = hardware
        fields |= ended(entrant, protocol) | with_libraries(entrant, task, seed)
        leaves.append(made.entries[made.signed("ModelEvaluated", fields, by="evaluator")])
    made.scheduled("EvaluationFinished", {"count": len(leaves), "root": digests.root_of_leaves(leaves)})


def ran_on(entrant: str, task: str, seed: int | None) -> str | None:
    """The hardware that an evaluation's record names; None: it names none, as records once did not."""
    return "cpu/x86_64"


def with_libraries(entrant: str, task: str, seed: int | None) -> dict:
    """What an evaluation's record says of libraries; nothing, as records once did."""
    return {}


def ended(entrant: str, protocol: str) -> dict:
    """What an evaluation's record says besides."""
    return {}


def predict(made: Made, entrant: str, task: str, seed: int | None, protocol: str) -> pa.Table:
    skill = SKILL[entrant] * (1.0 if protocol == "prepared" else 0.3)
    lists = []
    for target in made.holdout[task].column("target").to_pylist():
        values = [-abs(made.random.gauss(2.0, 1.0)) for _ in TASKS[task]]
        values[TASKS[task].index(target)] += skill
        lists.append(values)
    return pa.table(
        {
            "entrant": [entrant] * ROWS,
            "protocol": [protocol] * ROWS,
            "task": [task] * ROWS,
            "seed": pa.array([seed] * ROWS, pa.int64()),
            "example": made.holdout[task].column("example"),
            "loglikelihoods": pa.array(lists, pa.list_(pa.float64())),
            "text": pa.array([None] * ROWS, pa.string()),
        }
    ).cast(tables.PREDICTIONS)


def rank(made: Made) -> dict:
    competition = made.competition
    for entrant in SKILL:
        parts = []
        for task in competition.tasks:
            names = [f"predictions/{entrant}/direct-{task.name}-none.parquet"]
            names += [f"predictions/{entrant}/prepared-{task.name}-{seed}.parquet" for seed in SEEDS]
            found = pa.concat_tables(made.predictions[name] for name in names if name in made.predictions)
            parts.append(metrics.score_predictions(found, made.holdout[task.name], task, cluster="cluster"))
        made.scores[entrant] = pa.concat_tables(parts)
    if "majority" in competition.ranking.baselines:
        made.scores["majority"] = pa.concat_tables(
            metrics.majority_scores(
                tables.read(public_files(made)[f"splits/{task.name}/preparation.parquet"]),
                made.holdout[task.name],
                task,
                seeds=SEEDS,
                cluster="cluster",
            )
            for task in competition.tasks
        )
    everything = pa.concat_tables(made.scores.values())
    made_ranking = ranking.rank(
        everything,
        tasks=competition.tasks,
        policy=competition.ranking,
        entrants=list(SKILL),
        unranked=CONFLICTS,
    )
    return made_ranking.document()


def request(blobs, folder: Path):
    """A signed RoundDefined, its definition in the blobs; `folder` takes the public files."""
    blobs.put_bytes(DEFINITION.encode())
    made = Made(folder, log.Signer(ORIGIN, key("log")), None)
    for name in [f"splits/{task}/{split}.parquet" for task in TASKS for split in ("preparation", "validation")]:
        (folder / "public" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "public" / name).write_bytes(name.encode())
    return records.sign("RoundDefined", "", defined_fields(made), key=key("organizer"))
