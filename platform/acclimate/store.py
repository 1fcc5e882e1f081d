"""SQL tables and transactions: what happened. SQLite (WAL) as the embedded default; every decision by the database's clock."""

from sqlalchemy import (
    JSON,
    Column,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION = 1

metadata = MetaData()

accounts = Table(
    "accounts",
    metadata,
    Column("id", String(64), primary_key=True),  # an entrant's id for good, across rounds
    Column("role", String(16), nullable=False),  # organizer | entrant | custodian | analyst
    Column("ed25519", String(44), nullable=False, unique=True),
    Column("token_hash", String(71), nullable=False, unique=True),
    Column("created", String(27), nullable=False),
)
invitations = Table(
    "invitations",
    metadata,
    Column("code_hash", String(71), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("used_by", String(64), ForeignKey("accounts.id")),
)
log_entries = Table(
    "log_entries",
    metadata,
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("round", String(120), nullable=False, index=True),
    Column("type", String(32), nullable=False),
    Column("data", LargeBinary, nullable=False),
)
log_checkpoints = Table(
    "log_checkpoints",
    metadata,
    Column("size", Integer, primary_key=True, autoincrement=False),
    Column("note", Text, nullable=False),
    Column("at", String(27), nullable=False),
)
rounds = Table(
    "rounds",
    metadata,
    Column("id", String(120), primary_key=True),
    Column("competition", String(64), nullable=False),
    Column("name", String(64), nullable=False),
    Column("owner", String(64), ForeignKey("accounts.id"), nullable=False),
    Column("definition", String(71), nullable=False),  # digest of the blob
    Column("created", String(27), nullable=False),
    UniqueConstraint("competition", "name"),
)
seals = Table(
    "seals",
    metadata,
    Column("seal", String(71), primary_key=True),
    Column("round", String(120), ForeignKey("rounds.id"), nullable=False, index=True),
    Column("kind", String(16), nullable=False),  # real | rehearsal
    Column("header", JSON, nullable=False),  # the fields of HoldoutSealed
    Column("envelopes", JSON, nullable=False),  # [{index, to, main, backup}], age files as base64
    Column("succeeded", String(27)),  # rehearsal only: when the dummy was opened
)
share_documents = Table(
    "share_documents",
    metadata,
    Column("seal", String(71), ForeignKey("seals.seal"), primary_key=True),
    Column("index", Integer, primary_key=True),
    Column("document", LargeBinary, nullable=False),
)
submissions = Table(
    "submissions",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("round", String(120), ForeignKey("rounds.id"), nullable=False, index=True),
    Column("entrant", String(64), ForeignKey("accounts.id"), nullable=False),
    Column("commitment", String(71), nullable=False),
    Column("nonce", String(44), nullable=False),
    Column("manifest", JSON, nullable=False),
    Column(
        "acceptance", JSON, nullable=False
    ),  # the entrant's signed SubmissionAccepted, logged once the check has passed
    Column("state", String(16), nullable=False),  # uploading | checking | accepted | refused | forfeited | withdrawn
    Column("reason", Text, nullable=False, default=""),
    Column("committed_index", Integer, nullable=False),
    Column("accepted_index", Integer),
    Column("created", String(27), nullable=False),
    UniqueConstraint("round", "commitment"),
)
quota_ledger = Table(
    "quota_ledger",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("round", String(120), ForeignKey("rounds.id"), nullable=False, index=True),
    Column("entrant", String(64), ForeignKey("accounts.id"), nullable=False),
    Column("delta", Integer, nullable=False),  # −1 a debit, +1 a refund
    Column("reason", Text, nullable=False),
    Column("at", String(27), nullable=False),
)
stages = Table(
    "stages",
    metadata,
    Column("key", String(71), primary_key=True),
    Column("round", String(120), ForeignKey("rounds.id"), nullable=False, index=True),
    Column("kind", String(16), nullable=False),  # check | select | prepare | evaluate
    Column("submission", String(36), ForeignKey("submissions.id"), nullable=False),
    Column("task", String(64)),
    Column("seed", Integer),
    Column("protocol", String(16)),
    Column("state", String(16), nullable=False),  # pending | running | committed | failed | blocked
    Column("attempt", String(71)),
    Column("attempts", Integer, nullable=False, default=0),
    Column("progress", Float, nullable=False, default=0.0),
    Column("reason", Text, nullable=False, default=""),
    Column("heartbeat", String(27)),
)
results = Table(
    "results",
    metadata,
    Column("stage", String(71), ForeignKey("stages.key"), primary_key=True),
    Column("document", JSON, nullable=False),  # of kind prepare: one of Outcome.results["prepared"]; and so on
    Column("at", String(27), nullable=False),
)
outbox = Table(
    "outbox",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("round", String(120), nullable=False, index=True),
    Column("stage", String(71), unique=True),
    Column("payload", JSON, nullable=False),
    Column("run", String(64)),  # MLflow run id once logged
)
