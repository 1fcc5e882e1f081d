"""Challenges of registrations.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0004", "0003"


def upgrade() -> None:
    """Add the column."""
    kind = sa.String(27).with_variant(sa.String(27, collation="C"), "postgresql")
    op.add_column("accounts", sa.Column("proven", kind))
    if op.get_bind().dialect.name == "sqlite":
        # So that the release before this one refuses what it would not understand.
        op.execute("PRAGMA user_version = 4")
