"""The tables of schema version 1, as the releases before this folder made them.

Revision ID: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import TypeEngine

from acclimate.migrations import guards

revision, down_revision = "0001", None


def _text(length: int | None = None) -> TypeEngine[str]:
    kind = sa.Text if length is None else sa.String
    return kind(length).with_variant(kind(length, collation="C"), "postgresql")


_whole = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    """Make them, in the order of their foreign keys."""
    _people_and_log()
    _rounds()
    _work()
    guards.functions(op.get_bind())
    guards.install(op.get_bind())
    if op.get_bind().dialect.name == "sqlite":
        op.execute("PRAGMA user_version = 1")


def _people_and_log() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", _text(64), primary_key=True),
        sa.Column("role", _text(16), nullable=False),
        sa.Column("ed25519", _text(44), nullable=False, unique=True),
        sa.Column("token_hash", _text(71), nullable=False, unique=True),
        sa.Column("created", _text(27), nullable=False),
    )
    op.create_table(
        "invitations",
        sa.Column("code_hash", _text(71), primary_key=True),
        sa.Column("role", _text(16), nullable=False),
        sa.Column("used_by", _text(64), sa.ForeignKey("accounts.id")),
    )
    op.create_table(
        "log_entries",
        sa.Column("index", _whole, primary_key=True, autoincrement=False),
        sa.Column("round", _text(120), nullable=False, index=True),
        sa.Column("type", _text(32), nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "log_checkpoints",
        sa.Column("size", _whole, primary_key=True, autoincrement=False),
        sa.Column("note", _text(), nullable=False),
        sa.Column("at", _text(27), nullable=False),
    )


def _rounds() -> None:
    op.create_table(
        "rounds",
        sa.Column("id", _text(120), primary_key=True),
        sa.Column("competition", _text(64), nullable=False),
        sa.Column("name", _text(64), nullable=False),
        sa.Column("owner", _text(64), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("definition", _text(71), nullable=False),
        sa.Column("created", _text(27), nullable=False),
        sa.UniqueConstraint("competition", "name"),
    )
    op.create_table(
        "seals",
        sa.Column("seal", _text(71), primary_key=True),
        sa.Column("round", _text(120), sa.ForeignKey("rounds.id"), nullable=False, index=True),
        sa.Column("kind", _text(16), nullable=False),
        sa.Column("header", sa.JSON, nullable=False),
        sa.Column("envelopes", sa.JSON, nullable=False),
        sa.Column("number", _whole, nullable=False),
        sa.Column("received", _text(27), nullable=False),
        sa.Column("succeeded", _text(27)),
    )
    op.create_table(
        "share_documents",
        sa.Column("seal", _text(71), sa.ForeignKey("seals.seal"), primary_key=True),
        sa.Column("index", _whole, primary_key=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "submissions",
        sa.Column("id", _text(36), primary_key=True),
        sa.Column("round", _text(120), sa.ForeignKey("rounds.id"), nullable=False, index=True),
        sa.Column("entrant", _text(64), nullable=False),
        sa.Column("owner", _text(64), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("commitment", _text(71), nullable=False),
        sa.Column("nonce", _text(44), nullable=False),
        sa.Column("manifest", sa.JSON, nullable=False),
        sa.Column("acceptance", sa.JSON, nullable=False),
        sa.Column("state", _text(16), nullable=False),
        sa.Column("reason", _text(), nullable=False),
        sa.Column("committed_index", _whole, nullable=False),
        sa.Column("accepted_index", _whole),
        sa.Column("created", _text(27), nullable=False),
        sa.UniqueConstraint("round", "commitment"),
    )
    op.create_table(
        "quota_ledger",
        sa.Column("id", _whole, primary_key=True),
        sa.Column("round", _text(120), sa.ForeignKey("rounds.id"), nullable=False, index=True),
        sa.Column("entrant", _text(64), nullable=False),
        sa.Column("submission", _text(36), sa.ForeignKey("submissions.id"), nullable=False),
        sa.Column("kind", _text(16), nullable=False),
        sa.Column("delta", _whole, nullable=False),
        sa.Column("reason", _text(), nullable=False),
        sa.Column("at", _text(27), nullable=False),
    )
    op.create_table(
        "uploads",
        sa.Column("submission", _text(36), sa.ForeignKey("submissions.id"), primary_key=True),
        sa.Column("digest", _text(71), primary_key=True),
        sa.Column("size", _whole, nullable=False),
        sa.Column("at", _text(27), nullable=False),
    )
    op.create_table(
        "openings",
        sa.Column("round", _text(120), sa.ForeignKey("rounds.id"), primary_key=True),
        sa.Column("files", sa.JSON, nullable=False),
        sa.Column("code", _text(32), nullable=False),
        sa.Column("problem", _text(), nullable=False),
        sa.Column("at", _text(27), nullable=False),
    )


def _work() -> None:
    op.create_table(
        "stages",
        sa.Column("key", _text(71), primary_key=True),
        sa.Column("round", _text(120), sa.ForeignKey("rounds.id"), nullable=False, index=True),
        sa.Column("kind", _text(16), nullable=False),
        sa.Column("submission", _text(36), sa.ForeignKey("submissions.id"), nullable=False),
        sa.Column("task", _text(64)),
        sa.Column("seed", _whole),
        sa.Column("protocol", _text(16)),
        sa.Column("state", _text(16), nullable=False),
        sa.Column("attempt", _text(71)),
        sa.Column("attempts", _whole, nullable=False),
        sa.Column("progress", sa.Float, nullable=False),
        sa.Column("reason", _text(), nullable=False),
        sa.Column("heartbeat", _text(27)),
    )
    op.create_table(
        "results",
        sa.Column("stage", _text(71), sa.ForeignKey("stages.key"), primary_key=True),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("at", _text(27), nullable=False),
    )
    op.create_table(
        "outbox",
        sa.Column("id", _whole, primary_key=True),
        sa.Column("round", _text(120), nullable=False, index=True),
        sa.Column("stage", _text(71), unique=True),
        sa.Column("payload", sa.JSON, nullable=False),
        sa.Column("run", _text(64)),
    )
