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
        if found.get("method") == "casp":
            yield from _z_scores(found)
            yield ""
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
        yield from _ways(found)
    yield from notes(found)


def _ways(found: Mapping[str, Any]) -> Iterator[str]:
    rows = found.get("ways", {}).get("ranks", [])
    if not rows:
        return
    names = {
        "mean": "mean", "mean_rank": "mean of ranks", "win_rate": "win rate", "test_then_rank": "tests won",
        "bradley_terry": "Bradley-Terry",
    }  # fmt: skip
    yield ""
    body = [
        (
            *("–" if row[way] is None else row[way] for way in names),
            interval(row["rank_low"], row["rank_high"]),
            row["entrant"],
        )
        for row in rows
    ]
    yield from table((*names.values(), "between", "entrant"), body, right=tuple(names.values()))
    yield ""
    firsts = [{row["entrant"] for row in rows if row[way] == 1} for way in names if rows[0][way] is not None]
    moved = max(row["rank_high"] - row["rank_low"] for row in rows)
    taus = [
        (tau, names[one], names[other])
        for one, row in found["ways"]["tau_b"].items()
        for other, tau in row.items()
        if tau is not None
    ]
    apart = f"; the least alike are {min(taus)[1]} and {min(taus)[2]} (tau-b {min(taus)[0]:.2f})" if taus else ""
    first = (
        "All ways have the same first" if all(one == firsts[0] for one in firsts) else "The ways differ in who is first"
    )
    yield f"{first}; by the choice of a way a rank moves by {moved} at most{apart}."


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


def sets(found: Mapping[str, Any]) -> Iterator[str]:
    """The result of stability by items: each set, then how far sets agree, beside the ceiling that noise sets."""
    for name, one in found["sets"].items():
        kind = "Clopper-Pearson" if one["interval"] == "clopper-pearson" else "t, by cluster"
        title = f"set {name}" if name else "all"
        yield f"{title}: {counted(one['n'], 'example')}, score with {found['level']:.6g} interval ({kind})"
        last = max((row["rank_high"] for row in one["ranking"]), default=1)
        header = ("rank", "rank set", "entrant", "score", "interval", f"1 to {last}")
        body = [
            (
                row["rank"],
                interval(row["rank_low"], row["rank_high"]),
                row["entrant"],
                decimal(row["score"]),
                between(row["low"], row["high"]),
                drawn(row["rank_low"], row["rank"], row["rank_high"], last=last),
            )
            for row in one["ranking"]
        ]
        yield from table(header, body, right=("rank", "score"))
        yield ""
    if found["pairs"]:
        titles = ("sets", "tau-b", "0.95 interval", "of halves", "noise ceiling")
        lines = [
            (
                f"{pair['sets'][0]} with {pair['sets'][1]}",
                decimal(pair["tau_b"]),
                between(pair["tau_b_low"], pair["tau_b_high"]),
                decimal(pair["half_agreement"]),
                decimal(pair["noise_ceiling"]),
            )
            for pair in found["pairs"]
        ]
        yield from table(titles, lines, right=titles[1:])
        yield ""
    ceiling = decimal(found["noise_ceiling"])
    span = between(found["noise_ceiling_low"], found["noise_ceiling_high"])
    yield f"Two halves of the same examples agree with a mean tau-b of {ceiling} ({span} from split to split): the ceiling that noise sets for halves."
    if found["pairs"]:
        yield (
            f"Halves of different sets agree with {decimal(found['half_agreement'])}: that is to be held against the ceiling, as both rest on half "
            "of the examples; what is missing to it is real disagreement."
        )
    yield from notes(found)


def comparison(found: Mapping[str, Any]) -> Iterator[str]:
    """The result of compare: two entrants, or all pairs."""
    if "a" in found:
        yield from _two(found)
    if "pairs" in found:
        if "a" in found:
            yield ""
        header = ("a", "b", "difference", "± paired", "± unpaired", "permutation p", "Holm", "Wilcoxon p", "Holm ")
        body = [
            (
                row["a"],
                row["b"],
                *aligned(row["difference"], row["se_paired"]),
                aligned(row["difference"], row["se_unpaired"])[1],
                p_value(row["permutation_p"]),
                p_value(row["permutation_p_holm"]),
                p_value(row["wilcoxon_p"]),
                p_value(row["wilcoxon_p_holm"]),
            )
            for row in found["pairs"]
        ]
        yield from table(header, body, right=header[2:])
        told = sum(row["permutation_p_holm"] <= 0.05 for row in found["pairs"])
        yield ""
        yield f"{told} of {counted(len(found['pairs']), 'pair')} differ at 0.05 by the permutation test, adjusted by Holm for all pairs."
    yield from notes(found)


