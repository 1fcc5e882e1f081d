"""The demo: a whole round on one machine, each actor with its own keys and client, over the public HTTP API.

Nothing here has a way that production lacks: the servers are `acclimate api` and `acclimate dispatch` as processes of their
own, invitations come from the server's own machine as an operator would give them, and the round closes by the
database's clock.

Everything is found again by looking at what exists (files, accounts, the round's records), so a demo that was killed
goes on where it stopped. One case can't go on: a round whose time to submit ended while the demo was dead. As in real
life the organizer voids it, after the close with the custodians' approval, and opens a successor.
"""

import fcntl
import json
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from acclimate import config, demo_servers, keys
from acclimate.client import connection, custodian, entrant, folder, organizer, voiding
from acclimate.demo_talk import Talk, open_still
from acclimate_competitions import definition, records, rounds
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round

COMPETITION = "digits"
CRAMMER, CRAMMED = "crammer", "digit"
CUSTODIANS = ("custodian-a", "custodian-b", "custodian-c")
ABSENT = "custodian-b"
BASELINE = "untrained"
WINDOW = timedelta(seconds=15)
MARGIN = timedelta(seconds=4)
LATEST = timedelta(hours=1)
RELEASE_BY = timedelta(days=7)
LOOK = 0.4
Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What a played round came to; `document` is what --json writes."""

    document: dict[str, Any]
    verdict: int
    verdict_line: str
    mlflow_command: str
    verify_command: str


class Actor:
    """Somebody with keys of their own, an account, and a client that speaks for it."""

    def __init__(self, where: Path, url: str, *, role: str, invite: Callable[[str], str]) -> None:
        self.name = where.name
        has_keys = (where / keys.ED25519_FILE).exists()
        self.keys = keys.load(where) if has_keys else keys.create(where, age=role == "custodian")
        if not (where / folder.ACCOUNT_FILE).exists():
            with connection.Client(url) as visitor:
                code = None if role == "entrant" else invite(role)
                folder.register_account(visitor, self.keys, name=self.name, role=role, invitation=code)
        self.client = folder.load_account(where).connect(where)


class Play:
    """One demo: its folder, its people, and the round they play.

    Args:
        data: the folder, with the built competition and the models.
        servers: that it speaks to.
        models: names of the models; the one called BASELINE, if any, is the organizer's.
        say: told of what happens.
        console: where progress bars go.
        prefix: of the round's name.
    """

    def __init__(
        self,
        data: Path,
        servers: demo_servers.Servers,
        models: list[str],
        *,
        say: Say,
        console: Console,
        prefix: str = "demo",
    ) -> None:
        self.prefix = prefix
        self.data, self.servers, self.models, self.console = data, servers, models, console
        self.talk = Talk(say, console=console)
        self.say = self.talk.say
        self.built = data / "competition"
        self.competition: Competition = definition.load(self.built)
        self.organizer = self._actor("organizer", "organizer")
        self.custodians = [self._actor(name, "custodian") for name in CUSTODIANS]
        # The organizer submits the baseline; it stands in the table without a rank.
        self.entrants = {name: self.organizer if name == BASELINE else self._actor(name, "entrant") for name in models}
        self.id = ""
        self._told = 0
        self._said: defaultdict[str, set[str]] = defaultdict(set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for actor in {id(one): one for one in (self.organizer, *self.custodians, *self.entrants.values())}.values():
            actor.client.close()

    def _actor(self, name: str, role: str) -> Actor:
        return Actor(self.data / "actors" / name, self.servers.url, role=role, invite=self._invite)

    def _invite(self, role: str) -> str:
        return str(demo_servers.answered("invite", "--data", str(self.servers.data), "--role", role)["invitation"])

    # ---- the round ---------------------------------------------------------------------------------------------------

    def round(self) -> Round:
        """The round as its public records say; tells of phases that have passed since the last look."""
        self.servers.check()
        state = rounds.fold(self.organizer.client.records(self.id), self.competition)
        for phase, at in state.phases[self._told :]:
            self.say(f"[bold]{phase}[/bold] {_MEANING[phase]} [dim]{at:%H:%M:%S} UTC[/dim]")
        self._told = len(state.phases)
        return state

    def play(self) -> Round:
        """Play until the ranking is published."""
        acts: dict[Phase, Callable[[], None]] = {
            Phase.DRAFT: self.seal,
            Phase.SEALED: self.acknowledge,
            Phase.OPEN: self.submit,
            Phase.CLOSED: self.wait_for_preparation,
            Phase.PREPARED: self.release,
            Phase.RELEASED: lambda: self.wait(Phase.RELEASED),
            Phase.OPENED: self.wait_for_evaluation,
            Phase.EVALUATED: self.publish,
        }
        self.find_round()
        while (state := self.round()).phase != Phase.PUBLISHED:
            if state.phase == Phase.VOIDED:
                raise Refusal(
                    "phase_wrong", f"round {self.id} was voided", hint="run the demo again: it opens a successor"
                )
            short = state.closed is not None and len(state.entries) < len(self.entrants)
            if short or (state.phase in (Phase.DRAFT, Phase.SEALED) and self._server_time() >= state.closes):
                # The machine was held up for longer than the window: the successor's is twice as long.
                self.void(state)
                self.find_round()
            else:
                acts[state.phase]()
        return state

    def find_round(self) -> None:
        """The newest round that can still be played to its end, or a new one."""
        mine = [item for item in self.organizer.client.rounds() if item["competition"] == self.competition.slug]
        for item in mine:
            self.id, self._told = item["round"], 0
            state = rounds.fold(self.organizer.client.records(self.id), self.competition)
            ended = state.phase == Phase.PUBLISHED and len(state.entries) < len(self.entrants)
            if state.phase == Phase.VOIDED or ended:
                continue
            if self._can_go_on(state):
                self.say(f"going on with round {self.id}")
                return
            self.void(state)
        now = datetime.now(UTC)
        people = [
            {"name": c.name, "age": c.keys.age_recipient, "ed25519": c.keys.public, "backup": None}
            for c in self.custodians
        ]
        self.id = organizer.create_round(
            self.organizer.client,
            self.organizer.keys,
            self.built,
            custodians=people,
            opens=now,
            closes=now + WINDOW * 2 ** min(len(mine), 4),
            closes_latest=now + LATEST,
            release_by=now + RELEASE_BY,
            name=f"{self.prefix}-{len(mine) + 1}",
        )
        self._told = 0

    def _can_go_on(self, state: Round) -> bool:
        everybody = len(self.entrants)
        if state.closed is not None:
            return len(state.entries) == everybody
        return len(state.submissions) == everybody or self._server_time() < state.closes - MARGIN

    def _server_time(self) -> datetime:
        return records.parse_time(self.organizer.client.terms()["now"])

    def void(self, state: Round) -> None:
        """Void a round that closed without all entrants; after the close the custodians approve."""
        try:
            self._void(state)
        except Refusal as refusal:
            # It may have closed meanwhile, and approvals are good in one phase only.
            if refusal.code not in ("guard_failed", "signature_invalid"):
                raise
            self._void(self.round())
        self.say(f"round {self.id} was interrupted while it was open: voided, a successor follows")

    def _void(self, state: Round) -> None:
        reason = "the demo was interrupted while the round was open"
        approvals = [
            voiding.approve_void(c.client, c.keys, self.id, reason=reason)
            for c in self.custodians
            # Before the round opens no approval is needed, and who has not acknowledged yet can't give one.
            if c.name != ABSENT and state.phase not in (Phase.DRAFT, Phase.SEALED)
        ]
        organizer.void(
            self.organizer.client,
            self.organizer.keys,
            self.id,
            reason=reason,
            approvals=approvals,
        )

    def seal(self) -> None:
        """The organizer seals the holdout for the custodians, and hands in the rehearsal."""
        organizer.seal_round(self.organizer.client, self.organizer.keys, self.id, self.built)

    def acknowledge(self) -> None:
        """Each custodian shows that it can decrypt its share; together they open the rehearsal's dummy."""
        for actor in self.custodians:
            custodian.acknowledge(actor.client, actor.keys, self.id)
        while (state := self.round()).phase == Phase.SEALED and self._server_time() < state.closes:
            time.sleep(LOOK)

    def submit(self) -> None:
        """All entrants submit at once; the organizer extends, by a signed record, where the machine is too slow for the window."""
        state = self.round()
        if (now := self._server_time()) > state.closes - WINDOW + MARGIN and state.phase == Phase.OPEN:
            # Sealing and rehearsing took a part of it.
            self._extend(now + WINDOW)
        with ThreadPoolExecutor(len(self.entrants)) as pool, _bar(self.console) as bar:
            task = bar.add_task("models accepted", total=len(self.entrants))
            futures = [pool.submit(self._submit, name, actor) for name, actor in self.entrants.items()]
            while not all(future.done() for future in futures):
                time.sleep(LOOK)
                state = self.round()
                accepted = {s.entrant for s in state.submissions.values() if s.accepted is not None}
                bar.update(task, completed=len(accepted))
                self._name("accepted", accepted)
                self.talk.still(f"  {len(accepted)} of {len(self.entrants)} models are accepted")
                late = len(state.submissions) < len(self.entrants) and not any(
                    f.done() and f.exception() for f in futures
                )
                if state.phase == Phase.OPEN and late and self._server_time() > state.closes - MARGIN:
                    self._extend(state.closes + WINDOW)
            _all(futures)
        if (state := self.round()).phase == Phase.OPEN:
            self.say(f"all models are accepted; the round closes {state.closes:%H:%M:%S} UTC")
        self.wait(Phase.OPEN)

    def _extend(self, closes: datetime) -> None:
        organizer.extend(self.organizer.client, self.organizer.keys, self.id, closes=closes)
        self.say(f"this machine is slow: the organizer extends to {closes:%H:%M:%S} UTC")

    def _submit(self, name: str, actor: Actor) -> None:
        model = self.data / "models" / name
        about = json.loads((model / "entrant.json").read_text("utf-8"))
        baseline = name if name == BASELINE else ""
        if name not in self._entrants():
            if baseline:
                organizer.enter_baseline(actor.client, actor.keys, self.id, name=name)
            else:
                entrant.enter_round(actor.client, actor.keys, self.id)
        done = entrant.submit(
            actor.client,
            actor.keys,
            self.id,
            model,
            title=about["title"],
            weights_after="publish",
            family=about["family"],
            released=about["released"],
            baseline=baseline,
        )
        if done.state != "accepted":
            raise Refusal("model_invalid", f"the model of {name} was {done.state}: {done.reason}")

    def _entrants(self) -> set[str]:
        return set(rounds.fold(self.organizer.client.records(self.id), self.competition).entrants)

    def wait_for_preparation(self) -> None:
        """Every entry is prepared for every task by the same recipe."""
        self.wait(Phase.CLOSED, kinds=("select", "prepare"), what="prepared alike")

    def wait_for_evaluation(self) -> None:
        """Every entry is evaluated on the opened holdout, as submitted and as prepared."""
        self.wait(Phase.OPENED, kinds=("evaluate",), what="evaluated")

    def release(self) -> None:
        """Two of the three custodians release their shares; the third is on holiday."""
        for actor in self.custodians:
            if actor.name != ABSENT and self.round().phase == Phase.PREPARED:
                released = custodian.release(actor.client, actor.keys, self.id, now=datetime.now(UTC))
                self.say(
                    f"{actor.name} made {len(released.checks)} checks of its own and released share {released.share}"
                )

    def publish(self) -> None:
        """The organizer recomputes the ranking from the predictions, signs and publishes it."""
        organizer.publish(self.organizer.client, self.organizer.keys, self.id)

    def wait(self, phase: Phase, *, kinds: tuple[str, ...] = (), what: str = "") -> None:
        """Wait until the round has left a phase, with a progress bar where there are stages to count."""
        with _bar(self.console) as bar:
            task = bar.add_task(what, total=None, visible=bool(kinds))
            while (state := self.round()).phase == phase:
                if kinds:
                    stages = [s for s in self.organizer.client.stages(self.id) if s["kind"] in kinds]
                    _refuse_blocked(stages)
                    bar.update(task, completed=_done(stages), total=len(stages) or None)
                    self._tell(what, stages)
                    self.talk.still(f"  {_done(stages):.0f} of {len(stages)} stages are {what}")
                elif phase == Phase.OPEN:
                    self.talk.still(open_still(state.closes, self._server_time()))
                time.sleep(LOOK)
        if kinds:
            # The last ones end the phase: the look before it did not see them done.
            self._tell(what, [s for s in self.organizer.client.stages(self.id) if s["kind"] in kinds])

    def _tell(self, what: str, stages: list[dict[str, Any]]) -> None:
        """Say which entries are done, and each tenth of the work, where nobody sees the bar."""
        left = {stage["entrant"] for stage in stages if stage["state"] not in ("committed", "failed")}
        tenth = int(10 * _done(stages) / len(stages)) if stages else 0
        self._name(what, {f"{tenth}0 % of the work"} if 0 < tenth < 10 else set())
        self._name(what, {stage["entrant"] for stage in stages} - left)

    def _name(self, what: str, names: set[str]) -> None:
        """Say once of each of these that it is so, where nobody sees the bar."""
        if self.console.is_terminal:
            return
        for name in sorted(names - self._said[what]):
            self._said[what].add(name)
            self.say(f"  {name} is {what}")


