"""What Alembic runs for each command: on the connection, and so in the transaction, of whoever called it (see __init__.py)."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    # SQLite alters little; Alembic then rebuilds the table, and `upgrade` puts its triggers back.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
