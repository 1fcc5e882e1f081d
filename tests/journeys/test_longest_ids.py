"""The longest id that a round can have is taken wherever an id of a round is: nobody is told of a round that then can't be acknowledged."""

from pathlib import Path

import live

from acclimate_competitions import records
from acclimate_competitions.errors import CODES

LONGEST = f"{'c' * 63}-{'n' * 32}-{'0' * 32}"


def test_every_place_for_a_rounds_id_takes_the_longest_one(tmp_path: Path) -> None:
    assert len(LONGEST) == records.LONGEST_ROUND_ID and records.is_round_id(LONGEST)
    with live.serve(tmp_path) as server:
        anyone = server.anyone()
        described = anyone.get("/v1/openapi.json").json()
        places = {}
        for path, methods in described["paths"].items():
            for method, about in methods.items():
                for one in about.get("parameters", []):
                    if one["name"] in ("round", "round_id"):
                        schema = one["schema"].get("anyOf", [one["schema"]])[0]
                        places[f"{method} {path}"] = schema["maxLength"]
        assert len(places) > 25 and set(places.values()) == {records.LONGEST_ROUND_ID}
        for name, schema in described["components"]["schemas"].items():
            for field in ("round", "predecessor"):
                if field in schema.get("properties", {}):
                    found = schema["properties"][field]
                    longest = {
                        one.get("maxLength") for one in found.get("anyOf", [found]) if one.get("type") == "string"
                    }
                    assert longest <= {records.LONGEST_ROUND_ID}, (name, field, longest)
        # And the server answers that it knows none of it, not that it is too long.
        asked = ["/v1/log/checkpoint?round=" + LONGEST, "/v1/log/checkpoint?cosigned=true&round=" + LONGEST]
        asked += [
            p.replace("{round_id}", LONGEST) for p, m in described["paths"].items() if "get" in m and "round_id" in p
        ]
        for path in asked:
            answer = anyone.get(path)
            assert answer.json()["code"] in CODES.keys() - {"request_invalid"}, (path, answer.text)