def _done(stages: list[dict[str, Any]]) -> float:
    """How many stages are done, parts of those that run among them."""
    return sum(1.0 if one["state"] in ("committed", "failed") else float(one["progress"] or 0) for one in stages)


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("      {task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _counting(bar: Progress, task: TaskID, *, say: Say, console: Console) -> Callable[[int, int, str], None]:
    """Move a bar by (models made, of how many, the last one's name); where nobody sees it, a line a model."""

    def tell(done: int, total: int, name: str) -> None:
        bar.update(task, completed=done, total=total)
        if name and not console.is_terminal:
            say(f"  {name} is made ({done} of {total})")

    return tell


def _all(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()


def _refuse_blocked(stages: list[dict[str, Any]]) -> None:
    for stage in stages:
        if stage["state"] == "blocked":
            where = f"{stage['kind']} of {stage['entrant']}, {stage['task']}"
            raise Refusal(
                "job_failed", f"{where} is blocked: {stage['reason']}", hint="run the demo again: it tries anew"
            )


_MEANING = {
    Phase.DRAFT: "the organizer has defined the round",
    Phase.SEALED: "the holdout is encrypted and committed to; 2 of 3 custodians can open it",
    Phase.OPEN: "custodians acknowledged their shares and rehearsed; entrants may submit",
    Phase.CLOSED: "by the database's clock; the entries are frozen",
    Phase.PREPARED: "every entry has had the same fine-tune for every task",
    Phase.RELEASED: "two custodians have released their shares",
    Phase.OPENED: "the holdout equals what was committed to",
    Phase.EVALUATED: "direct and prepared predictions are scored",
    Phase.PUBLISHED: "the organizer has recomputed and signed the ranking",
    Phase.VOIDED: "the round has ended without a ranking",
}


def play(data: Path, *, runner: str, say: Say, console: Console) -> Result:
    """Play the demo in a folder, or go on with what was begun there.

    Args:
        data: the demo's folder.
        runner: ray | local.
        say: told of everything that happens, one sentence each.
        console: where progress bars go.

    Raises:
        Refusal: whatever refuses; the folder stays as it is, and the same call goes on.
    """
    from acclimate import demo_outcome
    from acclimate_runners import lineup

    lock = _lock(data)
    timings: dict[str, float] = {}
    started = time.monotonic()

    def lap(name: str) -> None:
        timings[name] = round(time.monotonic() - started - sum(timings.values()), 1)

    built = data / "competition"
    _build(built, say)
    lap("build the competition")
    say("entrants make their models at home, each with some practice on the public rows (one crams a single task)")
    with _bar(console) as bar:
        task = bar.add_task("models made", total=None)
        models = lineup.make(
            data / "models",
            built,
            processes=2,
            progress=_counting(bar, task, say=say, console=console),
        )
    lap("make the models")
    with demo_servers.Servers(data / "server", runner=runner) as servers, connection.Client(servers.url) as anybody:
        lap("start the servers")
        with Play(data, servers, models, say=say, console=console) as show:
            state = show.play()
        lap("play the round")
        folder_ = data / "rounds" / state.id
        folder_.mkdir(parents=True, exist_ok=True)
        bundle = demo_outcome.fetch_bundle(anybody, state, folder_)
        report = anybody.report(state.id, folder_ / "report.html")
        lap("download bundle and report")
        log_key = custodian.pinned(show.custodians[0].keys, state.id).log
        verify = demo_servers.shown("verify", str(bundle), "--log-key", log_key)
        verdict, line = demo_outcome.audit(bundle, log_key=log_key)
        lap("verify the bundle")
        demo_outcome.wait_for_tracking(anybody, state)
        lap("wait for MLflow")
    settings = config.load(data / "server")
    document = demo_outcome.describe(
        state, bundle, report=report, tracking=settings.tracking, crammed=(CRAMMER, CRAMMED)
    )
    lap("stability")
    (data / "timings.json").write_text(json.dumps(timings, indent=1) + "\n", "utf-8")
    lock.close()
    return Result(document, verdict, line, demo_servers.shown("mlflow", "--data", str(data / "server")), verify)


def _lock(data: Path) -> IO[bytes]:
    """A lock on the demo's folder, which ends with the process.

    Raises:
        Refusal: busy, where another demo plays there; config_invalid, where a server of its own keeps its data.
    """
    if any((data / name).exists() for name in ("VERSION", "acclimate.db")):
        raise Refusal(
            "config_invalid",
            f"{data} is a server's data folder; a demo keeps its round, its people's keys and a server of its own in a folder of its own",
            hint="name a new one: --data DIR (with make: make demo DATA=DIR)",
        )
    data.mkdir(parents=True, exist_ok=True)
    lock = (data / config.DEMO_LOCK).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise Refusal(
            "busy", f"another demo is playing in {data}", hint="wait for it, or name another folder"
        ) from None
    return lock


def _build(built: Path, say: Say) -> None:
    if (built / "competition.toml").exists():
        return
    say(f"building the competition {COMPETITION!r}: 1,797 handwritten digits, four questions about each")
    # By its path: whoever runs the demo may have a folder of this name.
    source = definition.shipped(COMPETITION)
    try:
        demo_servers.answered("competition", "build", str(source), "--out", str(built))
    except Refusal as refusal:
        raise refusal.of(f"building the competition {COMPETITION!r}") from refusal
