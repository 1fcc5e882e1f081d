"""An organizer gives up blocked work, with a reason.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0007", "0006"


def upgrade() -> None:
    """Add the column."""
    kind = sa.String(2000).with_variant(sa.String(2000, collation="C"), "postgresql")
    op.add_column("wishes", sa.Column("reason", kind))
    if op.get_bind().dialect.name == "sqlite":
        # So that the release before this one refuses it, as every other database of a later revision.
        op.execute("PRAGMA user_version = 7")
