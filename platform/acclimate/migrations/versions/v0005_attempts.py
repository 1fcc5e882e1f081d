"""Attempts, their fences and their history.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import TypeEngine

from acclimate.migrations import guards

revision, down_revision = "0005", "0004"


def _text(length: int | None = None) -> TypeEngine[str]:
    kind = sa.Text if length is None else sa.String
    return kind(length).with_variant(kind(length, collation="C"), "postgresql")


_whole = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    """Make the tables; the tries that there were keep their numbers."""
    op.add_column("stages", sa.Column("fence", _whole, nullable=False, server_default="0"))
    op.add_column("stages", sa.Column("code", _text(32)))
    op.add_column("stages", sa.Column("not_before", _text(27)))
    op.add_column("stages", sa.Column("place", _whole))
    op.add_column("stages", sa.Column("expected", sa.Float()))
    # Numbers of actors may have been given back, so the next one lies beyond all that were used.
    op.execute("UPDATE stages SET fence = attempts + 1 WHERE attempt IS NOT NULL")
    op.create_table(
        "attempts",
        sa.Column("attempt", _text(71), primary_key=True),
        sa.Column("fence", _whole, primary_key=True, autoincrement=False),
        sa.Column("round", _text(120), sa.ForeignKey("rounds.id"), nullable=False),
        sa.Column("submission", _text(36), sa.ForeignKey("submissions.id"), nullable=False),
        sa.Column("kind", _text(16), nullable=False),
        sa.Column("stages", sa.JSON(), nullable=False),
        sa.Column("state", _text(16), nullable=False),
        sa.Column("code", _text(32), nullable=False),
        sa.Column("reason", _text(), nullable=False),
        sa.Column("machine", _text(), nullable=False),
        sa.Column("epoch", _whole, nullable=False),
        sa.Column("claimed", _text(27), nullable=False),
        sa.Column("ended", _text(27)),
    )
    op.create_index("ix_attempts_round", "attempts", ["round"])
    op.create_index("ix_attempts_state", "attempts", ["state"])
    op.create_table(
        "events",
        sa.Column("id", _whole, primary_key=True),
        sa.Column("at", _text(27), nullable=False),
        sa.Column("round", _text(120), nullable=False),
        sa.Column("kind", _text(16), nullable=False),
        sa.Column("submission", _text(36), nullable=False),
        sa.Column("attempt", _text(71), nullable=False),
        sa.Column("fence", _whole, nullable=False),
        sa.Column("epoch", _whole, nullable=False),
        sa.Column("event", _text(16), nullable=False),
        sa.Column("code", _text(32), nullable=False),
        sa.Column("reason", _text(), nullable=False),
        sa.Column("machine", _text(), nullable=False),
    )
    op.create_index("ix_events_round", "events", ["round"])
    op.create_index("ix_events_attempt", "events", ["attempt"])
    op.create_table(
        "wishes",
        sa.Column("id", _whole, primary_key=True),
        sa.Column("round", _text(120), sa.ForeignKey("rounds.id"), nullable=False),
        sa.Column("stage", _text(71), sa.ForeignKey("stages.key"), nullable=False),
        sa.Column("wish", _text(16), nullable=False),
        sa.Column("account", _text(64), sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("at", _text(27), nullable=False),
        sa.Column("done", _text(27)),
    )
    guards.install(op.get_bind())
    if op.get_bind().dialect.name == "sqlite":
        # So that the release before this one refuses what it would not understand.
        op.execute("PRAGMA user_version = 5")
