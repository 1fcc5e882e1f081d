"""Stages are found by their attempt.

Revision ID: 0006
Revises: 0005
"""

from alembic import op

revision, down_revision = "0006", "0005"


def upgrade() -> None:
    """Make the index: each heartbeat of an attempt read all stages that there are."""
    op.create_index("ix_stages_attempt", "stages", ["attempt"])
    if op.get_bind().dialect.name == "sqlite":
        # So that the release before this one refuses it, as every other database of a later revision.
        op.execute("PRAGMA user_version = 6")
