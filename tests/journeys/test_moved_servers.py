"""A server that has another address now: its people take their key folders along, and no other server gets them."""

import json

import pytest
from cli_world import World, build_model, new_round, person, world
from commands import Run, done, refused
from strange_servers import answering

__all__ = ["world"]


def moved(world: World) -> str:
    """The same server by another address."""
    return world.url.replace("127.0.0.1", "localhost")


def test_an_account_follows_its_server_to_another_address(acclimate: Run, world: World, tmp_path):
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "ada")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model")
    words = ("--title", "A", "--weights-after", "delete", "--no-wait", "--keys", me)
    done(acclimate("submit", model, "--round", round_id, *words))
    world.accept_checked()
    before = json.loads((me / "account.json").read_text())
    again = ("register", "--server", moved(world), "--name", "ada", "--keys", me)
    ran = acclimate(*again)
    assert ran.code == 1 and "at http://127.0.0.1" in ran.err and "has the server moved?" in ran.err
    assert "--renew" in ran.err and json.loads((me / "account.json").read_text()) == before
    world.tick(round_id, seconds=1)
    done(acclimate(*again, "--renew"))
    after = json.loads((me / "account.json").read_text())
    assert after["server"] == moved(world) and after["token"] != before["token"] and after["id"] == "ada"
    # What was sent to the old address is known at the new one, with its receipts.
    (mine,) = done(acclimate("submission", "status", "--keys", me, "--json")).json
    assert mine["state"] == "accepted" and mine["receipt"]
    done(acclimate("submission", "withdraw", mine["commitment"], "--keys", me))
    # An organizer's rounds, too.
    organizer = person(acclimate, world, "organizer", "organizer")
    world.tick(round_id, seconds=1)
    renew = ("--role", "organizer", "--keys", organizer, "--renew")
    done(acclimate("register", "--server", moved(world), "--name", "organizer", *renew))
    assert done(acclimate("status", round_id[:12], "--keys", organizer)).code == 0
    world.tick(round_id, seconds=1)
    done(acclimate("register", "--server", world.url, "--name", "organizer", *renew))


@pytest.mark.parametrize("renew", [False, True])
def test_an_account_follows_to_no_other_log(acclimate: Run, world: World, tmp_path, renew):
    me = person(acclimate, world, "bea")
    other = World(tmp_path / "other")
    before = {path.name: path.read_bytes() for path in me.iterdir()}
    try:
        more = ["--renew"] if renew else []
        ran = acclimate("register", "--server", other.url, "--name", "bea", "--keys", me, *more, "--json")
        refused(ran, "log_inconsistent" if renew else "conflict")
    finally:
        other.close()
    assert {path.name: path.read_bytes() for path in me.iterdir()} == before
    # Without the log's key nobody can say which server is the same.
    (me / "log.vkey").unlink()
    ran = acclimate("register", "--server", moved(world), "--name", "bea", "--keys", me, "--renew", "--json")
    assert "log.vkey" in ran.json["error"]["hint"] and refused(ran, "conflict")
    (me / "log.vkey").write_bytes(before["log.vkey"])


@pytest.mark.parametrize(
    "where", ["https://new.example.org{path}", "https://new.example.org/", "//new.example.org{path}"]
)
def test_an_address_that_leads_elsewhere_is_told_and_no_token_follows(acclimate: Run, world: World, tmp_path, where):
    me = tmp_path / "me"
    me.mkdir()
    for path in person(acclimate, world, "eve").iterdir():
        (me / path.name).write_bytes(path.read_bytes())
        (me / path.name).chmod(path.stat().st_mode)
    account = json.loads((me / "account.json").read_text())
    with answering(b"", status=301, headers={"Location": where.format(path="/v1/rounds/x-1")}) as url:
        (me / "account.json").write_text(json.dumps({**account, "server": url}))
        ran = acclimate("status", "x-1", "--keys", me, "--json")
    assert "leads to http" in refused(ran, "server_unreachable") and "new.example.org" in ran.err
    assert "register --renew" in ran.json["error"]["hint"]
