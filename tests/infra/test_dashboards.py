"""Rules and dashboard against the real thing: every metric and label that they name is exported by an API or a dispatcher."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import rounds_made
import yaml
from live import Live, commit, enter, open_round, send_files, serve
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import insert

from acclimate.api.access import ACCESS
from acclimate.dispatch_health import HealthServer, Vitals
from acclimate.store import pools, stages, timestamp

INFRA = Path(__file__).parents[2] / "infra"
RULES = yaml.safe_load((INFRA / "prometheus/rules.yaml").read_text("utf-8"))
SCRAPED = yaml.safe_load((INFRA / "prometheus/prometheus.yaml").read_text("utf-8"))
DASHBOARD = json.loads((INFRA / "grafana/acclimate.json").read_text("utf-8"))
# Prometheus's own.
ALWAYS = {"up": set()}
TARGET = {"job", "instance"}

Exported = dict[str, dict[str, set[str]]]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def expressions() -> dict[str, str]:
    found = {rule["alert"]: rule["expr"] for rule in alerts()}
    for panel in DASHBOARD["panels"]:
        found |= {f"{panel['title']} {target['refId']}": target["expr"] for target in panel["targets"]}
    return found


def series(text: str) -> dict[str, set[str]]:
    """Name -> labels of what a page of metrics holds; a family without samples counts with no labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" if family.type == "counter" else family.name
        found.setdefault(name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("api")
    # Nobody listens there, so there is something to tell of.
    witness = f"http://127.0.0.1:9 {rounds_made.witness('witness.example.org')}"
    with serve(folder, metrics="on", witnesses=[witness], quorum=1) as live:
        _something_to_count(live, folder)
        # A request that is counted.
        httpx.get(f"{live.url}/v1/server").raise_for_status()
        # Facts are kept for a moment, and this machine may be quicker than that.
        until = time.monotonic() + 30
        while "acclimate_pool_problem" not in (page := httpx.get(f"{live.url}/metrics").raise_for_status()).text:
            assert time.monotonic() < until
            time.sleep(0.2)
        vitals = Vitals()
        vitals.started["prepare"] += 1
        vitals.failed["runner_failed"] += 1
        vitals.transitions["RoundOpened"] += 1
        health = HealthServer(vitals, live.store, ("127.0.0.1", 0))
        try:
            other = httpx.get(f"http://127.0.0.1:{health.port}/metrics").raise_for_status()
        finally:
            health.close()
    return {"acclimate-api": series(page.text), "acclimate-dispatcher": series(other.text)}


def _something_to_count(live: Live, folder: Path) -> None:
    """A round, a submission that waits to be checked, and the row that a dispatcher writes of its pool."""
    staged = open_round(live, folder)
    entrant = enter(staged, live.actor("entrant-a", "entrant"))
    made, files = commit(staged, entrant, seed=1)
    send_files(entrant, made, files)
    entrant.post(f"/v1/submissions/{made['submission']}/complete")
    with live.store.transaction() as tx:
        check = {"kind": "check", "submission": made["submission"], "state": "pending"}
        tx.execute(insert(stages), {"key": "sha256:" + "0" * 64, "round": staged.round, **check})
        pool = {"runner": "ray", "slots": 0, "machines": [], "problem": "Ray is away", "at": timestamp(tx)}
        tx.execute(insert(pools), {"name": "dispatch", **pool})


def selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, str):
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


@pytest.mark.parametrize("name", expressions())
def test_every_metric_and_label_is_exported(name: str, exported: Exported) -> None:
    text = expressions()[name]
    found = list(selectors(promql_parser.parse(text)))
    assert len(found) == len(re.findall(r"\b(?:acclimate_\w+|up)\{", text)) > 0
    for selector in found:
        matchers = {m.name: m.value for m in selector.matchers.matchers}
        # The same name means another thing at the other job.
        job = matchers.pop("job")
        known = exported[job] | ALWAYS
        assert selector.name in known, f"{job} has no {selector.name}"
        assert matchers.keys() <= known[selector.name] | TARGET, selector.name
    grouped = {label for labels in re.findall(r"\bby \(([^)]*)\)", text) for label in re.split(r",\s*", labels)}
    labels = set().union(*({**exported[job], **ALWAYS}.get(s.name, set()) for s in found for job in exported))
    assert grouped <= labels | TARGET


def test_a_name_that_is_not_exported_would_be_found(exported: Exported) -> None:
    names = set().union(*exported.values())
    assert "acclimate_ready" in names and "acclimate_dispatcher_leader" in names
    assert "acclimate_http_requests_total" in names and "acclimate_nonsense" not in names


def test_the_jobs_are_those_that_are_scraped() -> None:
    jobs = {job["job_name"] for job in SCRAPED["scrape_configs"]}
    assert jobs == {"acclimate-api", "acclimate-dispatcher"}
    assert SCRAPED["rule_files"] == ["/etc/prometheus/rules.yaml"]
    monitors = yaml.safe_load_all((INFRA / "kubernetes/components/watch/monitors.yaml").read_text("utf-8"))
    endpoints = [e for m in monitors for e in m["spec"]["podMetricsEndpoints"]]
    assert {e["relabelings"][0]["replacement"] for e in endpoints} == jobs


def test_rules_say_how_urgent_they_are_and_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 10
    for rule in alerts():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert len(rule["annotations"]["description"]) > 40


def test_nobody_answering_and_nobody_known_are_both_told(exported: Exported) -> None:
    """count() of an empty vector is empty, so that a comparison of it is never true; absent() of one is 1."""
    (down,) = [rule["expr"] for rule in alerts() if rule["alert"] == "AcclimateApiDown"]
    parsed = promql_parser.parse(down)
    assert isinstance(parsed, promql_parser.Call) and parsed.func.name == "absent"
    assert down == 'absent(up{job="acclimate-api"} == 1)'
    # No rule compares a count, or a sum by nothing, with less than something: that is how an alert stays silent on nothing.
    for rule in alerts():
        assert not re.search(r"\bcount\b", rule["expr"]), rule["alert"]
        if re.search(r"(<=?|== 0)", rule["expr"]):
            assert re.search(r"absent\(|\b(max|min)\b", rule["expr"]), rule["alert"]
    # How long a download takes is up to who downloads.
    (slow,) = [rule["expr"] for rule in alerts() if rule["alert"] == "AcclimateSlow"]
    (pattern,) = [
        m.value for s in selectors(promql_parser.parse(slow)) for m in s.matchers.matchers if m.name == "route"
    ]
    left_out = {route for _, route in ACCESS if re.fullmatch(pattern, route)}
    assert left_out == {
        "/v1/rounds/{round_id}/files/{name:path}",
        "/v1/rounds/{round_id}/audits/files/{digest}",
        "/v1/submissions/{submission}/files/{digest}",
        "/v1/rounds/{round_id}/bundle",
        "/v1/rounds/{round_id}/report",
    }


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert DASHBOARD["uid"] == "acclimate"
    assert len({p["id"] for p in panels}) == len(panels)
    cells = [
        (x, y)
        for p in panels
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["title"] and panel["datasource"]["uid"] == "${source}"
    provided = yaml.safe_load((INFRA / "grafana/provisioning/dashboards/acclimate.yaml").read_text("utf-8"))
    compose = yaml.safe_load((INFRA / "compose/compose.yaml").read_text("utf-8"))
    folder = provided["providers"][0]["options"]["path"]
    assert any(f"{folder}/acclimate.json" in volume for volume in compose["services"]["grafana"]["volumes"])
