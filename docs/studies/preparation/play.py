"""Plays the study's rounds, each by the platform itself, from sealed holdout to published ranking, and keeps what they came to.

    python docs/studies/preparation/play.py --data FOLDER [--only NAME …]

Whatever is there is not made again, so it may be killed at any moment and started again. A finished round leaves one file in `results`
beside this program, of a few dozen kB: each example's score as one bit. `analyse.py` makes tables, plots and text of those files.

A repetition draws everything anew: which images are public, and which are in the holdouts of its two rounds; the entrants' weights and their
practice. The rounds of a repetition have the same entrants and public rows, and no holdout image in common.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from acclimate import demo, demo_outcome, demo_servers, verify
from acclimate.client import connection
from acclimate_competitions import digests
from acclimate_runners import lineup
from acclimate_runners.lineup import Spec

HERE = Path(__file__).parent
DIGITS = HERE.parents[2] / "competitions" / "digits"
REPETITIONS = 5
ROUNDS = ("first", "second")
SIZES = {"first": 400, "second": 400, "preparation": 800, "validation": 197}
STEPS_AN_EPOCH = 25  # 800 rows, 32 a batch
EPOCHS = 6
DOSES = (1, 4, 8, 16)
MORE: Mapping[str, tuple[Callable[[int], str], float]] = {
    "hole": (lambda label: "has-hole" if label in (0, 6, 8, 9) else "no-hole", 0.5),
    "mod-three": (lambda label: f"m{label % 3}", 1 / 3),
}
SCHEMA = pa.schema(
    [
        ("entrant", pa.string()),
        ("protocol", pa.string()),
        ("task", pa.string()),
        ("seed", pa.int32()),
        ("bits", pa.binary()),
    ]
)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """Entrants that play one or two rounds.

    Attributes:
        name: of the part.
        repetition: whose images and entrants these are, from 1.
        entrants: all 24, or 12.
        practice: drawn | even | none | honest (drawn, and nobody crams).
        epochs: of the mandated preparation, 25 steps each.
        rounds: which of the two are played.
    """

    name: str
    repetition: int
    entrants: int = 24
    practice: str = "drawn"
    epochs: int = EPOCHS
    rounds: tuple[str, ...] = ROUNDS


def parts() -> list[Part]:
    """In the order in which they are played and shown."""
    controls = [
        Part("equal practice", 1, entrants=12, practice="even", rounds=ROUNDS[:1]),
        Part("no practice", 1, entrants=12, practice="none", rounds=ROUNDS[:1]),
        Part("honest entrants alone", 1, entrants=12, practice="honest", rounds=ROUNDS[:1]),
        *(
            Part(f"dose {epochs * STEPS_AN_EPOCH}", 1, entrants=12, epochs=epochs, rounds=ROUNDS[:1])
            for epochs in DOSES
        ),
    ]
    main = [Part(f"repetition {number}", number) for number in range(1, REPETITIONS + 1)]
    return [*main, *controls]


def specs(part: Part) -> list[Spec]:
    """The entrants of a part. Every other one of the 24 is among the 12.

    Capacity is declared here and never changed by what comes out: more width, layers and steps of language modelling. A fifth of the entrants
    has another architecture than Llama. Crammers are weak models that have studied one task for 600 steps.
    """
    found: list[Spec] = []
    for place in range(24):
        width, layers = (16, 24, 32, 48, 64)[place % 5], 1 + place % 2
        steps = (150, 300, 450, 600, 750, 900)[(place * 7) % 6]
        architecture = ("llama", "llama", "gpt2", "llama", "gpt_neox")[(place // 2) % 5]
        seed, crams = 1000 * part.repetition + place, place in CRAMMERS
        if crams:
            width, layers, steps = 16, 1, 150
        spec = Spec(f"entrant-{place:02d}", f"Entrant {place}", architecture, width, layers, steps, seed)
        spec = dataclasses.replace(spec, architecture=architecture)
        if part.practice in ("even", "none"):
            spec = dataclasses.replace(spec, practice=False, even=20 if part.practice == "even" else 0)
        elif crams and part.practice == "drawn":
            spec = dataclasses.replace(spec, practice=False, cram=600, crams=CRAMMERS[place])
        found.append(spec)
    return found if part.entrants == 24 else found[::2]


CRAMMERS = {4: 0, 10: 3, 15: 4}
"""Place -> number of the task that is crammed; of the twelve, the first two are there."""


def capacity(spec: Spec) -> float:
    """What is called capacity: steps of language modelling × layers × (width + 32)."""
    return float(spec.steps * spec.layers * (spec.width + 32))


# ---- a round ---------------------------------------------------------------------------------------------------------


def digits() -> ModuleType:
    """The builder of the competition digits, as a module."""
    found = importlib.util.spec_from_file_location("digits_build", DIGITS / "build.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def tasks() -> list[str]:
    """The six tasks, in the order of the definition."""
    return [*digits().TASKS, *MORE]


def definition(part: Part) -> str:
    """competition.toml: that of digits with two more tasks, no baselines of the organizer's, and the part's epochs."""
    text = (DIGITS / "competition.toml").read_text("utf-8")
    more = ""
    for name, (answer, chance) in MORE.items():
        choices = json.dumps(sorted({answer(label) for label in range(10)}))
        more += f'[[tasks]]\nname = "{name}"\nkind = "choice"\nprompt = "{{{{ input }}}}"\nchoices = {choices}\n'
        more += f'metric = "accuracy"\nchance = {chance:.4f}\n\n'
    edits = {
        "[preparation]\n": more + "[preparation]\n",
        'slug = "digits"': 'slug = "digits-study"',
        "under four rules": "under six rules",
        "epochs = 6\n": f"epochs = {part.epochs}\n",
        'baselines = ["majority", "untrained"]': 'baselines = ["majority"]',
    }
    for old, new in edits.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    tomllib.loads(text)
    return text


def build(part: Part, which: str, out: Path) -> None:
    """The competition's folder for one round of a part."""
    if (out / "competition.toml").exists():
        return
    module = digits()
    rules = {**module.TASKS, **{name: answer for name, (answer, _) in MORE.items()}}
    images = module.assign(module.pooled()[0], SIZES, draw=f"study {part.repetition}")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    splits = {"holdout": images[which], **{name: images[name] for name in ("preparation", "validation")}}
    module.write(out, rules, splits)
    # Last: whatever has it is whole.
    (out / "competition.toml").write_text(definition(part), "utf-8")


