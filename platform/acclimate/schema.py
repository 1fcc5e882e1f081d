"""The tables. How a database comes to have them is in migrations/; a test holds the two against each other, on each engine.

On PostgreSQL text is compared by its code points (collation "C"), as SQLite does, whatever the database's own collation is; and
integers have 64 bits, as SQLite's have.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.types import TypeEngine


def _text(length: int | None = None) -> TypeEngine[str]:
    kind = Text if length is None else String
    return kind(length).with_variant(kind(length, collation="C"), "postgresql")


_whole = Integer().with_variant(BigInteger(), "postgresql")

metadata = MetaData()

accounts = Table(
    "accounts",
    metadata,
    Column("id", _text(64), primary_key=True),  # an entrant's id for good, across rounds
    Column("role", _text(16), nullable=False),  # organizer | entrant | custodian | analyst
    Column("ed25519", _text(44), nullable=False, unique=True),
    Column("token_hash", _text(71), nullable=False, unique=True),
    Column("created", _text(27), nullable=False),
    Column("proven", _text(27)),  # of the challenge that the last registration signed; null before there were any
)
invitations = Table(
    "invitations",
    metadata,
    Column("code_hash", _text(71), primary_key=True),
    Column("role", _text(16), nullable=False),
    Column("used_by", _text(64), ForeignKey("accounts.id")),
)
log_entries = Table(
    "log_entries",
    metadata,
    Column("index", _whole, primary_key=True, autoincrement=False),
    Column("round", _text(120), nullable=False, index=True),
    Column("type", _text(32), nullable=False),
    Column("data", LargeBinary, nullable=False),
)
log_checkpoints = Table(
    "log_checkpoints",
    metadata,
    Column("size", _whole, primary_key=True, autoincrement=False),
    Column("note", _text(), nullable=False),
    Column("at", _text(27), nullable=False),
)
cosignatures = Table(  # a witness's line under the checkpoint of a size
    "cosignatures",
    metadata,
    Column("size", _whole, primary_key=True, autoincrement=False),
    Column("witness", _text(), primary_key=True),  # its verifier key
    Column("line", _text(), nullable=False),
    Column("time", _whole, nullable=False),  # what the witness says: seconds since 1970
    Column("at", _text(27), nullable=False),  # when it came, by the database's clock
    Index("cosignatures_by_witness", "witness", "size"),
)
rounds = Table(
    "rounds",
    metadata,
    Column("id", _text(120), primary_key=True),
    Column("competition", _text(64), nullable=False),
    Column("name", _text(64), nullable=False),
    Column("owner", _text(64), ForeignKey("accounts.id"), nullable=False),
    Column("definition", _text(71), nullable=False),  # digest of the blob
    Column("created", _text(27), nullable=False),
    UniqueConstraint("competition", "name"),
)
seals = Table(
    "seals",
    metadata,
    Column("seal", _text(71), primary_key=True),
    Column("round", _text(120), ForeignKey("rounds.id"), nullable=False, index=True),
    Column("kind", _text(16), nullable=False),  # real | rehearsal
    Column("header", JSON, nullable=False),  # the fields of HoldoutSealed
    Column("envelopes", JSON, nullable=False),  # [{index, to, main, backup}], age files as base64
    Column("number", _whole, nullable=False, default=0),  # of the round's seals, in the order they came
    Column("received", _text(27), nullable=False),
    Column("succeeded", _text(27)),  # rehearsal only: when the dummy was opened
)
share_documents = Table(
    "share_documents",
    metadata,
    Column("seal", _text(71), ForeignKey("seals.seal"), primary_key=True),
    Column("index", _whole, primary_key=True),
    Column("document", LargeBinary, nullable=False),
)
submissions = Table(
    "submissions",
    metadata,
    Column("id", _text(36), primary_key=True),
    Column("round", _text(120), ForeignKey("rounds.id"), nullable=False, index=True),
    Column("entrant", _text(64), nullable=False),
    Column("owner", _text(64), ForeignKey("accounts.id"), nullable=False),  # the entrant; of a baseline the organizer
    Column("commitment", _text(71), nullable=False),
    Column("nonce", _text(44), nullable=False),
    Column("manifest", JSON, nullable=False),
    Column(
        "acceptance", JSON, nullable=False
    ),  # the entrant's signed SubmissionAccepted, logged once the check has passed
    Column("state", _text(16), nullable=False),  # uploading | checking | accepted | refused | forfeited | withdrawn
    Column("reason", _text(), nullable=False, default=""),
    Column("committed_index", _whole, nullable=False),
    Column("accepted_index", _whole),
    Column("created", _text(27), nullable=False),
    UniqueConstraint("round", "commitment"),
)
quota_ledger = Table(
    "quota_ledger",
    metadata,
    Column("id", _whole, primary_key=True),
    Column("round", _text(120), ForeignKey("rounds.id"), nullable=False, index=True),
    Column("entrant", _text(64), nullable=False),
    Column("submission", _text(36), ForeignKey("submissions.id"), nullable=False),
    Column("kind", _text(16), nullable=False),  # debit | refused | cancelled | platform; see service/quota.py
    Column("delta", _whole, nullable=False),  # −1 a debit, +1 a refund
    Column("reason", _text(), nullable=False),
    Column("at", _text(27), nullable=False),
)
uploads = Table(
    "uploads",
    metadata,
    Column("submission", _text(36), ForeignKey("submissions.id"), primary_key=True),
    Column("digest", _text(71), primary_key=True),
    Column("size", _whole, nullable=False),
    Column("at", _text(27), nullable=False),
)
openings = Table(
    "openings",
    metadata,
    Column("round", _text(120), ForeignKey("rounds.id"), primary_key=True),
    Column("files", JSON, nullable=False),  # the opened holdout: name -> digest of the blob; {} where it didn't open
    Column("code", _text(32), nullable=False, default=""),  # why it didn't open: a refusal's code and sentence
    Column("problem", _text(), nullable=False, default=""),
    Column("at", _text(27), nullable=False),
)
stages = Table(
    "stages",
    metadata,
    Column("key", _text(71), primary_key=True),
    Column("round", _text(120), ForeignKey("rounds.id"), nullable=False, index=True),
    Column("kind", _text(16), nullable=False),  # check | select | prepare | evaluate
    Column("submission", _text(36), ForeignKey("submissions.id"), nullable=False),
    Column("task", _text(64)),
    Column("seed", _whole),
    Column("protocol", _text(16)),
    Column("state", _text(16), nullable=False),  # see stages.STATES
    Column("attempt", _text(71), index=True),
    Column("attempts", _whole, nullable=False, default=0),  # tries that count against a budget
    Column("progress", Float, nullable=False, default=0.0),
    Column("reason", _text(), nullable=False, default=""),
    Column("heartbeat", _text(27)),
    Column("fence", _whole, nullable=False, default=0, server_default="0"),  # of the newest try; only grows
    Column("code", _text(32)),  # of the reason: see retries.py
    Column("not_before", _text(27)),  # before when it isn't tried again
    Column("place", _whole),  # in the queue, from 1, while it waits
    Column("expected", Float),  # seconds that the whole attempt should take
)
attempts = Table(  # a try of some stages of one entry together
    "attempts",
    metadata,
    Column("attempt", _text(71), primary_key=True),  # digest of the sorted keys of its stages
    Column("fence", _whole, primary_key=True, autoincrement=False),  # from 1, none used twice
    Column("round", _text(120), ForeignKey("rounds.id"), nullable=False, index=True),
    Column("submission", _text(36), ForeignKey("submissions.id"), nullable=False),
    Column("kind", _text(16), nullable=False),
    Column("stages", JSON, nullable=False),  # their keys
    # starting | running | verifying | lost | committed | failed | given_back | cancelled; what is open is asked for twice a second
    Column("state", _text(16), nullable=False, index=True),
    Column("code", _text(32), nullable=False, default=""),  # of its end
    Column("reason", _text(), nullable=False, default=""),
    Column("machine", _text(), nullable=False, default=""),
    Column("epoch", _whole, nullable=False),  # of the lease under which it was claimed
    Column("claimed", _text(27), nullable=False),
    Column("ended", _text(27)),
)
events = Table(  # what became of each attempt, one row a change, in the change's own transaction
    "events",
    metadata,
    Column("id", _whole, primary_key=True),
    Column("at", _text(27), nullable=False),
    Column("round", _text(120), nullable=False, index=True),
    Column("kind", _text(16), nullable=False),
    Column("submission", _text(36), nullable=False),
    Column("attempt", _text(71), nullable=False, index=True),
    Column("fence", _whole, nullable=False),
    Column("epoch", _whole, nullable=False),
    Column("event", _text(16), nullable=False),  # see event_history.EVENTS
    Column("code", _text(32), nullable=False, default=""),
    Column("reason", _text(), nullable=False, default=""),
    Column("machine", _text(), nullable=False, default=""),
)
wishes = Table(  # what people ask of the leading dispatcher
    "wishes",
    metadata,
    Column("id", _whole, primary_key=True),
    Column("round", _text(120), ForeignKey("rounds.id"), nullable=False),
    Column("stage", _text(71), ForeignKey("stages.key"), nullable=False),
    Column("wish", _text(16), nullable=False),  # retry | give_up
    Column("account", _text(64), ForeignKey("accounts.id"), nullable=False),
    Column("at", _text(27), nullable=False),
    Column("done", _text(27)),
    Column("reason", _text(2000)),  # of give_up: the organizer's public words
)
results = Table(
    "results",
    metadata,
    Column("stage", _text(71), ForeignKey("stages.key"), primary_key=True),
    Column("document", JSON, nullable=False),  # of kind prepare: one of Outcome.results["prepared"]; and so on
    Column("at", _text(27), nullable=False),
)
outbox = Table(
    "outbox",
    metadata,
    Column("id", _whole, primary_key=True),
    Column("round", _text(120), nullable=False, index=True),
    Column("stage", _text(71), unique=True),
    Column("payload", JSON, nullable=False),
    Column("run", _text(64)),  # MLflow run id once logged
)
installation = Table(  # one row
    "installation",
    metadata,
    Column("id", _text(36), primary_key=True),  # also in blobs/INSTALLATION
    Column("log", _text(), nullable=False),  # the log's verifier key
    Column("evaluator", _text(44), nullable=False),
    Column("created", _text(27), nullable=False),
)
leases = Table(
    "leases",
    metadata,
    Column("name", _text(32), primary_key=True),  # dispatch
    Column("holder", _text(64), nullable=False),
    Column("epoch", _whole, nullable=False),  # one more with each change of holder or process
    Column("expires", _text(27), nullable=False),
)
pools = Table(  # what the leading dispatcher last saw of its machines; one row a lease
    "pools",
    metadata,
    Column("name", _text(32), primary_key=True),
    Column("runner", _text(16), nullable=False),  # ray | local
    Column("slots", _whole, nullable=False),
    Column("machines", JSON, nullable=False),  # [{name, cpus, gpus, memory, labels}]
    Column("problem", _text(), nullable=False, default=""),
    Column("at", _text(27), nullable=False),
)
