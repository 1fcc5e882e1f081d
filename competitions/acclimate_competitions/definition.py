"""A competition's definition: `competition.toml`, typed. All problems are reported at once, with line numbers.

The definition's digest is sha256 over the file's bytes.
"""

import dataclasses
import math
import re
import zoneinfo
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from acclimate_competitions import anchors, bases, compute, digests, parsing, reading, recipe, tasks
from acclimate_competitions.anchors import Anchor
from acclimate_competitions.compute import Compute
from acclimate_competitions.errors import Refusal
from acclimate_competitions.fields import NAME, NAME_MEANING, Document, Table, duration_text, flat, rfc3339, size_text
from acclimate_competitions.recipe import LARGEST_SEED, Recipe
from acclimate_competitions.tasks import Task as Task

ARCHITECTURES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "gemma2",
    "gemma3_text",
    "falcon",
    "mamba",
    "falcon_mamba",
    "bert",
    "roberta",
    "xlm-roberta",
    "electra",
    "albert",
    "distilbert",
    "deberta-v2",
    "modernbert",
    "vit",
    "convnext",
    "convnextv2",
    "resnet",
)
"""Model types (of config.json) that a competition may allow."""
IMAGES = "hf-image-classifier"
"""The kind of submission that answers tasks of images."""


@dataclass(frozen=True)
class RoundSettings:
    """`[round]`: dates are None where `acclimate round create` gives them.

    Attributes:
        publish: auto: the ranking of an evaluated round is published as soon as it was computed twice, without its organizer.
        publish_within: how long a manual publication may take before the round publishes itself; None: as long as it likes.
        audits: how many preparations the auditor draws and makes again before the release.
        audit_tolerance: how far a validation nll may be from the first one where bytes can't be equal (other hardware): nats a row,
            of generated texts that are scored the share of wrong answers.
        auditor: name of the auditor whom the round names; needed for audits, and where the holdout stays private.
    """

    name: str
    opens: datetime | None
    closes: datetime | None
    closes_latest: datetime | None
    grace: timedelta
    release_by: datetime | None
    objection_window: timedelta
    publish: Literal["manual", "auto"]
    publish_within: timedelta | None
    holdout_after: Literal["public", "private"]
    audits: int
    audit_tolerance: float
    auditor: str | None


@dataclass(frozen=True)
class Custody:
    """`[custody]`: any `threshold` of the named custodians open the seal."""

    threshold: int
    custodians: tuple[str, ...]


@dataclass(frozen=True)
class Quota:
    """`per_entrant`: submissions in all, and within one calendar day of the zone `day`."""

    total: int
    per_day: int
    day: str


@dataclass(frozen=True)
class SubmissionRules:
    """`[submission]`: what may be submitted.

    Attributes:
        bases: name -> digest of the models on which adapters may be submitted (bases.py).
    """

    kinds: tuple[str, ...]
    architectures: tuple[str, ...]
    max_parameters: int
    max_bytes: int
    per_entrant: Quota
    weights_after: tuple[str, ...]
    bases: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Ties:
    """How equal scores rank: `shared` is competition ranking 1-2-2-4; scores within `tolerance` are equal."""

    method: Literal["shared"]
    tolerance: float


@dataclass(frozen=True)
class Interval:
    """Rank confidence sets: kind, level, Monte Carlo draws and their seed."""

    kind: Literal["simultaneous", "marginal"]
    level: float
    draws: int
    seed: int


@dataclass(frozen=True)
class Policy:
    """`[ranking]`: everything that turns per-example scores into the ranking."""

    aggregate: Literal["mean", "mean_rank", "win_rate"]
    missing: Literal["worst", "exclude", "fail"]
    ties: Ties
    interval: Interval
    cluster: str | None
    baselines: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The policy as JSON-ready data."""
        return dataclasses.asdict(self)

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON of document()."""
        return digests.of_json(self.document())


@dataclass(frozen=True)
class Isolation:
    """`[isolation]`: limits of a child process; memory in bytes."""

    memory: int
    wall: timedelta