def several_tasks(found: Mapping[str, Any]) -> Iterator[str]:
    """The result of compare by a score table: average ranks over tasks, the tests, and the pairs that differ."""
    rows = found["ranking"]
    last = max((row["rank_high"] for row in rows), default=1)
    header = ("rank", "without a task", "entrant", "average rank", f"1 to {last}")
    body = [
        (
            row["rank"],
            interval(row["rank_low"], row["rank_high"]),
            row["entrant"],
            f"{row['average_rank']:.3f}",
            drawn(row["rank_low"], row["rank"], row["rank_high"], last=last),
        )
        for row in rows
    ]
    yield from table(header, body, right=("rank", "average rank"))
    yield ""
    if found["friedman_p"] is None:
        yield "Two entrants and two tasks are the least that can be compared."
    else:
        f = "∞" if found["iman_davenport_f"] is None else f"{found['iman_davenport_f']:.2f}"
        differ = "differ" if found["iman_davenport_p"] <= 1 - found["level"] else "can't be shown to differ"
        yield (
            f"Over {found['tasks']} tasks the {found['entrants']} entrants {differ}: Friedman chi² {found['friedman_chi2']:.2f}, "
            f"p {p_value(found['friedman_p'])}; Iman-Davenport F {f}, p {p_value(found['iman_davenport_p'])}."
        )
        apart = sum(row["nemenyi"] for row in found["pairs"])
        by_holm = sum(row["wilcoxon_p_holm"] <= 1 - found["level"] for row in found["pairs"])
        yield (
            f"Average ranks that differ by more than {found['critical_difference']:.2f} differ significantly (Nemenyi): "
            f"{apart} of {counted(len(found['pairs']), 'pair')}; by Wilcoxon with Holm {by_holm}."
        )
    yield from notes(found)


def _two(found: Mapping[str, Any]) -> Iterator[str]:
    a, b = plain(found["a"]), plain(found["b"])
    score, error = aligned(found["difference"], found["se_paired"])
    rows: list[tuple[str, object]] = [
        (a, aligned(found["score_a"], found["se_unpaired"])[0]),
        (b, aligned(found["score_b"], found["se_unpaired"])[0]),
        ("difference", score),
        ("± paired", error),
        ("± as if unpaired", aligned(found["difference"], found["se_unpaired"])[1]),
        ("interval of the difference", between(found["low"], found["high"])),
        ("examples", found["n"]),
        ("clusters", found["clusters"]),
    ]
    if found["mcnemar_p"] is not None:
        rows.append((f"right by {a} alone, by {b} alone", f"{found['only_a']}, {found['only_b']}"))
        rows.append(("McNemar, exact", f"p {p_value(found['mcnemar_p'])}"))
    rows.append(("sign-flip permutation", f"p {p_value(found['permutation_p'])}"))
    rows.append(("Wilcoxon signed rank", f"p {p_value(found['wilcoxon_p'])}"))
    yield from table(("", ""), rows, right=())[1:]
    yield ""
    p = found["permutation_p"]
    told = f"{p_value(p)}{' or less' if p == found['permutation_least_p'] else ''}"
    if found["alternative"] != "two-sided":
        side = "better" if found["alternative"] == "greater" else "worse"
        yield f"That {a} is {side} than {b} is {'shown' if p <= 0.05 else 'not shown'} at 0.05 (permutation test, one-sided)."
    elif p <= 0.05:
        yield f"{a} and {b} differ: by chance alone a difference as large comes with probability {told}."
    else:
        yield f"{a} and {b} can't be told apart on these examples: chance alone gives a difference as large with probability {p_value(p)}."
    if found["clusters"] < 10:
        yield "not informative: below 10 examples or clusters hardly any difference can be told from chance."


def _z_scores(found: Mapping[str, Any]) -> Iterator[str]:
    header = ("rank", "entrant", "sum", "average", "rank by average", "attempted", "missing")
    body = [
        (
            row["rank"],
            row["entrant"],
            decimal(row["sum"]),
            decimal(row["average"]),
            row["average_rank"],
            row["attempted"],
            row["missing"],
        )
        for row in found["ranking"]
    ]
    body += [
        ("·", row["entrant"], decimal(row["sum"]), decimal(row["average"]), "·", row["attempted"], row["missing"])
        for row in found["baselines"]
    ]
    yield from table(header, body, right=[name for name in header if name != "entrant"])


def p_value(value: float | None) -> str:
    """A p-value: – where there is none."""
    return "–" if value is None else "< 0.0001" if value < 0.0001 else f"{value:.4f}"


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
