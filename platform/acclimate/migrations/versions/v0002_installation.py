"""Installation, leases and pools.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import TypeEngine

revision, down_revision = "0002", "0001"


def _text(length: int | None = None) -> TypeEngine[str]:
    kind = sa.Text if length is None else sa.String
    return kind(length).with_variant(kind(length, collation="C"), "postgresql")


_whole = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    """Make the tables; the row of the installation is the caller's to fill, from its keys."""
    op.create_table(
        "installation",
        sa.Column("id", _text(36), primary_key=True),
        sa.Column("log", _text(), nullable=False),
        sa.Column("evaluator", _text(44), nullable=False),
        sa.Column("created", _text(27), nullable=False),
    )
    op.create_table(
        "leases",
        sa.Column("name", _text(32), primary_key=True),
        sa.Column("holder", _text(64), nullable=False),
        sa.Column("epoch", _whole, nullable=False),
        sa.Column("expires", _text(27), nullable=False),
    )
    op.create_table(
        "pools",
        sa.Column("name", _text(32), primary_key=True),
        sa.Column("runner", _text(16), nullable=False),
        sa.Column("slots", _whole, nullable=False),
        sa.Column("machines", sa.JSON, nullable=False),
        sa.Column("problem", _text(), nullable=False),
        sa.Column("at", _text(27), nullable=False),
    )
    if op.get_bind().dialect.name == "sqlite":
        # So that the release before this one refuses what it would not understand.
        op.execute("PRAGMA user_version = 2")