@dataclass(frozen=True)
class Competition:
    """A whole definition.

    Attributes:
        raw: the file's bytes.
        digest: sha256 of raw.
        origins: dotted key -> "line N" or "default": where each effective value came from.
    """

    raw: bytes
    digest: str
    slug: str
    title: str
    licence: str
    contact: str
    data_is_public: bool
    round: RoundSettings
    custody: Custody
    submission: SubmissionRules
    tasks: tuple[Task, ...]
    preparation: Recipe
    ranking: Policy
    anchors: tuple[Anchor, ...]
    compute: Compute
    isolation: Isolation
    entrants_see: str
    origins: Mapping[str, str]

    def task(self, name: str) -> Task:
        """The task of this name; KeyError where there is none."""
        return {task.name: task for task in self.tasks}[name]

    def anchor(self, name: str) -> Anchor | None:
        """The anchor of this name, or None where it is none."""
        return {anchor.name: anchor for anchor in self.anchors}.get(name)

    def effective(self) -> dict[str, Any]:
        """Every value in force by its dotted key, JSON-ready: times as RFC 3339, durations in seconds, sizes in bytes."""
        return flat(self._nested())

    def written(self) -> dict[str, Any]:
        """Every value in force by its dotted key, as the file would have it: durations such as "10m", sizes such as "2GiB"."""
        found = flat(self._nested(), duration=duration_text)
        return found | {key: size_text(found[key]) for key in _SIZES if key in found}

    def _nested(self) -> dict[str, Any]:
        nested: dict[str, Any] = {"schema": 1}
        for name, value in dataclasses.asdict(self).items():
            if name == "tasks":
                nested |= {f"tasks[{index}]": task.document() for index, task in enumerate(self.tasks)}
            elif name == "entrants_see":
                nested["logs"] = {name: value}
            elif name not in ("raw", "digest", "origins"):
                nested[name] = value
        return nested


_SIZES = ("compute.memory", "isolation.memory")
"""Keys that are sizes."""
ROUND_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,31}")
ROUND_NAME_MEANING = "lower-case letters, digits, dots and hyphens, at most 32, such as 2027-1"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BASES_MEANING = 'a base\'s name, and the digest of its files, such as small = "sha256:…"'
_ENTRANTS_SEE = re.compile(r"none|full|tail:[1-9][0-9]{0,5}")


def parse(raw: bytes) -> Competition:
    """The competition of a definition file's bytes.

    Raises:
        Refusal: definition_invalid, with every problem of the file in `problems`, each with its line.
    """
    parsed = parsing.parse(raw)
    document = Document(parsed)
    if not parsed.values and parsed.problems:
        raise _invalid(document)
    root = document.root
    root.word("schema", (1,))
    competition = Competition(
        raw=raw,
        digest=digests.of_bytes(raw),
        slug=root.text("slug", pattern=NAME, form=NAME_MEANING),
        title=root.text("title"),
        licence=root.text("licence"),
        contact=root.text("contact"),
        data_is_public=root.boolean("data_is_public", False),
        round=_round(root.table("round", required=True)),
        custody=_custody(root.table("custody", required=True)),
        submission=_submission(root.table("submission", required=True)),
        tasks=tasks.read(root),
        preparation=recipe.read(root.table("preparation", required=True)),
        ranking=(policy := _ranking(root.table("ranking"))),
        anchors=anchors.read(root, policy.baselines),
        compute=compute.read(root.table("compute")),
        isolation=_isolation(root.table("isolation")),
        entrants_see=_logs(root.table("logs")),
        origins=document.origins,
    )
    if competition.round.auditor in competition.custody.custodians:
        document.problem(("round", "auditor"), f'round.auditor = "{competition.round.auditor}" is a custodian, too')
    _check_scales(document, competition)
    odd = next((task for task in competition.tasks if task.kind != "classify"), None)
    if odd is not None and "hf-sequence-classifier" in competition.submission.kinds:
        said = f'task {odd.name!r} is of kind "{odd.kind}", classifiers do kind "classify" only'
        document.problem(("submission", "kinds"), f"submission.kinds has hf-sequence-classifier: {said}")
    if {bool(task.image) for task in competition.tasks} | {IMAGES in competition.submission.kinds} == {True, False} or (
        IMAGES in competition.submission.kinds and len(competition.submission.kinds) > 1
    ):
        said = f"{IMAGES} goes with tasks that all have an `image`, such tasks with it, and neither with other kinds"
        document.problem(("submission", "kinds"), f"submission.kinds: {said}")
    root.finish()
    if not document.problems:
        _check_lengths(document, competition)
    if document.problems:
        raise _invalid(document)
    return competition


