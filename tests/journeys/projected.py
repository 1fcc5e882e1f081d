"""A round as the platform would hand it to MLflow, without a platform: real metrics and the real ranking on drawn predictions."""

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pyarrow as pa

from acclimate.tracking import EntryData, RoundData, StageData
from acclimate_competitions import definition, digests, metrics, ranking, tables

AT = datetime(2027, 4, 1, 12, tzinfo=UTC)


def made(
    *,
    entrants: dict[str, float],
    examples: int,
    losses: int,
    failed: str | None = None,
    diverged: str = "",
    seed: int = 7,
) -> RoundData:
    """A round as the platform would hand it over, with scores by the real metrics and the real ranking."""
    text = (definition.shipped("digits") / "competition.toml").read_text("utf-8")
    start, end = (
        text.index('[[tasks]]\nname = "parity"'),
        text.index('[[tasks]]\nname = "prime"'),
    )  # two tasks are enough
    text = text[:start] + text[end:]
    competition = definition.parse(text.encode())
    draw = Random(seed)
    digest = lambda *parts: digests.of_json(list(parts))  # noqa: E731
    entries = tuple(
        EntryData(
            name, f"submission-{name}", {"title": name.title(), "family": "conifer", "parameters": 5000}, digest(name)
        )
        for name in entrants
    )
    holdouts = {
        task.name: pa.table(
            {
                "example": [f"{task.name}-{image:04d}" for image in range(examples)],
                "target": [draw.choice(task.choices) for _ in range(examples)],
                "cluster": [f"image-{image:04d}" for image in range(examples)],
            }
        )
        for task in competition.tasks
    }
    stages: list[StageData] = []
    scored: list[pa.Table] = []
    environment = {"hardware": "cpu/x86_64/avx512", "versions": {"torch": "2.13.0"}}
    for number, (name, skill) in enumerate(entrants.items()):
        for task in competition.tasks:
            candidates = [{"lr": None, "epoch": 0, "validation": 2.0}]
            candidates += [{"lr": lr, "epoch": 6, "validation": draw.uniform(0.2, 1.2)} for lr in (0.002, 0.005)]
            best = min(candidates, key=lambda candidate: candidate["validation"])
            base: dict[str, Any] = {
                "entrant": name,
                "task": task.name,
                "at": AT + timedelta(seconds=number),
                **environment,
            }
            # As the runner writes it: the choice without its loss; None where all diverged.
            chosen = None if (name, task.name) == (diverged, "digit") else {"lr": best["lr"], "epoch": best["epoch"]}
            cost = {"tokens": 182400, "steps": 2 * losses, "seconds": 2.5, "flops": 3e9}
            document: dict[str, Any] = {"task": task.name, "candidates": candidates, "selected": chosen, "cost": cost}
            stages.append(
                StageData("select", digest("s", name, task.name), seed=None, protocol=None, document=document, **base)
            )
            ready: list[int | None] = [None]
            for seed in competition.preparation.seeds:
                document = {"task": task.name, "seed": seed, "losses": [2.3 * 0.97**step for step in range(losses)]}
                document |= {"loss_steps": list(range(1, losses + 1)), "base": False, "note": ""}
                if chosen is None:
                    document |= {"losses": [2.3, None], "loss_steps": [1, 2], "base": True, "note": "it diverged"}
                document |= {"validation": best["validation"] + 0.01, "prepared": digest("p", name, task.name, seed)}
                document |= {"cost": {"tokens": 91200, "steps": losses, "seconds": 1.25, "flops": 1.5e9}}
                if (name, task.name, seed) == (failed, "prime", 13):
                    document = {"task": task.name, "seed": seed, "failed": {"reason": "the loss became NaN at step 3"}}
                    lost = {"key": (name, "prepared", seed), "reason": "the preparation failed", "cluster": "cluster"}
                    scored.append(metrics.unscored(holdouts[task.name], task, **lost))
                else:
                    ready.append(seed)
                key = digest("prepare", name, task.name, seed)
                stages.append(
                    StageData("prepare", key, seed=seed, protocol=None, document=document, attempt="a1", **base)
                )
            for seed in ready:
                protocol = "direct" if seed is None else "prepared"
                ability = task.chance + (1 - task.chance) * skill * (0.6 if seed is None else 1)
                predictions = predicted(
                    draw, holdouts[task.name], task.choices, ability, (name, protocol, task.name, seed)
                )
                scored.append(metrics.score_predictions(predictions, holdouts[task.name], task, cluster="cluster"))
                key = digest("evaluate", name, task.name, seed)
                document = {"task": task.name, "seed": seed, "protocol": protocol, "count": examples, "seconds": 0.2}
                stages.append(
                    StageData("evaluate", key, seed=seed, protocol=protocol, document=document, attempt="a2", **base)
                )
    for task in competition.tasks:
        holdout = holdouts[task.name]
        seeds = competition.preparation.seeds
        scored.append(metrics.majority_scores(holdout, holdout, task, seeds=seeds, cluster="cluster"))
    scores = pa.concat_tables(scored)
    ranked = ranking.rank(scores, tasks=competition.tasks, policy=competition.ranking, entrants=list(entrants))
    splits = {
        f"splits/{task.name}/{split}.parquet" for task in competition.tasks for split in ("preparation", "validation")
    }
    return RoundData(
        competition=competition,
        name=competition.round.name,
        round="digits-2027-1-0123456789ab",
        origin="acclimate.example.org/log",
        at=AT,
        code=digest("code"),
        engine="local",
        files={name: digest(name) for name in splits},
        entries=entries,
        stages=tuple(stages),
        holdout={task: digest("holdout", task) for task in holdouts},
        targets={
            task: dict(zip(t.column("example").to_pylist(), t.column("target").to_pylist(), strict=True))
            for task, t in holdouts.items()
        },
        scores=scores,
        ranking=ranked.document(),
        tags={"log_range": "0-211"},
    )


def predicted(
    draw: Random, holdout: pa.Table, choices: tuple[str, ...], ability: float, key: tuple[str, str, str, int | None]
) -> pa.Table:
    entrant, protocol, task, seed = key
    rows = []
    for example, target in zip(
        holdout.column("example").to_pylist(), holdout.column("target").to_pylist(), strict=True
    ):
        answer = target if draw.random() < ability else draw.choice(choices)
        row = {"entrant": entrant, "protocol": protocol, "task": task, "seed": seed, "example": example, "text": None}
        rows.append(row | {"loglikelihoods": [-0.1 if choice == answer else -3.0 for choice in choices]})
    return pa.Table.from_pylist(rows, schema=tables.PREDICTIONS)
