"""What `acclimate rank`, `compare` and `stability` print for people: a table, a sentence that says what it shows, and what it can't carry."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from acclimate.cli.output import counted, plain, table

_WIDEST = 48
_NAMED = 12


def ranking(found: Mapping[str, Any]) -> Iterator[str]:
    """The result of rank by scores or items: each rank with its interval, drawn."""
    rows = found["ranking"]
    if not rows:
        yield "There is nobody to rank."
    else:
        last, level = max(row["rank_high"] for row in rows), f"{found['level']:.6g}"
        line = f"1{str(last).rjust(min(last, _WIDEST) - 1)}" if last > 1 else "1"
        header = ("rank", f"{level} set", "entrant", "score", "± se", line)
        body = [
            (
                row["rank"],
                interval(row["rank_low"], row["rank_high"]),
                row["entrant"],
                *aligned(row["score"], row["se"]),
                drawn(row["rank_low"], row["rank"], row["rank_high"], last=last),
            )
            for row in rows
        ]
        yield from table(header, body, right=("rank", "score", "± se"))
        yield ""
        yield _top(found)
        yield _held(found)
    yield from notes(found)


def agreement(found: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """The result of stability by score tables."""
    header = ("", "models", "tasks", "pairs", "mean tau-b", "0.95 interval", "first component", "tied pairs")
    body = []
    for name in names:
        row = found[name]
        body.append(
            (
                name,
                row["models"],
                row["tasks"],
                row["pairs"],
                decimal(row["mean_tau_b"]),
                between(row["tau_b_low"], row["tau_b_high"]),
                decimal(row["pc1_share"]),
                row["ties"],
            )
        )
    yield from table(header, body, right=header[1:])
    yield ""
    if len(names) == 2:
        first, second = names
        one, other = found[first], found[second]
        yield (
            f"From {first} to {second} mean agreement between tasks goes from {decimal(one['mean_tau_b'])} to "
            f"{decimal(other['mean_tau_b'])}; {found['pairs_risen']} of {counted(one['pairs'], 'pair')} of tasks agree more, and "
            f"{found['same_winner']} of {counted(one['tasks'], 'task')} have the same winner."
        )
    else:
        (only,) = names
        yield (
            f"Two tasks of {only} order the models alike with a mean Kendall tau-b of {decimal(found[only]['mean_tau_b'])} "
            "(1: the same order, 0: none in common)."
        )
    for name, row in found.get("against", {}).items():
        tasks = ", ".join(row["tasks"])
        yield f"{name}: {tasks} against the others: mean tau-b {decimal(row['mean_tau_b'])} over {counted(row['pairs'], 'pair')}."
    yield "How much of the disagreement is noise can't be told from scores alone: per-example tables tell it (--items)."
    yield from notes(found)


def notes(found: Mapping[str, Any]) -> Iterator[str]:
    """What was left out or taken for something, one line each."""
    for note in found["notes"]:
        yield f"note: {note}"


def drawn(low: int, rank: int, high: int, *, last: int) -> str:
    """A rank and its interval on a line from 1 to `last`: ├──●───┤."""
    width = min(last, _WIDEST)

    def at(place: int) -> int:
        return round((place - 1) / max(1, last - 1) * (width - 1))

    cells = [" "] * width
    cells[at(low) : at(high) + 1] = "─" * (at(high) + 1 - at(low))
    cells[at(low)], cells[at(high)] = "├", "┤"
    cells[at(rank)] = "●"
    return "".join(cells).rstrip()


def interval(low: int, high: int) -> str:
    """A rank interval: 3–7, or 3 where it is one rank."""
    return str(low) if low == high else f"{low}–{high}"


def decimal(value: float | None) -> str:
    """A share or coefficient; – where it is undefined."""
    return "–" if value is None else f"{value:.3f}"


def between(low: float | None, high: float | None) -> str:
    """An interval of such."""
    return "–" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def aligned(score: float | None, error: float | None) -> tuple[str, str]:
    """A score and its error with the same number of digits: so many that the error shows two, or four places without one."""
    if score is None:
        return "–", "–"
    places = 4
    if error:
        places = next((digits for digits in range(8) if error >= 10 ** (1 - digits)), 8)
    return f"{score:.{places}f}", "–" if error is None else f"{error:.{places}f}"


def _top(found: Mapping[str, Any]) -> str:
    chosen, everybody = found["top_set"], len(found["ranking"])
    best = "the best" if found["top"] == 1 else f"among the best {found['top']}"
    names = ", ".join(plain(name) for name in chosen[:_NAMED])
    more = f" and {len(chosen) - _NAMED} more" if len(chosen) > _NAMED else ""
    return (
        f"{len(chosen)} of {counted(everybody, 'entrant')} can be {best} (the set holds all that are with probability "
        f"{found['level']:.6g}): {names}{more}."
    )


def _held(found: Mapping[str, Any]) -> str:
    rows, level = found["ranking"], f"{found['level']:.6g}"
    if len(rows) > 1 and all((row["rank_low"], row["rank_high"]) == (1, len(rows)) for row in rows):
        return "No two entrants can be told apart: the order is noise at this level."
    if found["sets"] == "simultaneous":
        return f"All intervals together hold the true ranks with probability {level}."
    return f"Each interval by itself holds its rank with probability {level}; all together they do less often (--sets simultaneous)."
