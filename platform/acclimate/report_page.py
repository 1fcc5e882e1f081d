"""Reports of anybody's results, `acclimate.report_page.make`: one HTML file without scripts or outer resources, JSON, or a notebook."""

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from acclimate import report_sections, rounds_section
from acclimate.plots import plain
from acclimate.report_data import RoundScores
from acclimate.report_sections import Section, Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --grey: #56606c; --line: #c9d0d8; --wash: #f4f6f8; --page: #fff; --accent: #14375e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --grey: #aab4c0; --line: #3c4653; --wash: #1d242e; --page: #12171e; --accent: #8db4e2; } }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'Noto Sans', sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 28px; line-height: 1.2; } h2 { font-size: 23px; margin: 48px 0 8px; border-bottom: 2px solid var(--ink); overflow-wrap: anywhere; }
h3 { font-size: 18px; margin: 36px 0 6px; } p, li { max-width: 76ch; overflow-wrap: anywhere; }
.says { font-size: 17px; } .caveat { border-left: 4px double var(--ink); background: var(--wash); padding: 8px 14px; margin: 10px 0; }
figure { margin: 14px 0; overflow-x: auto; background: #fff; border: 1px solid var(--line); padding: 8px; } figure svg { display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; margin: 8px 0 16px; }
caption { text-align: left; color: var(--grey); padding-bottom: 4px; } th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
thead th { border-bottom: 2px solid var(--grey); } th.name, td.name { text-align: left; overflow-wrap: anywhere; max-width: 36ch; } tbody th { font-weight: 500; }
details summary { cursor: pointer; color: var(--accent); } nav li { margin: 2px 0; } a { color: var(--accent); }
@page { size: A4; margin: 14mm; }
@media screen { th.name, td.name { min-width: 9ch; } figure svg { max-width: max(100%, 620px) !important; } }
@media print {
  :root { --ink: #000; --grey: #333; --line: #999; --wash: #fff; --page: #fff; --accent: #000; }
  body { font-size: 11pt; } main { max-width: none; padding: 0; } nav { display: none; } h2, h3, caption { break-after: avoid; }
  figure, tr, .caveat, .says, .short { break-inside: avoid; } .says, .caveat { break-after: avoid; } figure { border: 0; padding: 0; overflow: visible; } .scroll { overflow: visible; }
  figure svg { max-width: 100%; max-height: 190mm; height: auto; } thead { display: table-header-group; } table { font-size: 9pt; } th, td { padding: 2px 6px; }
}
"""

SHORT = 12
"""Rows of a table that stays whole on paper."""


def make(
    rounds: Sequence[RoundScores], *, title: str = "Stability report", seed: int = 1
) -> tuple[str, dict[str, Any]]:
    """A report as HTML text, and the same numbers as JSON-ready data.

    Args:
        rounds: at least one, in the order in which they are shown.
        title: of the page.
        seed: of all draws.
    """
    parts = [(found, report_sections.of_round(found, seed=seed)) for found in rounds]
    across = [rounds_section.of(rounds)] if len(rounds) > 1 else []
    document = {
        "title": title,
        "rounds": [
            {
                "round": found.name,
                "private": found.private,
                "notes": list(found.notes),
                "sections": {section.key: section.document() for section in sections},
            }
            for found, sections in parts
        ],
        "across": {section.key: section.document() for section in across},
    }
    body = [_round(place, found, sections) for place, (found, sections) in enumerate(parts)]
    if across:
        body.append(f"<h2 id='across'>All rounds</h2>\n{section_html('across', across[0])}")
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{_text(title)}</h1>\n"
        "<p>Every plot stands with the sentence that its numbers say, what they can't carry, and the numbers themselves as a table.</p>\n"
        + _contents(parts, across)
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )
    return page, document


def _contents(parts: Iterable[tuple[RoundScores, Sequence[Section]]], across: Sequence[Section]) -> str:
    lines = []
    for place, (found, sections) in enumerate(parts):
        inner = "".join(f"<li><a href='#r{place}-{one.key}'>{_text(one.title)}</a></li>" for one in sections)
        lines.append(f"<li><a href='#r{place}'><bdi>{_text(found.name)}</bdi></a><ul>{inner}</ul></li>")
    lines += [f"<li><a href='#across-{one.key}'>{_text(one.title)}</a></li>" for one in across]
    return f"<nav aria-label='Contents'><ul>{''.join(lines)}</ul></nav>\n"


def _round(place: int, found: RoundScores, sections: Sequence[Section]) -> str:
    head = [f"<h2 id='r{place}'><bdi>{_text(found.name)}</bdi></h2>"]
    if found.public_data:
        head.append(
            "<p class='caveat'>Caveat: the data were public before the round; this shows the protocol, not blindness.</p>"
        )
    inner = [section_html(f"r{place}", section) for section in sections]
    if found.notes:
        items = "".join(f"<li>{_text(note)}</li>" for note in found.notes)
        inner.append(f"<h3>Notes on the data</h3><ul>{items}</ul>")
    return "\n".join([*head, *inner])


def section_html(where: str, section: Section) -> str:
    """A section as HTML; `where` makes its ids those of one place on the page."""
    name = f"{where}-{section.key}"
    caveats = "".join(f"<p class='caveat'>Caveat: {_text(one)}.</p>" for one in section.caveats)
    figure = f"<figure>{_described(section, name)}</figure>" if section.svg else ""
    tables = "\n".join(_table(table) for table in section.tables)
    return f"<section><h3 id='{name}'>{_text(section.title)}</h3>\n<p class='says'>{_text(section.sentence)}</p>\n{caveats}\n{figure}\n{tables}</section>"


def _described(section: Section, name: str) -> str:
    """The plot with a title and a description that readers of the page by ear get."""
    head, end, rest = section.svg.partition(">")
    head = re.sub(r' aria-label="[^"]*"', f' aria-labelledby="{name}-t" aria-describedby="{name}-d"', head)
    told = f'<title id="{name}-t">{_text(section.title)}</title><desc id="{name}-d">{_text(section.sentence)} The numbers stand in the table below.</desc>'
    return f"{head}{end}{told}{rest}"


def _table(table: Table) -> str:
    named = [head.startswith("*") for head in table.heads]
    top = "".join(
        f"<th scope='col'{' class=name' if name else ''}>{_text(head.removeprefix('*') if name else head)}</th>"
        for head, name in zip(table.heads, named, strict=True)
    )
    first = named.index(True) if True in named else -1
    rows = []
    for row in table.rows:
        cells = []
        for place, (cell, name) in enumerate(zip(row, named, strict=True)):
            tag, scope = ("th", " scope='row'") if place == first else ("td", "")
            inner = f"<bdi>{_text(cell)}</bdi>" if name else _text(cell)
            cells.append(f"<{tag}{scope}{' class=name' if name else ''}>{inner}</{tag}>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    form = " short" if len(rows) <= SHORT else ""
    return (
        f"<div class='scroll{form}'><table><caption>{_text(table.caption)}</caption><thead><tr>{top}</tr></thead>\n<tbody>"
        + "\n".join(rows)
        + "</tbody></table></div>"
    )


def _text(value: str) -> str:
    return html.escape(plain(value))


def notebook(
    sources: Sequence[str], options: Mapping[str, Any], *, tracked: tuple[str, str, Sequence[str] | None] | None = None
) -> str:
    """A Jupyter notebook (nbformat 4.5) that makes the report's numbers step by step, for an analyst to go on from.

    Args:
        sources: paths, as seen from where the notebook is opened.
        options: of report_data.read.
        tracked: what `acclimate.load_rounds` is given, where rounds in MLflow are a source, too.
    """
    loaded = "" if tracked is None else f"import acclimate\n\nsources.append(acclimate.load_rounds(*{tracked!r}))\n"
    cells = [
        (
            "markdown",
            "# A report, step by step\n\nEach cell runs by itself after those above it, in order. The numbers are those of `acclimate report`.",
        ),
        (
            "code",
            "from acclimate import report_data, report_page\n\n"
            f"sources = {list(sources)!r}\noptions = {dict(options)!r}\n{loaded}"
            "rounds = [one for source in sources for one in report_data.read(source, options=options)]\n"
            "for one in rounds:\n    print(one.name, len(one.ranking['ranking']), 'entrants', list(one.items))",
        ),
        (
            "code",
            "page, numbers = report_page.make(rounds)\nfor one in numbers['rounds']:\n    for section in one['sections'].values():\n"
            "        print(section['title'], '-', section['sentence'])\n        for caveat in section['caveats']:\n            print('   caveat:', caveat)",
        ),
        ("markdown", "## The ranking\n\nThe interval holds all ranks that the data do not rule out."),
        (
            "code",
            "for row in rounds[0].ranking['ranking']:\n    print(row['rank'], (row['rank_low'], row['rank_high']), row['entrant'], row['score'], row['se'])",
        ),
        (
            "code",
            "from pathlib import Path\n\nPath('report.html').write_text(page, encoding='utf-8')\nprint('report.html', len(page), 'characters')",
        ),
    ]
    document = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "cells": [_cell(f"cell-{place}", kind, text) for place, (kind, text) in enumerate(cells)],
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _cell(name: str, kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell
