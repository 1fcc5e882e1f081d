"""The doctor asks a real cluster, as the dispatcher would."""

from collections.abc import Callable
from pathlib import Path

import pytest

from acclimate import config, doctor_machine


@pytest.mark.slow
def test_a_cluster_is_asked_for_its_machines_and_its_refusals_are_told(
    ray_clusters: Callable, with_token: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_machine, "WITHIN", 200.0)
    cluster = ray_clusters()
    cluster.add(num_cpus=3)
    settings = config.load(tmp_path, environ={}, given={"ray_address": cluster.address})
    (found,) = doctor_machine.ray(settings)
    assert found.state == "ok" and "3 CPU" in found.found
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    (found,) = doctor_machine.ray(settings)
    assert found.state == "missing" and "token" in found.found and found.hint
    assert "f" * 64 not in found.found + found.hint
