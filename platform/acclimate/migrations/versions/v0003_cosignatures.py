"""Cosignatures of witnesses.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import TypeEngine

revision, down_revision = "0003", "0002"


def _text(length: int | None = None) -> TypeEngine[str]:
    kind = sa.Text if length is None else sa.String
    return kind(length).with_variant(kind(length, collation="C"), "postgresql")


_whole = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "cosignatures",
        sa.Column("size", _whole, primary_key=True, autoincrement=False),
        sa.Column("witness", _text(), primary_key=True),
        sa.Column("line", _text(), nullable=False),
        sa.Column("time", _whole, nullable=False),
        sa.Column("at", _text(27), nullable=False),
    )
    op.create_index("cosignatures_by_witness", "cosignatures", ["witness", "size"])
    if op.get_bind().dialect.name == "sqlite":
        # So that the release before this one refuses what it would not understand.
        op.execute("PRAGMA user_version = 3")
