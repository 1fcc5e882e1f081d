"""A second operator for tests: its account at a live server, the round that names it, and what an evaluator who cheats would log in that."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import live as staging
import numpy as np
import pytest
import tiny
from dispatching import dispatcher, give_shares, step_until
from live import Live, Staged
from safetensors.numpy import load_file, save_file

from acclimate import bundle, keys, verify
from acclimate.client import auditor, folder, reruns
from acclimate.client.connection import Client
from acclimate.service import accounts, identity, publish
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round

PEOPLE = {"ada": 1, "bea": 2}
TOLERANCE = 0.05
ELSEWHERE = "cpu/elsewhere/neon"


def refuses(code, act, /, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        act(*arguments, **named)
    assert caught.value.code == code, caught.value
    return caught.value


@dataclass
class Lab:
    """The second operator, and the round it is named by."""

    staged: Staged
    client: Client
    keys: keys.Keys

    @property
    def state(self) -> Round:
        with self.staged.live.store.snapshot() as tx:
            return tx.round(self.staged.round)

    def run(self) -> list[dict[str, Any]]:
        return list(reruns.run(self.client, self.keys, self.staged.round))

    @property
    def work(self) -> Path:
        return self.keys.folder / "audits" / self.staged.round


def lab_of(live: Live, where: Path) -> tuple[Client, keys.Keys]:
    own = auditor.open_keys(where)
    auditor.keygen(own, name="lab")
    with Client(live.url) as visitor:
        invitation = accounts.invite(live.store, "auditor")
        account = folder.register_account(visitor, own, name="lab", role="auditor", invitation=invitation)
        folder.keep_log_key(where, folder.log_key(visitor, where))
    return account.connect(where), own


def audited(patch: pytest.MonkeyPatch, *, audits: int, tolerance: float = TOLERANCE) -> None:
    asked = f'audits = {audits}\nauditor = "lab"\naudit_tolerance = {tolerance}'
    patch.setattr(tiny, "DEFINITION", ORIGINAL.replace("audits = 0", asked))


ORIGINAL = tiny.DEFINITION


# ---- the rest of the honest round, and what its bundle shows ----------------------------------------------------------


def publish_round(lab: Lab, where: Path) -> Path:
    """The bundle of a prepared round that goes on honestly."""
    give_shares(lab.staged)
    with dispatcher(lab.staged.live) as working:
        step_until(working, lambda: lab.state.phase is Phase.EVALUATED)
    return publish_evaluated(lab, where)


def publish_evaluated(lab: Lab, where: Path) -> Path:
    """The bundle of an evaluated round, which its organizer publishes."""
    live, staged = lab.staged.live, lab.staged
    ranking = publish.ranking(live.store, staged.round).document()
    fields = {"ranking": digests.of_json(ranking), "policy": staged.fields["policy"], "reason": ""}
    request = live.organizer().sign("RankingPublished", staged.round, **fields)
    answer = live.organizer().post(f"{staged.path}/ranking", {"record": request, "ranking": ranking})
    assert answer.status_code == 200, answer.text
    return bundle.write(live.store, live.store.blobs, staged.round, where / "bundle")


def line(report: verify.Report, name: str) -> verify.Check:
    return next(check for check in report.checks if check.name == name)


# ---- a dishonest evaluator ------------------------------------------------------------------------------------------


def closed_round(live: Live, where: Path, **changes: Any) -> Staged:
    """A round with everybody's models, closed."""
    start = live.clock.now
    later = {
        name: records.format_time(start + timedelta(days=days))
        for name, days in {"opens": 1, "closes": 2, "closes_latest": 2, "release_by": 30}.items()
    }
    staged = staging.open_round(live, where, **later, **changes)
    for name, seed in PEOPLE.items():
        staging.submit_model(staged, staging.enter(staged, live.actor(name)), seed=seed)
    live.clock.set(staged.fields["closes"], seconds=1)
    assert live.tick() == ["RoundClosed"]
    return staged


def log_preparations(lab: Lab, honest: Lab, lie: Callable[..., dict[str, Any]]) -> None:
    """The evaluator says of every preparation what an honest one had, but for its lies."""
    live = lab.staged.live
    names = {entry.submission: entry.entrant for entry in lab.state.entries}
    same = {entry.entrant: entry.submission for entry in honest.state.entries}
    signer = identity.load(live.settings, live.store).evaluator_key
    with live.store.transaction() as tx:
        for submission, task, seed in lab.state.preparations:
            entrant = names[submission]
            fields = dict(honest.state.prepared[same[entrant], task, seed].fields) | {"submission": submission}
            fields |= lie(entrant, task, seed, fields)
            tx.append(records.sign("ModelPrepared", lab.staged.round, fields, key=signer))
    assert live.tick() == ["PreparationFinished"]


def moved(lab: Lab, digest: str, where: Path, *, by: float) -> str:
    """A model's weights with noise of this size, as a blob."""
    blobs = lab.staged.live.store.blobs
    with blobs.local(digest) as path:
        weights = load_file(path)
    noise = np.random.default_rng(7)
    weights = {n: (w + by * noise.normal(size=w.shape)).astype(np.float32) for n, w in weights.items()}
    save_file(weights, where / "moved.safetensors", metadata={"format": "pt"})
    return str(blobs.put(where / "moved.safetensors"))
