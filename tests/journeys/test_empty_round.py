"""An empty word of an address, as an unset $ROUND gives: refused by every command before anything is read, asked or sent."""

from pathlib import Path

import pytest

from acclimate import keys
from acclimate.cli.main import app
from acclimate.client import Client
from acclimate.client.pins import pinned
from acclimate_competitions.errors import Refusal

# Nothing listens there: who asked it first would say server_unreachable.
NOWHERE = "http://127.0.0.1:9"
COMMANDS = [
    "status {} --server URL",
    "ranking {} --server URL",
    "enter {} --keys DIR",
    "submit DIR --round {} --keys DIR",
    "submission status --round {} --keys DIR",
    "receipt verify DIR/receipt --log-key DIR --round {}",
    "round seal {} DIR --keys DIR",
    "round extend {} --closes 2027-01-01T00:00:00Z --keys DIR",
    "round publish {} --keys DIR",
    "round void {} --reason why --keys DIR",
    "round request {} --out DIR/request --server URL",
    "round records {} --server URL",
    "round files {} --out DIR/public --server URL",
    "round bundle {} --out DIR/bundle.zip --server URL",
    "custodian ack {} --keys DIR",
    "custodian inspect {} --keys DIR",
    "custodian release {} --keys DIR",
    "custodian approve-void {} --reason why --keys DIR",
    "audit draw {} --keys DIR",
    "audit run {} --keys DIR",
    "audit status {} --keys DIR",
    "plan {} --server URL",
]


@pytest.mark.parametrize("given", ["", "  "])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_round_id_is_refused_with_what_to_look_at(command: str, given: str, tmp_path: Path) -> None:
    words = [given if word == "{}" else word for word in command.split()]
    with pytest.raises(Refusal, match=r"round's id is empty: is \$ROUND set") as refused:
        app([word.replace("DIR", str(tmp_path)).replace("URL", NOWHERE) for word in words], standalone_mode=False)
    assert refused.value.code == "round_unknown"
    assert list(tmp_path.iterdir()) == []


def test_a_pin_is_of_no_empty_beginning(tmp_path: Path) -> None:
    made = keys.create(tmp_path / "cara", age=True)
    (made.folder / "pins.json").write_text('{"digits-2027-1-0a7b65ef6e43": {}}')
    with pytest.raises(Refusal, match="is empty"):
        pinned(made, "")


def test_the_client_asks_no_server_for_an_empty_id() -> None:
    with Client(NOWHERE) as client, pytest.raises(Refusal, match="is empty"):
        client.round("")


@pytest.mark.parametrize("word", ["", " ", ".", "..", "a/b", "/"])
def test_no_word_leads_to_another_address(word: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Client(NOWHERE) as client:
        for code, ask in (
            ("not_found", lambda: client.stage("tiny-1", word)),
            ("submission_unknown", lambda: client.submission(word)),
            ("submission_unknown", lambda: client.complete(word)),
            ("submission_unknown", lambda: client.put_file(word, Path(__file__), digest="sha256:0")),
            ("request_invalid", lambda: client.put_file("one", Path(__file__), digest=word)),
            ("request_invalid", lambda: client.put_blob(Path(__file__), digest=word or "/")),
            ("request_invalid", lambda: client.audit_file("tiny-1", word, out)),
            ("request_invalid", lambda: client.post("tiny-1", word, {})),
            *([("request_invalid", lambda: client.file("tiny-1", word, out))] if word != "a/b" else []),
        ):
            with pytest.raises(Refusal) as refused:
                ask()
            assert refused.value.code == code


def test_an_empty_key_of_a_stage_is_refused_with_where_keys_are() -> None:
    with pytest.raises(Refusal, match="key is empty") as refused:
        app(["stage", "why", "tiny-1", "", "--server", NOWHERE], standalone_mode=False)
    assert refused.value.code == "not_found" and "stage list" in refused.value.hint
