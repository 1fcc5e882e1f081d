"""The round's report: one self-contained HTML page with its plots as inline SVG. No script, no network, no heavy library.

Everything on it comes from the ranking document, the stability document, and what the caller says of the round. Each plot
stands with its numbers as a table. All names and texts are escaped.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate import plots
from acclimate.plots import number

if TYPE_CHECKING:
    from acclimate.report_sections import Section

_STYLE = """
:root { color-scheme: light; --ink: #1c2430; --grey: #5b6470; --line: #dfe3e8; --wash: #f5f7f9; --accent: #14375e; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; font: 16px/1.55 system-ui, 'Segoe UI', 'Helvetica Neue', Arial,
  'Noto Sans', sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 21px; margin: 56px 0 12px; padding-top: 18px; border-top: 1px solid var(--line); }
h3 { font-size: 16px; margin: 28px 0 8px; overflow-wrap: anywhere; }
p, li { max-width: 74ch; }
.lead { color: var(--grey); margin: 0 0 20px; }
.note { background: var(--wash); border-left: 4px solid var(--accent); padding: 12px 16px; margin: 20px 0; }
figure { margin: 20px 0; overflow-x: auto; }
figcaption, caption { color: var(--grey); font-size: 14px; text-align: left; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; margin: 8px 0 16px; }
caption { caption-side: top; padding-bottom: 6px; }
th, td { padding: 5px 12px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 600; color: var(--grey); border-bottom-color: #aab2bd; white-space: nowrap; }
th.name, td.name { text-align: left; overflow-wrap: anywhere; }
tbody tr:nth-child(even) { background: var(--wash); }
tr.baseline td { color: var(--grey); font-style: italic; }
code { font-size: 13px; overflow-wrap: anywhere; }
.caveat { background: var(--wash); border-left: 4px double var(--accent); padding: 8px 14px; }
@media screen { th.name, td.name { min-width: 9ch; } figure svg { max-width: max(100%, 620px) !important; } }
@media print { .scroll, figure { overflow: visible; } main { max-width: none; padding: 0; } h2 { break-after: avoid; } figure, tr, .short { break-inside: avoid; } .says, .caveat, h3 { break-after: avoid; } figure svg { max-width: 100%; max-height: 190mm; height: auto; } }
"""

_ROW = ("rank", "interval", "tier", "*entrant", "score", "± se", "direct rank", "direct score", "n", "seeds")


def ranking_svg(ranking: Mapping[str, Any]) -> str:
    """The rank intervals of a ranking document as an SVG picture."""
    return plots.rank_intervals(ranking)


def write(
    out: Path,
    *,
    title: str,
    ranking: Mapping[str, Any],
    stability: Mapping[str, Any],
    info: Mapping[str, Any],
    sections: "Sequence[Section]" = (),
) -> Path:
    """Write the report as one HTML file; returns its path.

    Args:
        out: the file to write; its folder is made, and the file appears whole or not at all.
        title: of the page.
        ranking: Ranking.document().
        stability: Stability.document(); empty where it was not computed.
        info: of the round. `data_is_public` (bool) chooses the statement on data, `holdout` adds one where it is given, `phases`
            ([{phase, at}]) becomes a table, everything else is listed by name.
        sections: what the scores by example say beside, as `acclimate report` has it.
    """
    parts = [
        _head(title, info),
        _versions(info),
        _standing(ranking),
        _preparation(ranking, stability),
        _agreement(stability) if stability else "",
        _examples(sections),
        _by_task(ranking),
        _about(ranking, info),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
    return out


def _head(title: str, info: Mapping[str, Any]) -> str:
    public = info.get("data_is_public")
    if public is None:
        statement = "Whether the data of this competition are public is not stated."
    elif public:
        statement = (
            "<strong>The data of this competition are public.</strong> Whoever wanted could have had the holdout "
            "before: this round shows the protocol, not blindness."
        )
    else:
        statement = (
            "<strong>The holdout is not public before the round.</strong> It was sealed before the round opened, and opened "
            "after the entries were closed and prepared."
        )
    if info.get("holdout"):
        statement += (
            " <strong>It stays private.</strong> In place of the holdout, of predictions and of scores by example the public bundle opens "
            "drawn rows of it, and holds the report of the auditor whom the round names."
        )
    lead = " · ".join(_text(info[key]) for key in ("competition", "round") if info.get(key))
    return (
        f"<h1>{_text(title)}</h1>\n<p class='lead'>{lead}</p>\n<div class='note'><p>{statement}</p>"
        "<p>Before the close entrants could see the definition, the recipe, and the preparation and validation splits; "
        "not the holdout's inputs and targets, nor each other's models and scores. What of this the published records can "
        "show, and what they can't, <code>acclimate verify</code> prints line by line.</p></div>"
    )


_AGGREGATES = {
    "mean": "the mean over tasks, seeds and examples",
    "win_rate": "the share of the others that it beats, as a mean over the tasks",
    "mean_rank": "the mean over the tasks of its rank in each, so that less is better",
}


def _versions(info: Mapping[str, Any]) -> str:
    """That this is the newest of several versions, what was before, and whose rank or score it changed."""
    found = info.get("versions") or []
    if len(found) < 2:
        return ""
    newest = found[-1]
    rows = [
        [_name(row["entrant"]), *(_told(row.get(name)) for name in ("rank_before", "rank", "score_before", "score"))]
        for row in newest["changes"]
    ]
    lines = "".join(
        f"<li>Version {one['version']}, {_text(one['at'])}{': ' + _text(one['reason']) if one['reason'] else ''} "
        f"<code>{_text(one['ranking'])}</code></li>"
        for one in found
    )
    changes = _table(
        "What this version changed", ("*entrant", "rank before", "rank", "score before", "score"), rows, rows
    )
    return (
        f"<h2>Version {newest['version']}</h2>\n<p>These results were judged again: below stands version {newest['version']} of "
        f"{len(found)}, with the reason: {_text(newest['reason'])} The older versions stay, and "
        "<code>acclimate ranking ROUND --version N</code> gives each.</p>\n"
        f"<ul>{lines}</ul>\n" + (changes if rows else "<p>No rank and no score changed.</p>")
    )


def _told(value: Any) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def _standing(ranking: Mapping[str, Any]) -> str:
    rows = ranking["ranking"]
    if not rows:
        return "<h2>Ranking</h2><p>No entrant stands in this ranking.</p>"
    first = [_name(row["entrant"]) for row in rows if row["rank"] == 1]
    interval = ranking["policy"]["interval"]
    possible = sum(row["rank_low"] == 1 for row in rows)
    shared = f" At the chosen level, {possible} of {len(rows)} entrants may be the best." if possible > 1 else ""
    score = _AGGREGATES.get(ranking["policy"].get("aggregate", "mean"), _AGGREGATES["mean"])
    return (
        "<h2>Ranking</h2>\n"
        f"<p>First: {', '.join(first)}.{shared} Every entrant's model had the same preparation; the score is {score}. The bar holds all ranks that the data do not rule out "
        f"({html.escape(interval['kind'])}, {interval['level']:.0%}); entrants whose bars overlap are not to be told apart "
        "by their order alone. Baselines are unranked.</p>\n"
        + _figure(
            plots.rank_intervals(ranking), "Ranks with confidence sets. The same numbers stand in the table below."
        )
        + _table("Ranking, all tasks together", _ROW, [*map(_row, rows), *map(_row, ranking["baselines"])], rows)
    )


def _preparation(ranking: Mapping[str, Any], stability: Mapping[str, Any]) -> str:
    if not ranking["ranking"]:
        return ""
    parts = [
        "<h2>What preparation changed</h2>\n<p>On the left the models as submitted, on the right after the same "
        "fine-tune for all. A model that owes its place to practice on the tasks falls; one that was never asked this way rises.</p>",
        _figure(plots.slope(ranking), "Ranks before and after preparation; the numbers stand in the ranking's table."),
    ]
    if stability:
        heads = ("*entrant", "*task", "direct rank", "prepared rank", "ranks lost")
        parts.append(_table("Each entrant's largest loss of ranks in a task", heads, map(_fall, stability["falls"])))
        parts.append(_table("Ranks lost over all tasks", heads, map(_fall, stability["losers"])))
        winners = [
            [_text(row["task"]), _names(row["direct"]), _names(row["prepared"]), "yes" if row["changed"] else "no"]
            for row in stability["winners"]
        ]
        parts.append(_table("Who is first", ("*task", "*direct", "*prepared", "changed"), winners))
    return "\n".join(parts)


def _agreement(stability: Mapping[str, Any]) -> str:
    summary, tasks = stability["agreement"], stability["tasks"]
    rows = []
    for protocol in ("direct", "prepared"):
        effect = stability["effects"][protocol]
        interval = effect["interval"]
        told = "not informative" if interval is None else f"{number(interval[0])} to {number(interval[1])}"
        values = [summary[protocol], summary[f"half_{protocol}"], summary[f"ceiling_{protocol}"]]
        values += [effect["component"], effect["component_null"]]
        rows.append([protocol, *map(number, values[:3]), told, *map(number, values[3:])])
    heads = ("*protocol", "agreement", "of halves", "ceiling of halves", "interval", "first component", "by chance")
    parts = [
        "<h2>Agreement between tasks</h2>\n<p>Kendall's tau-b between the orders of entrants in two tasks: 1 is the same order, 0 "
        "none. The ceiling is how well a task agrees with itself, from one random half of its items (and seeds) to the other: what "
        "noise alone allows. Compare it with the agreement of halves, which rests on as many items; whole tasks rest "
        "on twice as many and may pass it. Intervals resample entrants, and say nothing below ten.</p>",
        _figure(plots.agreement(stability), "Agreement between tasks; the numbers stand in the tables below."),
        _table("Mean agreement, and the share of the first principal component of scores", heads, rows),
    ]
    for protocol in ("direct", "prepared"):
        effect = stability["effects"][protocol]
        matrix = [
            [_text(task), *(number(value) for value in effect["pairs"][place]), number(effect["ceilings"][place])]
            for place, task in enumerate(tasks)
        ]
        parts.append(_table(f"tau-b between tasks, {protocol}", ("*task", *tasks, "ceiling"), matrix))
    same = stability["protocols"]
    rows = [["all tasks", number(same["overall"])]]
    rows += [[_text(task), number(value)] for task, value in same["tasks"].items()]
    parts.append(_table("Agreement of the direct order with the prepared one", ("*task", "tau-b"), rows))
    if stability["left_out"]:
        parts.append(f"<p>Left out here, for lack of a score: {_names(stability['left_out'])}.</p>")
    return "\n".join(parts)


def _examples(sections: "Sequence[Section]") -> str:
    """Sections of `acclimate report`, which need numpy."""
    if not sections:
        return ""
    from acclimate import report_page

    inner = "\n".join(report_page.section_html("examples", section) for section in sections)
    return f"<h2>How sure the order is</h2>\n{inner}"


def _by_task(ranking: Mapping[str, Any]) -> str:
    tables = [_table(f"Task {plots.plain(task)}", _ROW, map(_row, rows)) for task, rows in ranking["tasks"].items()]
    return "<h2>Each task alone</h2>\n" + "\n".join(tables)


def _about(ranking: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    parts = ["<h2>About this round</h2>"]
    phases = info.get("phases") or []
    if phases:
        rows = [[_text(row["phase"]), _text(row["at"])] for row in phases]
        parts.append(_table("Phases", ("*phase", "*since"), rows))
    facts = [
        [_text(key), _value(value)]
        for key, value in info.items()
        if key not in ("phases", "versions") and value is not None
    ]
    facts += [[_text(f"policy: {key}"), _value(value)] for key, value in ranking["policy"].items()]
    parts.append(_table("Facts", ("*what", "*value"), facts))
    return "\n".join(parts)


def _row(row: Mapping[str, Any]) -> list[str]:
    ranked = "rank" in row
    cells = [str(row["rank"]), f"{row['rank_low']}–{row['rank_high']}", str(row["tier"])] if ranked else ["–", "–", "–"]
    cells += [_name(row["entrant"]), number(row["score"], 4), number(row["se"], 4)]
    cells += [
        str(row["direct_rank"]) if ranked else "–",
        number(row["direct_score"], 4),
        str(row["n"]),
        str(row["seeds"]),
    ]
    return cells


def _fall(row: Mapping[str, Any]) -> list[str]:
    task = "all" if row["task"] is None else _text(row["task"])
    lost = f"{row['fall']:+d}".replace("-", "−") if row["fall"] else "0"
    return [_name(row["entrant"]), task, str(row["direct_rank"]), str(row["prepared_rank"]), lost]


def _table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], ranked: Sequence[object] | None = None
) -> str:
    """A table; cells are HTML already, heads and caption are not; a head with * is of names. Rows beyond `ranked` are baselines."""
    kinds = [" class='name'" if head.startswith("*") else "" for head in heads]
    top = "".join(
        f"<th scope='col'{kind}>{_text(head.removeprefix('*'))}</th>" for head, kind in zip(heads, kinds, strict=True)
    )
    body = []
    for place, row in enumerate(rows):
        kind = " class='baseline'" if ranked is not None and place >= len(ranked) else ""
        cells = "".join(f"<td{style}>{cell}</td>" for cell, style in zip(row, kinds, strict=True))
        body.append(f"<tr{kind}>{cells}</tr>")
    return (
        f"<div class='scroll'><table><caption>{_text(caption)}</caption><thead><tr>{top}</tr></thead>\n<tbody>"
        + "\n".join(body)
        + "</tbody></table></div>"
    )


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>\n"


def _names(names: Sequence[str]) -> str:
    return ", ".join(_name(name) for name in names) or "–"


def _name(name: str) -> str:
    # bdi keeps a name in a right-to-left script from turning its neighbours around.
    return f"<bdi>{_text(name)}</bdi>"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict | list | tuple):
        return f"<code>{_text(json.dumps(value, ensure_ascii=False, sort_keys=True, default=str))}</code>"
    return _text(value)


def _text(value: object) -> str:
    return html.escape(plots.plain(str(value)))
