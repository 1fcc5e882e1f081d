"""`acclimate check`, `prepare`, `evaluate`: an entrant tries a model on its own machine, on open data, without a server."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.options import AsJson
from acclimate.cli.output import emit, named_bar, table

Model = Annotated[
    Path,
    typer.Argument(
        help="The model's folder: config.json, model.safetensors (or its shards), tokenizer.json; or an adapter's two files.",
        metavar="MODEL_DIR",
    ),
]
Competition = Annotated[
    Path,
    typer.Option(
        "--competition",
        help="A competition's folder: built, or as `acclimate round files` makes it.",
        metavar="DIR",
    ),
]
Task = Annotated[str | None, typer.Option("--task", help="One task; all where it is absent.", metavar="TASK")]


def check(model: Model, competition: Competition, as_json: AsJson = False) -> None:
    """Check a model as a round's server will, and forecast its preparation.

    The same strict reading, then three steps of each task's preparation in the same confined child. Exits 1 where the server would refuse
    it. The forecast is this machine's; a round's may be faster or slower.

    Example: acclimate check ./my-model --competition round-files
    """
    from acclimate import trials

    with named_bar("checking") as progress:
        found = trials.check(model, competition, progress=progress)
    emit(found, as_json=as_json, text=_checked(found))


def prepare(
    model: Model,
    competition: Competition,
    out: Annotated[
        Path,
        typer.Option("--out", help="A new folder for the prepared models, one for each task and seed.", metavar="DIR"),
    ],
    task: Task = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="This learning rate; otherwise it is selected over the recipe's grid.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="This seed only; otherwise the recipe's seeds.")] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", help="End each fit after so many steps, for trying.", metavar="N")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Where to compute: cpu or cuda; otherwise where the round does.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prepare a model on this machine as a round does, with the same code, limits and bytes.

    For each task the learning rate is selected on the validation split, then one model is prepared for each seed. On the hardware class of the
    round, the prepared digests are those that the round records. DIR gets TASK/SEED/ with each model, and preparation.json.

    Example: acclimate prepare ./my-model --competition round-files --out prepared --seed 11
    """
    from acclimate import trials

    with named_bar("preparing") as progress:
        found = trials.prepare(
            model,
            competition,
            out=out,
            task=task,
            lr=lr,
            seed=seed,
            max_steps=max_steps,
            device=device,
            progress=progress,
        )
    emit(found, as_json=as_json, text=_prepared(found))


def evaluate(
    model: Model,
    competition: Competition,
    task: Task = None,
    split: Annotated[
        str, typer.Option("--split", help="A public split: validation, practice or preparation.", metavar="SPLIT")
    ] = "validation",
    examples: Annotated[
        Path | None,
        typer.Option("--examples", help="Also write a Parquet file with each example's score.", metavar="OUT.parquet"),
    ] = None,
    entrant: Annotated[
        str | None,
        typer.Option(
            "--entrant",
            help="Whose scores these are, in that file; else the folder's name, of a prepared model that of its preparation.",
            metavar="NAME",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of which seed the model is, in that file: one entrant's seeds are repetitions."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on this machine on a public split, by the code that evaluates on the holdout.

    The model is taken as it is; give a folder that `acclimate prepare` made to evaluate a prepared one. Of each task the round's metric stands first, then
    all others that its predictions allow; probabilities are the softmax of the choices' log-likelihoods. The standard error is by cluster.

    Example: acclimate evaluate ./my-model --competition round-files --examples scores.parquet
    """
    from acclimate import trials

    with named_bar("evaluating") as progress:
        found = trials.evaluate(
            model, competition, task=task, split=split, examples=examples, entrant=entrant, seed=seed, progress=progress
        )
    emit(found, as_json=as_json, text=_evaluated(found))


def _evaluated(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, part in found["tasks"].items():
        own = part["metric"]
        rows.append([name, own, _number(part[own]), _number(part["se"]), part["n"], part["unscored"]])
        for metric, one in part["metrics"].items():
            if metric != own:
                unscored = part["n"] + part["unscored"] - one["n"]
                rows.append(["", metric, _number(one["value"]), _number(one["se"]), one["n"], unscored])
    return table(
        ("task", "metric", found["split"], "se", "n", "unscored"), rows, right=(found["split"], "se", "n", "unscored")
    )


def _prepared(found: Mapping[str, Any]) -> Iterator[str]:
    for name, part in found["tasks"].items():
        for candidate in part["candidates"]:
            rate = "as submitted" if candidate["lr"] is None else f"lr {candidate['lr']:g}"
            chosen = ", selected" if candidate["lr"] == part["lr"] else ""
            yield f"{name}, {rate}: validation nll {_number(candidate['validation'])}{chosen}"
        for seed, each in part["seeds"].items():
            losses = [loss for loss in each["losses"] if loss is not None]
            course = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, " if losses else ""
            yield (
                f"{name}, seed {seed}: {course}validation nll {_number(each['validation'])}, {each['steps']} steps, "
                f"{each['tokens']} tokens, {each['seconds']:.1f} s"
            )
            yield f"  prepared {each['prepared']}" + (f" ({each['note']})" if each["note"] else "")
    yield f"{found['tokens']} tokens in all, {found['seconds']:.1f} s, peak memory {_size(found['memory'])}, {found['hardware']}"
    made = {int(seed) for part in found["tasks"].values() for seed in part["seeds"]}
    if others := sorted(made - set(found["round_seeds"])):
        own = ", ".join(map(str, found["round_seeds"]))
        yield f"seed {others[0]} is none of the round's, which are {own}: a round's bytes are others"
    if found["given_lr"] is not None:
        yield f"lr {found['given_lr']:g} was given and not selected: where the round selects another, its bytes are others"
    if found["max_steps"] is not None:
        yield f"every fit ended after {found['max_steps']} steps at most: a round's bytes are others"


def _checked(found: Mapping[str, Any]) -> Iterator[str]:
    forecast, allowed = found["forecast"], found["allowed"]
    yield f"{found['architecture']}, {found['parameters']} parameters of at most {allowed['parameters']}"
    yield f"{found['bytes']} bytes of at most {allowed['bytes']}"
    yield f"model {found['model']}"
    if found["base"] is not None:
        yield f"an adapter on the base {found['base']['name']}, {found['base']['digest']}"
    yield f"the preparation of all tasks and seeds: about {_seconds(forecast['seconds'])} s here, {_seconds(allowed['seconds'])} s are allowed"
    yield f"memory: {_size(forecast['memory'])} here, {_size(allowed['memory'])} are allowed"
    yield (
        "ok: the server would accept it"
        if found["fits"]
        else "it may not fit: on a machine like this one the limit would end it"
    )


def _seconds(value: float | None) -> str:
    """Seconds without a power of ten: 1800, 12, 0.45."""
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _size(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 2**20:.0f} MiB"
