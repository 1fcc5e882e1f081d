"""No form of a login is shown, by the settings or in free text, and taking it out takes time that grows with the length only."""

import json
import time
from pathlib import Path

import pytest

from acclimate import config, tracking_places
from acclimate.redaction import beginning, ending, hidden, holds_login
from acclimate_competitions.errors import Refusal

SECRET = "geheim"
LOGINS = [
    "postgresql://u:ge'geheim@db/d",
    'postgresql://u:ge"geheim@db/d',
    f"postgresql://u:{'geheim' * 60}@db/d",
    "postgresql://h/d?user=u&password=x;geheim",
    "postgresql://h/d?user=u&password=x'geheim",
    "postgresql://h/d?user=u&password=x@geheim",
    "host=h password=x&geheim",
    r"host=h password='x\'geheim' dbname=d",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BUID%3Du%3BPWD%3Dgeheim",
    "mysql://h/d?user=u&pwd=geheim",
    "mysql://h/d?user=u&passwd=geheim",
    '{"password": "geheim"}',
    "{'aws_secret_access_key': 'geheim'}",
    "AWS_SECRET_ACCESS_KEY=geheim",
    "postgresql://h/d?user=u&pass%77ord=geheim",
    "postgresql://u:x geheim@h/d",
    "postgresql://u@h/d?sslpassword=geheim",
    "postgresql://a/b:geheim@h/d",
    "postgresql://ada@corp:geheim@h/d",
    "http://geheim@mlflow:5000",
    "http://u:gehe@geheim@h/",
    "http://u:geheim/x@h:5000",
    "http://u:geheim?x@h:5000",
    "http://u:x#geheim@h:5000",
]
TEXTS = [
    "password: geheim",
    "the passphrase:geheim was wrong",
    "X-Api-Key: geheim",
    "x-auth-token : geheim",
    "Authorization: token geheim",
    "Proxy-Authorization: Digest a, response=geheim",
    "Cookie: session=geheim; other=geheim",
    "acclimate serve --password geheim --port 1",
    "--client-secret  geheim",
    "a line\nfailed at postgresql://u:x geheim@h/d",
]
PLAIN = [
    "tokens: 512, of tokenizer.json: 4",
    "password hunters find nothing here",
    "error: the secret's file is missing: /srv/secret.pem",
    "see the tokens:\nnone",
    "pass --keys DIR, or --json",
    "https://host:8470/v1/rounds",
]


@pytest.mark.parametrize("text", LOGINS)
def test_no_form_of_a_login_is_shown(tmp_path: Path, text: str) -> None:
    assert SECRET not in hidden(text) and SECRET not in hidden(f"failed: {text} (again)")
    for name in ("database", "tracking", "artifacts"):
        try:
            settings = config.load(tmp_path, environ={f"ACCLIMATE_{name.upper()}": text})
        except Refusal as refusal:
            assert SECRET not in json.dumps(refusal.document())
        else:
            assert SECRET not in config.shown(name, settings.value(name))
            assert holds_login(settings.value(name))


@pytest.mark.parametrize("text", TEXTS)
def test_no_secret_is_shown_in_free_text(text: str) -> None:
    for given in (text, f"failed: {text}", f"one\ntwo: {text}\nthree"):
        assert SECRET not in hidden(given), hidden(given)


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert hidden(text) == text


PARTS = [
    "password",
    "%3D",
    "a:/",
    "x@",
    "&a",
    "passwordtoken_",
    "%",
    "password='",
    "http://a:b ",
    "://a:b \n",
    "--token ",
    "a: ",
    "-",
]


@pytest.mark.parametrize("part", PARTS)
def test_the_time_of_redaction_grows_with_the_length_only(part: str) -> None:
    def seconds(length: int) -> float:
        # Of this process: what others do on the machine is not in it.
        text, began = part * (length // len(part)), time.process_time()
        hidden(text)
        return time.process_time() - began

    # Ten times the length: a square would be a hundred times as long.
    assert seconds(1_000_000) < 35 * min(seconds(100_000) for _ in range(3))


@pytest.mark.parametrize("text", [*LOGINS, *TEXTS, "-----BEGIN PRIVATE KEY-----\ngeheim\n-----END PRIVATE KEY-----\n"])
def test_what_a_cut_divides_is_not_shown(text: str) -> None:
    longest = 50
    for before in range(4 * longest - len(text) - 2, 4 * longest + 2):
        for filler in ("x ", "password=" + "y" * 170 + " ", "x\n"):
            given = (filler * longest * 4)[: max(0, before)].rpartition(filler[-1])[0] + filler[-1] + text + " z" * 300
            assert SECRET not in beginning(given, longest), (before, filler)
            given = "z " * 300 + "\n" + text + ("\n" + filler * longest * 4)[: max(0, before)]
            assert SECRET not in ending(given, longest), (before, filler)


def test_of_what_is_long_no_more_is_looked_at_than_may_be_shown() -> None:
    long = "http://a:b " * 3_000_000
    began = time.process_time()
    hidden(long[:400_000])
    whole = time.process_time() - began
    began = time.process_time()
    assert len(beginning(long, 20_000)) <= 20_000 and len(ending(long, 20_000)) <= 20_000
    assert time.process_time() - began < 4 * whole


@pytest.mark.parametrize(
    "url", ["http://ada:geheim/x@127.0.0.1:5999", "http://ada:geheim?x@127.0.0.1:5999", "http://:80", "http://h:x"]
)
def test_an_mlflow_address_that_cannot_be_read_is_refused_and_nothing_of_it_printed(tmp_path: Path, url: str) -> None:
    with pytest.raises(Refusal) as caught:
        config.load(tmp_path, environ={"ACCLIMATE_TRACKING": url})
    assert caught.value.code == "config_invalid" and SECRET not in json.dumps(caught.value.document())
    with pytest.raises(Refusal) as caught:
        tracking_places.reach(url)
    assert caught.value.code == "server_unreachable" and SECRET not in json.dumps(caught.value.document())