def _check_scales(document: Document, competition: Competition) -> None:
    wrong = [sentence.split(" ")[0] for _, sentence in document.problems]
    if competition.ranking.aggregate != "mean" or {"ranking.aggregate", "tasks[0].metric"}.intersection(wrong):
        return
    for index, task in enumerate(competition.tasks):
        where = f"tasks[{index}].metric"
        if task.metric != competition.tasks[0].metric and where not in wrong:
            reason = "the mean over tasks needs one metric, and the first task has another"
            hint = 'ranking.aggregate = "win_rate" or "mean_rank" needs none'
            document.problem(("tasks", index, "metric"), f'{where} = "{task.metric}": {reason}; {hint}')


def load(path: Path) -> Competition:
    """The competition of a definition file, or of a folder that holds competition.toml.

    Raises:
        Refusal: file_unreadable, definition_invalid.
    """
    file = path / "competition.toml" if path.is_dir() else path
    hint = "name a competition's folder, or its competition.toml"
    return parse(reading.read(file, reading.LONGEST_DOCUMENT, hint=hint))


def shipped(slug: str) -> Path:
    """Folder of a competition that comes with Acclimate: competition.toml, README.md, build.py.

    Raises:
        Refusal: file_unreadable, where there is none of this name.
    """
    package = Path(__file__).resolve().parent
    # A wheel carries the folders inside the package; a checkout has them beside it.
    roots = [root for root in (package / "shipped", package.parent) if root.is_dir()]
    for root in roots:
        if NAME.fullmatch(slug) and (root / slug / "competition.toml").is_file():
            return root / slug
    known = sorted({file.parent.name for root in roots for file in root.glob("*/competition.toml")})
    raise Refusal(
        "file_unreadable",
        f"no competition {slug!r} comes with Acclimate",
        hint=f"there is: {', '.join(known)}; for your own, give its folder's path",
    )


# ---- the tables of the file ----------------------------------------------------------------------------------------


def _invalid(document: Document) -> Refusal:
    problems = document.sentences()
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return Refusal(
        "definition_invalid",
        f"the definition has {count}",
        hint="mend competition.toml and run `acclimate competition check` again",
        problems=problems,
    )


def _round(table: Table) -> RoundSettings:
    settings = RoundSettings(
        name=table.text("name", pattern=ROUND_NAME, form=ROUND_NAME_MEANING),
        opens=table.moment("opens"),
        closes=table.moment("closes"),
        closes_latest=table.moment("closes_latest"),
        grace=table.duration("grace", timedelta(0)),
        release_by=table.moment("release_by"),
        objection_window=table.duration("objection_window", timedelta(0)),
        publish=table.word("publish", ("manual", "auto"), default="manual"),
        publish_within=table.duration("publish_within", _NONE, least=60),
        holdout_after=table.word("holdout_after", ("public", "private"), default="public"),
        audits=table.integer("audits", 0, most=10_000),
        audit_tolerance=table.number("audit_tolerance", 0.0),
        auditor=table.text("auditor", _NONE, pattern=NAME, form=NAME_MEANING),
    )
    if settings.auditor is None and table.good("audits", "holdout_after", "auditor"):
        if settings.audits > 0:
            table.problem("audits", f"= {settings.audits}: needs `auditor`, the name of a second operator")
        elif settings.holdout_after == "private":
            table.problem("holdout_after", '= "private": needs `auditor`, the name of somebody who looks at it for all')
    if settings.publish == "auto" and settings.publish_within is not None and table.good("publish", "publish_within"):
        table.problem("publish_within", 'is for `publish = "manual"`: an automatic publication waits for nobody')
    dates = {name: getattr(settings, name) for name in ("opens", "closes", "closes_latest", "release_by")}
    known = [(name, value) for name, value in dates.items() if value is not None and table.good(name)]
    # Neighbours only, so that one wrong date is one problem; closes_latest may equal closes.
    for (before, first), (name, second) in zip(known, known[1:], strict=False):
        equal = (before, name) == ("closes", "closes_latest")
        if second < first or (second == first and not equal):
            must = f"at or after {before}" if equal else f"after {before}"
            table.problem(name, f"= {rfc3339(second)}: must be {must}, {rfc3339(first)}")
    table.finish()
    return settings


