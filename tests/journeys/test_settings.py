"""Settings: what is in force and where it came from, what is refused, and that no password is printed."""

import json
import os
from pathlib import Path

import pytest
from apis import SECRET, acclimate

from acclimate import config
from acclimate.redaction import hidden
from acclimate_competitions.errors import Refusal


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://acclimate:geheim@db.example.org",
        "postgres//acclimate:geheim@db.example.org/acclimate",
        "postgresql:/acclimate:geheim@db/acclimate",
        "mysql://acclimate:ge:heim@geheim@db/acclimate",
        "host=db user=acclimate password=geheim",
        "acclimate:geheim@db/acclimate",
    ],
)
@pytest.mark.parametrize("name", ["database", "tracking", "artifacts", "blobs_endpoint", "ray_address", "host"])
def test_no_refusal_of_a_setting_prints_a_password(tmp_path: Path, url: str, name: str) -> None:
    file = tmp_path / "acclimate.toml"
    file.write_text(f"{name} = '{url}'\n", "utf-8")
    for given in ({"file": file}, {"environ": {f"ACCLIMATE_{name.upper()}": url}}, {"given": {name: url}}):
        try:
            config.load(tmp_path, **{"environ": {}, **given})
        except Refusal as refusal:
            assert SECRET not in json.dumps(refusal.document()), refusal.problems
            assert "heim" not in json.dumps(refusal.document()), refusal.problems


def test_the_settings_in_force_are_shown_with_their_origin_and_without_passwords(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "acclimate.toml"
    file.parent.mkdir()
    file.write_text(
        '# the office\nrunner = "local"\nblobs = "blobs"\ntracking = "sqlite:///tracking.db"\ndata = "../data"\n',
        "utf-8",
    )
    words = ("config", "--config", str(file), "--database", f"postgresql://a:{SECRET}@db/a", "--json")
    done = acclimate(*words, ACCLIMATE_PORT="9000")
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["file"] == str(file)
    rows = found["settings"]
    assert set(rows) == {"data", *config.SETTINGS}
    assert rows["database"] == {"value": "postgresql+psycopg://…@db/a", "from": "argument"}
    assert rows["port"] == {"value": 9000, "from": "environment ACCLIMATE_PORT"}
    assert rows["runner"] == {"value": "local", "from": f"file {file}, line 2"}
    assert rows["host"] == {"value": "127.0.0.1", "from": "default"}
    # Relative paths of a file are meant from where the file is.
    assert rows["blobs"]["value"] == str(file.parent / "blobs")
    assert rows["tracking"]["value"] == f"sqlite:///{file.parent / 'tracking.db'}"
    assert Path(rows["data"]["value"]).resolve() == (tmp_path / "data").resolve()
    text = acclimate(*words[:-1], ACCLIMATE_PORT="9000").stdout
    assert "environment ACCLIMATE_PORT" in text and f"file: {file}" in text and SECRET not in text


def test_all_that_is_wrong_is_told_at_once_with_what_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "acclimate.toml"
    file.write_text("prot = 9000\n[server]\nport = 1\n", "utf-8")
    done = acclimate("config", "--config", str(file), "--json", ACCLIMATE_RUNNNER="ray", ACCLIMATE_HOST="http://here")
    assert done.returncode == 1
    refusal = json.loads(done.stdout)["error"]
    assert refusal["code"] == "config_invalid"
    problems = "\n".join(refusal["problems"])
    assert "ACCLIMATE_RUNNNER" in problems and "did you mean ACCLIMATE_RUNNER?" in problems
    assert "line 1" in problems and "did you mean port?" in problems
    assert "server: there are no tables" in problems
    assert "ACCLIMATE_HOST" in problems and len(refusal["problems"]) == 4
    assert done.stderr.startswith("error: ") and "hint: " in done.stderr


@pytest.mark.parametrize("content", [None, "port = \n", "\xff"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "acclimate.toml"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    with pytest.raises(Refusal) as caught:
        config.load(tmp_path, file=file, environ={})
    assert caught.value.code == "config_invalid" and str(file) in caught.value.problems[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("artifacts", "s3://with space"),
        ("tracking", "mlruns"),
        ("ray_address", "head"),
        ("metrics", "yes"),
        ("drain", "-1"),
        ("drain", "١٠"),
        ("ray_address", "head:١٠"),
        ("log_level", "chatty"),
        ("database", "sqlite:///"),
    ],
)
def test_impossible_values_are_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(Refusal) as caught:
        config.load(tmp_path, environ={f"ACCLIMATE_{name.upper()}": value})
    assert name in caught.value.problems[0]


def test_no_space_for_a_data_folder_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / f".VERSION.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(Refusal) as caught:
        config.claim(config.load(tmp_path, environ={}))
    assert caught.value.code == "no_space"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@ss/w@h:5432/d?sslmode=require", "postgresql://…@h:5432/d?sslmode=require"),
        ("postgresql://h/d?user=u&password=geheim&x=1", "postgresql://h/d?user=u&password=…&x=1"),
        ("host=h password='ge heim' dbname=d", "host=h password=… dbname=d"),
        ("Authorization: Bearer acc_0123456789", "Authorization: Bearer …"),
        ("token acc_0123456789abc used", "token acc_… used"),
        ("inv_0123456789abc", "inv_…"),
        ("AGE-SECRET-KEY-1QQQQ", "…"),
        ("-----BEGIN PRIVATE KEY-----\nMC4C\n-----END PRIVATE KEY-----\n", "…\n"),
        ("http://127.0.0.1:8470/v1/rounds at 10:30:00", "http://127.0.0.1:8470/v1/rounds at 10:30:00"),
        ("sqlite:////srv/acclimate.db, ada@example.org", "sqlite:////srv/acclimate.db, ada@example.org"),
    ],
)
def test_secrets_are_taken_out_of_text_and_all_else_stays(text: str, shown: str) -> None:
    assert hidden(text) == shown
