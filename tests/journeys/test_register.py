"""`acclimate register` against a real server: how the invitation is given, and what an older server is told."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import live
from typer.testing import CliRunner

from acclimate.cli.main import app
from acclimate.service import accounts
from acclimate_competitions.errors import Refusal


def register(url: str, keys: Path, *words: str, **given):
    return CliRunner().invoke(
        app, ["register", "--server", url, "--name", keys.name, "--keys", str(keys), "--json", *words], **given
    )


def test_an_invitation_need_not_stand_in_a_command(tmp_path):
    with live.serve(tmp_path) as served:
        codes = [accounts.invite(served.store, "custodian") for _ in range(3)]
        custodian = ("--role", "custodian")
        # From the environment, from standard input, and as it was.
        for name, words, given in (
            ("a", (), {"env": {"ACCLIMATE_INVITATION": codes[0]}}),
            ("b", ("--invitation", "-"), {"input": f"{codes[1]}\n"}),
            ("c", ("--invitation", codes[2]), {}),
        ):
            ran = register(served.url, tmp_path / name, *custodian, *words, **given)
            assert ran.exit_code == 0, ran.output
            assert json.loads(ran.stdout)["role"] == "custodian"
            assert not any(code in ran.output for code in codes)
        ran = register(served.url, tmp_path / "d", *custodian, "--invitation", "-", input="")
        assert isinstance(ran.exception, Refusal) and ran.exception.code == "invitation_invalid"


def test_a_name_that_no_account_can_have_is_refused_with_one_that_can(tmp_path):
    for name in ("x" * 64, "x" * 300, "Ada Lovelace", "-a", "ada "):
        ran = CliRunner().invoke(
            app, ["register", "--server", "http://127.0.0.1:9", "--name", name, "--keys", str(tmp_path / "keys")]
        )
        assert isinstance(ran.exception, Refusal) and ran.exception.code == "name_invalid"
        assert "at most 63" in ran.exception.sentence and ran.exception.hint and len(str(ran.exception)) < 500
        assert not (tmp_path / "keys").exists()


class Older(BaseHTTPRequestHandler):
    """What a server of before answers."""

    vkey = ""

    def do_GET(self) -> None:
        body = json.dumps({"version": "0.0.9", "origin": "acclimate.localhost/log", "log": self.vkey}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        pass


def test_of_a_server_that_gives_no_challenge_the_version_is_named(tmp_path, monkeypatch):
    with live.serve(tmp_path) as served:
        monkeypatch.setattr(Older, "vkey", served.anyone().get("/v1/server").json()["log"])
    server = HTTPServer(("127.0.0.1", 0), Older)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        ran = register(f"http://127.0.0.1:{server.server_port}", tmp_path / "ada")
        assert isinstance(ran.exception, Refusal) and ran.exception.code == "challenge_invalid"
        assert "0.0.9" in ran.exception.hint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_token_is_renewed_as_often_as_one_likes(tmp_path):
    with live.serve(tmp_path) as served:
        tokens = set()
        for _ in range(3):
            served.clock.forward(milliseconds=1)
            ran = register(served.url, tmp_path / "ada", "--renew")
            assert ran.exit_code == 0, ran.output
            tokens.add(json.loads(ran.stdout)["token"])
        assert len(tokens) == 3


def test_who_has_a_token_that_is_none_any_more_is_told_the_whole_command(tmp_path):
    """Server, name, role and folder: of an organizer, too, whose role would be an entrant's if it were left out."""
    with live.serve(tmp_path) as served:
        keys, organizer = tmp_path / "acme", ("--role", "organizer")
        code = accounts.invite(served.store, "organizer")
        assert register(served.url, keys, *organizer, "--invitation", code).exit_code == 0
        path = keys / "account.json"
        # As after a restore from a backup that is older than the account's token.
        path.write_text(json.dumps({**json.loads(path.read_text()), "token": "acc_of_another_day"}))
        for words in (("round", "list", "--keys", keys), (*REGISTER, served.url, "--keys", keys, *organizer)):
            ran = CliRunner().invoke(app, [str(word) for word in words])
            assert isinstance(ran.exception, Refusal) and ran.exception.code == "token_invalid", ran.output
            command = ran.exception.hint.partition(": acclimate ")[2]
            for part in ("--renew", f"--server {served.url}", "--name acme", "--role organizer", f"--keys {keys}"):
                assert part in command
        # As somebody types it who forgets the role.
        ran = register(served.url, keys, "--renew")
        assert isinstance(ran.exception, Refusal) and "add --role organizer" in ran.exception.hint
        served.clock.forward(milliseconds=1)
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0, done.output
        assert register(served.url, keys, *organizer).exit_code == 0


REGISTER = ("register", "--name", "acme", "--server")
