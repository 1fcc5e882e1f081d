"""Settings that name witnesses: where they are read from, what is refused, and what is warned of."""

import json

import rounds_made
from apis import acclimate, api
from databases import refused
from partners import three

from acclimate import config, log

__all__ = ["three"]


def test_settings_of_witnesses_are_read_from_file_and_environment(three, tmp_path):
    texts = [one.text for one in three]
    file = tmp_path / "acclimate.toml"
    lines = ",\n".join(f'  "{text}"' for text in texts)
    file.write_text(f"quorum = 2\nwitnesses = [\n{lines}\n]\n", "utf-8")
    found = config.load(tmp_path, file=file, environ={})
    assert found.witnesses == tuple(texts) and found.quorum == 2
    environ = {"ACCLIMATE_WITNESSES": f"{texts[0]} ; {texts[1]}\n{texts[2]};", "ACCLIMATE_QUORUM": "3"}
    assert config.load(tmp_path, environ=environ).witnesses == tuple(texts)
    assert config.load(tmp_path, environ={"ACCLIMATE_WITNESSES": ""}).witnesses == ()
    assert config.shown("witnesses", found.witnesses) == "; ".join(texts)


def test_impossible_settings_of_witnesses_are_refused_with_what_is_wrong(three, tmp_path):
    text = three[0].text
    url, key = text.split()
    log_kind = log.Signer("log.example.org", rounds_made.key("log")).vkey
    for given, quorum, told in (
        ([text], 2, "2 of 1 witnesses can't be reached"),
        ([], 1, "1 of 0 witnesses can't be reached"),
        ([url], 1, "expected 2"),
        ([f"{url} {key[:-4]}AAAA"], 1, "verifier key"),
        ([f"{url} {log_kind}"], 1, "expected 0x04"),
        ([f"ftp://w.example.org {key}"], 1, "plain http address"),
        ([f"http://user:secret@w.example.org {key}"], 1, "plain http address"),
        ([text, f"http://elsewhere.example.org {key}"], 1, "one key"),
        (7, 0, "must be a list"),
    ):
        refusal = refused(
            "config_invalid", config.load, tmp_path, environ={}, given={"witnesses": given, "quorum": quorum}
        )
        assert any(told in problem for problem in refusal.problems), (given, refusal.problems)
        assert "secret" not in str(refusal.problems).replace("user:secret@w", "") or "secret" not in str(given)


def test_witnesses_without_a_quorum_are_warned_of_by_config_and_at_each_start(three, tmp_path):
    environ = {"ACCLIMATE_WITNESSES": "; ".join(one.text for one in three)}
    shown = acclimate("config", "--data", str(tmp_path / "data"), "--json", **environ)
    (warning,) = json.loads(shown.stdout)["warnings"]
    assert warning["name"] == "quorum" and "names 3, and `quorum` is 0" in warning["sentence"] and warning["hint"]
    text = acclimate("config", "--data", str(tmp_path / "data"), **environ).stdout
    assert f"warning: {warning['sentence']}" in text and f"hint: {warning['hint']}" in text
    with api(tmp_path / "data", **environ) as server:
        told = [line for line in server.lines() if line["event"] == "setting"]
        assert [(line["level"], line["name"], line["reason"]) for line in told] == [
            ("warning", "quorum", warning["sentence"])
        ]
        assert server.end() == 0
    well = environ | {"ACCLIMATE_QUORUM": "2"}
    assert json.loads(acclimate("config", "--data", str(tmp_path / "data"), "--json", **well).stdout)["warnings"] == []
    with api(tmp_path / "other", **well) as server:
        assert not [line for line in server.lines() if line["event"] == "setting"]
        assert server.end() == 0
