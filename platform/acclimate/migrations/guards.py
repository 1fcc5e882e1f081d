"""What the database itself refuses, whoever writes: log_entries grows by one entry at a time and never changes, nor do results and events."""

from sqlalchemy import Connection, inspect

_SQLITE = {
    "log_entries_no_update": """BEFORE UPDATE ON log_entries
  BEGIN SELECT RAISE(ABORT, 'log_entries is insert-only'); END""",
    "log_entries_no_delete": """BEFORE DELETE ON log_entries
  BEGIN SELECT RAISE(ABORT, 'log_entries is insert-only'); END""",
    "log_entries_in_order": """BEFORE INSERT ON log_entries
  WHEN NEW."index" <> COALESCE((SELECT MAX("index") + 1 FROM log_entries), 0)
  BEGIN SELECT RAISE(ABORT, 'log_entries is insert-only and without gaps'); END""",
    "results_no_update": """BEFORE UPDATE ON results
  BEGIN SELECT RAISE(ABORT, 'results is insert-only'); END""",
    "results_no_delete": """BEFORE DELETE ON results
  BEGIN SELECT RAISE(ABORT, 'results is insert-only'); END""",
    "results_no_replace": """BEFORE INSERT ON results
  WHEN EXISTS (SELECT 1 FROM results WHERE stage = NEW.stage)
  BEGIN SELECT RAISE(ABORT, 'results is insert-only: this stage has a result'); END""",
    "events_no_update": """BEFORE UPDATE ON events
  BEGIN SELECT RAISE(ABORT, 'events is insert-only'); END""",
    "events_no_delete": """BEFORE DELETE ON events
  BEGIN SELECT RAISE(ABORT, 'events is insert-only'); END""",
    "events_no_replace": """BEFORE INSERT ON events
  WHEN EXISTS (SELECT 1 FROM events WHERE id = NEW.id)
  BEGIN SELECT RAISE(ABORT, 'events is insert-only: there is one of this id'); END""",
}
_POSTGRESQL = {
    "log_entries_no_update": "BEFORE UPDATE ON log_entries FOR EACH ROW EXECUTE FUNCTION acclimate_insert_only()",
    "log_entries_no_delete": "BEFORE DELETE ON log_entries FOR EACH ROW EXECUTE FUNCTION acclimate_insert_only()",
    "log_entries_no_truncate": "BEFORE TRUNCATE ON log_entries FOR EACH STATEMENT EXECUTE FUNCTION acclimate_insert_only()",
    "log_entries_in_order": "BEFORE INSERT ON log_entries FOR EACH ROW EXECUTE FUNCTION acclimate_in_order()",
    "results_no_update": "BEFORE UPDATE ON results FOR EACH ROW EXECUTE FUNCTION acclimate_insert_only()",
    "results_no_delete": "BEFORE DELETE ON results FOR EACH ROW EXECUTE FUNCTION acclimate_insert_only()",
    "results_no_truncate": "BEFORE TRUNCATE ON results FOR EACH STATEMENT EXECUTE FUNCTION acclimate_insert_only()",
    "events_no_update": "BEFORE UPDATE ON events FOR EACH ROW EXECUTE FUNCTION acclimate_insert_only()",
    "events_no_delete": "BEFORE DELETE ON events FOR EACH ROW EXECUTE FUNCTION acclimate_insert_only()",
    "events_no_truncate": "BEFORE TRUNCATE ON events FOR EACH STATEMENT EXECUTE FUNCTION acclimate_insert_only()",
}
_FUNCTIONS = (
    # clock_timestamp(), not now(): a transaction that waited for the writers' lock began before its turn came.
    """CREATE OR REPLACE FUNCTION acclimate_now() RETURNS text LANGUAGE sql VOLATILE AS $$
  SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') $$""",
    """CREATE OR REPLACE FUNCTION acclimate_insert_only() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  RAISE EXCEPTION '% is insert-only', TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation'; END $$""",
    """CREATE OR REPLACE FUNCTION acclimate_in_order() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF NEW."index" <> COALESCE((SELECT MAX("index") + 1 FROM log_entries), 0) THEN
    RAISE EXCEPTION 'log_entries is insert-only and without gaps' USING ERRCODE = 'integrity_constraint_violation';
  END IF; RETURN NEW; END $$""",
)


def functions(connection: Connection) -> None:
    """Make the functions of PostgreSQL; SQLite's are registered by each connection."""
    if connection.dialect.name == "postgresql":
        for statement in _FUNCTIONS:
            connection.exec_driver_sql(statement.replace("%", "%%"))


def install(connection: Connection) -> list[str]:
    """Make what `wrong` names (a rebuilt table of SQLite has lost its triggers); its names."""
    wanted, found = _wanted(connection), wrong(connection)
    if any(what.startswith("function") for what in found):
        functions(connection)
    for name in [what.removeprefix("trigger ") for what in found if what.startswith("trigger")]:
        connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {name}{_on(connection, name)}")
        connection.exec_driver_sql(f"CREATE TRIGGER {name} {wanted[name]}")
    return found


def wrong(connection: Connection) -> list[str]:
    """The triggers and functions that are not there, are switched off, or do something else than they should."""
    wanted = _wanted(connection)
    if connection.dialect.name == "sqlite":
        query = "SELECT sql FROM sqlite_master WHERE type = 'trigger'"
    else:
        query = "SELECT pg_get_triggerdef(pg_trigger.oid, true) FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid"
        query += " WHERE tgenabled IN ('O', 'A') AND relnamespace = current_schema()::regnamespace"
    # By what they say, not by name: another table may have one of the same name.
    there = {_words(definition) for definition in connection.exec_driver_sql(query).scalars()}
    found = [f"trigger {name}" for name in wanted if _words(f"CREATE TRIGGER {name} {wanted[name]}") not in there]
    if connection.dialect.name == "postgresql":
        query = "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = current_schema()::regnamespace"
        bodies = {name: _words(body) for name, body in connection.exec_driver_sql(query)}
        for statement in _FUNCTIONS:
            head, body, _ = statement.split("$$")
            name = head.split("FUNCTION ")[1].partition("(")[0]
            found += [f"function {name}"] if bodies.get(name) != _words(body) else []
    return found


def _words(text: str) -> str:
    return " ".join(text.split())


def _wanted(connection: Connection) -> dict[str, str]:
    """By name; of tables that are there, as the first revisions had fewer."""
    every = _SQLITE if connection.dialect.name == "sqlite" else _POSTGRESQL
    there = set(inspect(connection).get_table_names())
    return {name: text for name, text in every.items() if _table(name) in there}


def _on(connection: Connection, name: str) -> str:
    if connection.dialect.name == "sqlite":
        return ""
    return f" ON {_table(name)}"


def _table(name: str) -> str:
    return name.partition("_no_")[0].removesuffix("_in_order")