def play(part: Part, which: str, data: Path, *, models: Path, say: Say, wanted: Sequence[Spec]) -> dict[str, Any]:
    """Play one round; its bundle stands in data/bundle then.

    Args:
        part: whose round.
        which: first | second.
        data: a folder of its own.
        models: folder of the entrants' models, which is filled where some are missing.
        say: told of what happens.
        wanted: the entrants.

    Returns:
        What is kept with its scores.
    """
    built, console = data / "competition", Console(stderr=True)
    build(part, which, built)
    names = lineup.make(models, built, processes=os.cpu_count() or 1, specs=wanted)
    if not (data / "models").exists():
        (data / "models").symlink_to(models.resolve())
    with demo_servers.Servers(data / "server", runner="local") as servers, connection.Client(servers.url) as anybody:
        with demo.Play(data, servers, names, say=say, console=console, prefix=which) as show:
            state = show.play()
        ranking = demo_outcome.fetch_bundle(anybody, state, data) / "ranking.json"
    return {
        "round": state.id,
        "ranking": digests.of_json(json.loads(ranking.read_text("utf-8"))),
        "defined": {name: state.defined[name] for name in ("recipe", "code")},
    }


def keep(part: Part, which: str, bundle: Path, kept: Mapping[str, Any], wanted: Sequence[Spec], out: Path) -> None:
    """Write a round's scores: a row for each entrant, protocol, task and seed, its examples' scores as bits, in their order."""
    groups: dict[tuple[str, str, str, int | None], list[tuple[str, float]]] = {}
    for row in verify.recompute_scores(bundle).to_pylist():
        key = row["entrant"], row["protocol"], row["task"], row["seed"]
        groups.setdefault(key, []).append((row["example"], row["score"]))
    known = {spec.name for spec in wanted}
    rows = []
    for (entrant, protocol, task, seed), scores in sorted(groups.items(), key=str):
        if entrant in known:
            assert len(scores) == SIZES[which] and {score for _, score in scores} <= {0.0, 1.0}
            bits = np.packbits([score == 1.0 for _, score in sorted(scores)]).tobytes()
            rows.append({"entrant": entrant, "protocol": protocol, "task": task, "seed": seed, "bits": bits})
    about = {
        **kept,
        "part": dataclasses.asdict(part),
        "which": which,
        "capacity": {spec.name: capacity(spec) for spec in wanted},
        "crammed": {spec.name: tasks()[spec.crams] for spec in wanted if spec.cram},
        "at": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    table = pa.Table.from_pylist(rows, schema=SCHEMA).replace_schema_metadata({"study": json.dumps(about)})
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_suffix(".new")
    pq.write_table(table, draft, compression="zstd")
    draft.replace(out)


def result(part: Part, which: str, results: Path) -> Path:
    """Where a round's scores are kept."""
    return results / f"{part.name.replace(' ', '-')}-{which}.parquet"


def main(arguments: Sequence[str]) -> None:
    """Play all rounds that have no result yet."""
    parser = argparse.ArgumentParser(description="Play the rounds of the study; what is there is not made again.")
    parser.add_argument(
        "--data", type=Path, default=Path("study-data"), help="folder for models and rounds (study-data)"
    )
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for what rounds came to")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts to play, such as 'repetition 1'")
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    todo = [part for part in parts() if given.only is None or part.name in given.only]
    left = [(part, which) for part in todo for which in part.rounds if not result(part, which, given.results).exists()]
    began = datetime.now(UTC)

    def say(line: str) -> None:
        console.print(f"{datetime.now(UTC):%H:%M:%S}  {line}", highlight=False)

    for number, (part, which) in enumerate(left):
        hours = (datetime.now(UTC) - began).total_seconds() / 3600
        expected = f", about {hours / number * (len(left) - number):.1f} h to go" if number else ""
        say(f"[bold]{part.name}, {which} round[/bold] ({number + 1} of {len(left)}{expected})")
        folder, wanted = given.data / part.name.replace(" ", "-"), specs(part)
        models = given.data / "models" / f"{part.repetition}-{part.practice}"
        kept = play(part, which, folder / which, models=models, say=say, wanted=wanted)
        keep(part, which, folder / which / "bundle", kept, wanted, result(part, which, given.results))
        # What the study needs is kept; a round's folder is large.
        shutil.rmtree(folder / which)


if __name__ == "__main__":
    main(sys.argv[1:])