def _custody(table: Table) -> Custody:
    custody = Custody(threshold=table.integer("threshold", least=1), custodians=table.names("custodians"))
    count = len(custody.custodians)
    if table.good("custodians") and not 1 <= count <= 255:
        table.problem("custodians", f"are {count}: must be 1 to 255")
    if table.good("threshold", "custodians") and custody.threshold > count:
        table.problem("threshold", f"= {custody.threshold}: there are only {count} custodians")
    table.finish()
    return custody


def _submission(table: Table) -> SubmissionRules:
    quota = table.table("per_entrant")
    rules = SubmissionRules(
        kinds=table.words(
            "kinds",
            ("hf-causal-lm", "hf-sequence-classifier", IMAGES, bases.KIND),
            default=("hf-causal-lm",),
        ),
        architectures=table.words("architectures", ARCHITECTURES),
        max_parameters=table.integer("max_parameters", least=1),
        max_bytes=table.integer("max_bytes", least=1),
        per_entrant=Quota(
            total=quota.integer("total", 5, least=1),
            per_day=quota.integer("per_day", 3, least=1),
            day=quota.text("day", "UTC"),
        ),
        weights_after=table.words(
            "weights_after", ("publish", "auditor", "delete"), default=("publish", "auditor", "delete")
        ),
        bases=table.texts("bases", names=NAME, values=_DIGEST, form=_BASES_MEANING),
    )
    if table.good("kinds", "bases") and bool(rules.bases) != (bases.KIND in rules.kinds):
        lacks = (
            f"names none, and kinds has {bases.KIND!r}" if not rules.bases else f"needs {bases.KIND!r} among the kinds"
        )
        table.problem("bases", lacks)
    try:
        zoneinfo.ZoneInfo(rules.per_entrant.day)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        if rules.per_entrant.day not in ("", "UTC"):
            quota.problem("day", f'= "{rules.per_entrant.day}": no such time zone; such as UTC or Europe/Berlin')
    quota.finish()
    table.finish()
    return rules


def _check_lengths(document: Document, competition: Competition) -> None:
    """Whether a generated text leaves room for its prompt, and an image for its label."""
    longest = competition.preparation.max_length
    for index, task in enumerate(competition.tasks):
        if task.pixels is not None and math.prod(task.pixels) >= longest:
            sentence = f"= {task.image}: its {math.prod(task.pixels)} numbers must be fewer than preparation.max_length, {longest}"
            document.problem(("tasks", index, "image"), f"tasks[{index}].image {sentence}")
        if task.kind == "generate" and task.max_tokens >= longest:
            sentence = (
                f"= {task.max_tokens}: must be below preparation.max_length, {longest}, so that a prompt has room"
            )
            document.problem(("tasks", index, "max_tokens"), f"tasks[{index}].max_tokens {sentence}")


def _ranking(table: Table) -> Policy:
    ties, interval = table.table("ties"), table.table("interval")
    policy = Policy(
        aggregate=table.word("aggregate", ("mean", "mean_rank", "win_rate"), default="mean"),
        missing=table.word("missing", ("worst", "exclude", "fail"), default="worst"),
        ties=Ties(
            method=ties.word("method", ("shared",), default="shared"),
            tolerance=ties.number("tolerance", 0.0),
        ),
        interval=Interval(
            kind=interval.word("kind", ("simultaneous", "marginal"), default="simultaneous"),
            level=interval.number("level", 0.95, above=0, below=1),
            draws=interval.integer("draws", 10_000, least=100, most=100_000),
            seed=interval.integer("seed", 1, most=LARGEST_SEED),
        ),
        cluster=table.text("cluster", _NONE),
        baselines=table.names("baselines", ()),
    )
    for part in (ties, interval, table):
        part.finish()
    return policy


_NONE: Any = None


def _isolation(table: Table) -> Isolation:
    isolation = Isolation(
        memory=table.size("memory", 2 * 2**30), wall=table.duration("wall", timedelta(minutes=30), least=1)
    )
    table.finish()
    return isolation


def _logs(table: Table) -> str:
    see = table.text("entrants_see", "none", pattern=_ENTRANTS_SEE, form='"none", "full" or such as "tail:200"')
    table.finish()
    return see
