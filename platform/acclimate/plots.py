"""The report's plots as SVG text: the same bytes for the same data, any script in names, no library needed.

Each is readable in black and white: shape, fill and dash say what colour says. Names are escaped; what can't be printed, such
as a right-to-left override, is written as its code.
"""

import html
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

INK, GREY, FAINT = "#1c2430", "#68717d", "#dfe3e8"
DARK, BAR, EDGE = "#14375e", "#cfdcec", "#6f8fb3"
FALL = "#a33d12"
FONT = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'Noto Sans', 'DejaVu Sans', sans-serif"


def plain(name: str) -> str:
    """A name with what can't be printed (controls, direction marks, lone surrogates) written as its code; not HTML-safe."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in name)


def number(value: float | None, digits: int = 3) -> str:
    """A number with a true minus sign, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


class Svg:
    """An SVG picture in the making; coordinates in pixels."""

    def __init__(self, width: float, height: float, *, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
            f'height="{_n(height)}" role="img" aria-label="{html.escape(title)}" font-family="{FONT}" font-size="13" '
            f'fill="{INK}" style="font-variant-numeric: tabular-nums; max-width: 100%; height: auto">'
        )
        self._parts = [f'<rect width="{_n(width)}" height="{_n(height)}" fill="#ffffff"/>']

    def add(self, element: str, *, title: str = "", **attributes: object) -> None:
        """One element; `_` in an attribute's name stands for `-`, floats are shortened."""
        pairs = "".join(
            f' {name.replace("_", "-")}="{_n(value) if isinstance(value, int | float) else html.escape(str(value))}"'
            for name, value in attributes.items()
        )
        inner = f"<title>{html.escape(title)}</title>" if title else ""
        self._parts.append(f"<{element}{pairs}>{inner}</{element}>" if inner else f"<{element}{pairs}/>")

    def line(self, start: tuple[float, float], end: tuple[float, float], *, stroke: str, **attributes: Any) -> None:
        """A straight line."""
        self.add("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=stroke, **attributes)

    def text(self, at: tuple[float, float], text: str, *, anchor: str = "start", **attributes: object) -> None:
        """Text on a base line; the text is escaped here."""
        pairs = "".join(f' {name.replace("_", "-")}="{html.escape(str(value))}"' for name, value in attributes.items())
        self._parts.append(
            f'<text x="{_n(at[0])}" y="{_n(at[1])}" text-anchor="{anchor}"{pairs}>{html.escape(text)}</text>'
        )

    def name(
        self, at: tuple[float, float], name: str, *, width: float, anchor: str = "start", **attributes: object
    ) -> None:
        """A name, shortened to `width` pixels; the whole of it shows on hovering."""
        shown = plain(name)
        pairs = "".join(f' {key.replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items())
        self._parts.append(
            f'<text x="{_n(at[0])}" y="{_n(at[1])}" text-anchor="{anchor}" direction="ltr"{pairs}>'
            f"<title>{html.escape(shown)}</title>{html.escape(fit(shown, width))}</text>"
        )

    def document(self) -> str:
        """The picture's text."""
        return "\n".join([self._head, *self._parts, "</svg>"])


def fit(text: str, width: float, *, size: float = 13) -> str:
    """Text, cut with an ellipsis where it is wider than `width` pixels by a cautious estimate."""
    if extent(text, size=size) <= width:
        return text
    while text and extent(text + "…", size=size) > width:
        text = text[:-1]
    return text + "…"


def extent(text: str, *, size: float = 13) -> float:
    """Width of text in pixels, estimated."""
    wide = sum(1.05 if unicodedata.east_asian_width(c) in "WF" else 0.6 for c in text)
    return wide * size


def rank_intervals(ranking: Mapping[str, Any]) -> str:
    """Rank and rank interval of each entrant, with scores; baselines below, unranked."""
    rows, baselines = ranking["ranking"], ranking["baselines"]
    interval = ranking["policy"]["interval"]
    known = ranking["policy"].get("baselines", [row["entrant"] for row in baselines])
    label = _label_width([*rows, *baselines])
    left, width = label + 62.0, 900.0
    right, top, step = width - 232.0, 74.0, 30.0
    bottom = top + step * len(rows)
    height = bottom + (step * len(baselines) + 14 if baselines else 0) + 46
    svg = Svg(width, height, title="Rank of each entrant with its confidence set")
    x = _scale(0.5, max(1, len(rows)) + 0.5, left, right - 12)
    svg.text(
        (left, 22), f"Rank after the same preparation, with {interval['kind']} {interval['level']:.0%} confidence set"
    )
    for tick in _ticks(len(rows)):
        svg.line((x(tick), top - 12), (x(tick), bottom), stroke=FAINT)
        svg.text((x(tick), top - 20), str(tick), anchor="middle", fill=GREY, font_size=12)
    for place, head in ((right + 96, "score ± se"), (right + 158, "direct"), (right + 216, "n")):
        svg.text((place, top - 20), head, anchor="end", fill=GREY, font_size=12)
    svg.text((16, top - 20), "rank", fill=GREY, font_size=12)
    for place, row in enumerate(rows):
        y = top + step * (place + 0.5)
        svg.text((40, y + 4.5), str(row["rank"]), anchor="end", font_weight=600)
        svg.name((54, y + 4.5), row["entrant"], width=label)
        low, high = x(row["rank_low"]) - 9, x(row["rank_high"]) + 9
        told = f"{plain(row['entrant'])}: rank {row['rank']}, set {row['rank_low']} to {row['rank_high']}"
        dashed = {"stroke_dasharray": "4 3", "fill": "none"} if row["score"] is None else {"fill": BAR}
        svg.add("rect", x=low, y=y - 6.5, width=high - low, height=13, rx=6.5, stroke=EDGE, **dashed, title=told)
        if row["direct_rank"] is not None:
            svg.add("path", d=_diamond(x(row["direct_rank"]), y, 8), fill="#ffffff", stroke=FALL, stroke_width=1.6)
        svg.add("circle", cx=x(row["rank"]), cy=y, r=4.2, fill=DARK)
        _score_cells(svg, row, y, right)
    for place, row in enumerate(baselines):
        y = bottom + 14 + step * (place + 0.5)
        svg.name((54, y + 4.5), row["entrant"], width=label, fill=GREY, font_style="italic")
        why = "baseline, unranked" if row["entrant"] in known else "unranked: conflict declared"
        svg.text(((left + right) / 2, y + 4.5), why, anchor="middle", fill=GREY, font_style="italic")
        _score_cells(svg, row, y, right)
    if baselines:
        svg.line((16, bottom + 7), (width - 16, bottom + 7), stroke=GREY, stroke_dasharray="2 4")
    _legend(svg, left, height - 18)
    return svg.document()


def _score_cells(svg: Svg, row: Mapping[str, Any], y: float, right: float) -> None:
    error = "" if row["se"] is None else f" ± {row['se']:.3f}"
    svg.text((right + 96, y + 4.5), number(row["score"]) + error if row["score"] is not None else "none", anchor="end")
    svg.text((right + 158, y + 4.5), number(row["direct_score"]), anchor="end", fill=GREY)
    svg.text((right + 216, y + 4.5), "–" if row["n"] is None else str(row["n"]), anchor="end", fill=GREY)


def _legend(svg: Svg, left: float, y: float) -> None:
    svg.add("circle", cx=left + 6, cy=y - 4, r=4.2, fill=DARK)
    svg.text((left + 18, y), "rank", font_size=12, fill=GREY)
    svg.add("rect", x=left + 62, y=y - 10, width=34, height=12, rx=6, fill=BAR, stroke=EDGE)
    svg.text((left + 104, y), "confidence set", font_size=12, fill=GREY)
    svg.add("path", d=_diamond(left + 214, y - 4, 7), fill="#ffffff", stroke=FALL, stroke_width=1.6)
    svg.text((left + 228, y), "rank by direct evaluation", font_size=12, fill=GREY)


def slope(ranking: Mapping[str, Any]) -> str:
    """Ranks by direct evaluation on the left, after preparation on the right."""
    rows = ranking["ranking"]
    label = max(110.0, _label_width(rows))
    start, width, top, step = label + 128, 2 * (label + 128) + 300, 66.0, 30.0
    end = width - start
    svg = Svg(width, top + step * len(rows) + 44, title="Ranks by direct evaluation and after preparation")
    for x, anchor, head in ((start, "end", "direct evaluation"), (end, "start", "after the same preparation")):
        svg.text((x, 30), head, anchor=anchor, font_weight=600)
    for x, anchor, head in (
        (start - 14, "end", "rank"),
        (start - 44, "end", "score"),
        (end + 14, "start", "rank"),
        (end + 44, "start", "score"),
    ):
        svg.text((x, 50), head, anchor=anchor, fill=GREY, font_size=12)
    before = sorted(rows, key=lambda row: (row["direct_rank"], row["rank"], row["entrant"]))
    left = {row["entrant"]: top + step * (place + 0.5) for place, row in enumerate(before)}
    right = {row["entrant"]: top + step * (place + 0.5) for place, row in enumerate(rows)}
    for row in sorted(rows, key=lambda row: row["rank"] - row["direct_rank"]):
        fall = row["rank"] - row["direct_rank"]
        style: dict[str, Any] = {"stroke": GREY, "stroke_width": 1.2}
        if fall > 0:
            style = {"stroke": FALL, "stroke_width": min(4.0, 1.6 + 0.5 * fall)}
        elif fall < 0:
            style = {"stroke": DARK, "stroke_width": 1.6, "stroke_dasharray": "6 4"}
        points = (start, left[row["entrant"]]), (end, right[row["entrant"]])
        svg.line(*points, stroke=str(style.pop("stroke")), **style)
        for x, y in points:
            svg.add("circle", cx=x, cy=y, r=4, fill=FALL if fall > 0 else DARK if fall < 0 else GREY)
    for row in rows:
        y = left[row["entrant"]] + 4.5
        svg.text((start - 14, y), str(row["direct_rank"]), anchor="end", font_weight=600)
        svg.text((start - 44, y), number(row["direct_score"]), anchor="end", fill=GREY)
        svg.name((start - 96, y), row["entrant"], width=label, anchor="end")
        y = right[row["entrant"]] + 4.5
        svg.text((end + 14, y), str(row["rank"]), font_weight=600)
        svg.text((end + 44, y), number(row["score"]), fill=GREY)
        svg.name((end + 96, y), row["entrant"], width=label)
    y = top + step * len(rows) + 26
    for x, stroke, dash, thick, told in (
        (width / 2 - 190, FALL, "none", 3, "fell"),
        (width / 2 - 80, DARK, "6 4", 1.6, "rose"),
        (width / 2 + 30, GREY, "none", 1.2, "kept its rank"),
    ):
        svg.line((x, y - 4), (x + 32, y - 4), stroke=stroke, stroke_dasharray=dash, stroke_width=thick)
        svg.text((x + 40, y), told, font_size=12, fill=GREY)
    return svg.document()


def agreement(stability: Mapping[str, Any]) -> str:
    """Agreement between tasks, direct and prepared, as heat maps; on the diagonal each task's noise ceiling."""
    tasks = stability["tasks"]
    cell = max(16.0, min(64.0, 330 / max(1, len(tasks))))
    label = max(84.0, min(150.0, max((extent(plain(task)) for task in tasks), default=0.0)) + 18)
    side, top = cell * len(tasks), 58.0 + (0 if cell > 40 else 70)
    width = max(560.0, label + 520, label + 2 * side + 64 + (20 if cell > 40 else 70))
    svg = Svg(width, top + side + 186, title="Agreement between tasks (Kendall tau-b), direct and prepared")
    for panel, protocol in enumerate(name for name in ("direct", "prepared") if name in stability["effects"]):
        left = label + panel * (side + 64)
        svg.text((left, 22), "direct evaluation" if protocol == "direct" else "after preparation", font_weight=600)
        _heat_map(svg, stability, protocol, at=(left, top), cell=cell)
    for place, task in enumerate(tasks):
        svg.name((label - 10, top + cell * (place + 0.5) + 4.5), task, width=label - 14, anchor="end")
    y = top + side + 20
    svg.add("rect", x=label + 1, y=y - 10, width=12, height=12, fill="none", stroke=INK, stroke_width=2)
    svg.text(
        (label + 22, y), "diagonal: the task's own noise ceiling (two halves of its items)", font_size=12, fill=GREY
    )
    y += 38
    for x, told in ((0, "mean over pairs of tasks"), (186, "the same from halves"), (350, "ceiling from halves")):
        if x == 350:
            svg.add("rect", x=label + x + 4, y=y - 13, width=4, height=18, fill=INK)
        else:
            half = {"fill": "#ffffff", "stroke": DARK, "stroke_width": 2} if x else {"fill": DARK}
            svg.add("circle", cx=label + x + 6, cy=y - 4, r=6 if x else 4, **half)
        svg.text((label + x + 20, y), told, font_size=12, fill=GREY)
    _ceilings(svg, stability["agreement"], at=(label, y + 36), width=width - label - 30)
    return svg.document()


def _heat_map(svg: Svg, stability: Mapping[str, Any], protocol: str, *, at: tuple[float, float], cell: float) -> None:
    tasks, effect = stability["tasks"], stability["effects"][protocol]
    for column, task in enumerate(tasks):
        x = at[0] + cell * (column + 0.5)
        if cell > 40:
            svg.name((x, at[1] - 10), task, width=cell - 4, anchor="middle", font_size=12, fill=GREY)
        else:
            turn = f"rotate(-60 {_n(x)} {_n(at[1] - 8)})"
            svg.name((x, at[1] - 8), task, width=100, font_size=11, fill=GREY, transform=turn)
        for row, other in enumerate(tasks):
            own = row == column
            value = effect["ceilings"][row] if own else effect["pairs"][row][column]
            corner = (at[0] + cell * column, at[1] + cell * row)
            told = f"{plain(other)}: noise ceiling" if own else f"{plain(other)} and {plain(task)}"
            svg.add(
                "rect",
                x=corner[0] + 1,
                y=corner[1] + 1,
                width=cell - 2,
                height=cell - 2,
                fill=_shade(value),
                stroke=FAINT,
                title=f"{told}: {number(value)}",
            )
            if cell > 30:
                dark = value is not None and value > 0.55
                svg.text(
                    (corner[0] + cell / 2, corner[1] + cell / 2 + 4.5),
                    number(value, 2),
                    anchor="middle",
                    fill="#ffffff" if dark else INK,
                )
    for place in range(len(tasks)):
        corner = (at[0] + cell * place, at[1] + cell * place)
        svg.add(
            "rect",
            x=corner[0] + 2,
            y=corner[1] + 2,
            width=cell - 4,
            height=cell - 4,
            fill="none",
            stroke=INK,
            stroke_width=2,
        )


def _ceilings(svg: Svg, summary: Mapping[str, Any], *, at: tuple[float, float], width: float) -> None:
    known = [value for value in summary.values() if value is not None]
    low = min(0.0, math.floor(min(known, default=0.0) * 5) / 5)
    x = _scale(low, 1.0, at[0], at[0] + width)
    for step in range(round((1 - low) * 5) + 1):
        value = low + step / 5
        svg.line((x(value), at[1] - 14), (x(value), at[1] + 46), stroke=FAINT)
        svg.text((x(value), at[1] + 62), number(value, 1), anchor="middle", font_size=12, fill=GREY)
    for place, protocol in enumerate(("direct", "prepared")):
        y = at[1] + 32 * place
        svg.text((at[0] - 10, y + 4.5), protocol, anchor="end")
        svg.line((x(low), y), (x(1.0), y), stroke=FAINT)
        whole, half, ceiling = (summary[f"{kind}{protocol}"] for kind in ("", "half_", "ceiling_"))
        if ceiling is not None:
            svg.add(
                "rect", x=x(ceiling) - 2, y=y - 11, width=4, height=22, fill=INK, title=f"ceiling {number(ceiling)}"
            )
        if half is not None:
            svg.add(
                "circle",
                cx=x(half),
                cy=y,
                r=6,
                fill="#ffffff",
                stroke=DARK,
                stroke_width=2,
                title=f"agreement of halves {number(half)}",
            )
        if whole is not None:
            svg.add("circle", cx=x(whole), cy=y, r=4, fill=DARK, title=f"agreement {number(whole)}")


def _shade(value: float | None) -> str:
    """White at 0 and below, dark blue at 1; grey where undefined."""
    if value is None:
        return "#eeeeee"
    share = min(1.0, max(0.0, value))
    white, dark = (255, 255, 255), (20, 55, 94)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(white, dark, strict=True))


def _label_width(rows: Sequence[Mapping[str, Any]]) -> float:
    return min(240.0, max((extent(plain(row["entrant"])) for row in rows), default=0.0) + 6)


def _ticks(count: int) -> list[int]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000, 10**9) if count / step <= 20)
    return [tick for tick in range(1, count + 1) if tick == 1 or tick % step == 0]


def _scale(low: float, high: float, start: float, end: float) -> Any:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _diamond(x: float, y: float, r: float) -> str:
    return f"M{_n(x)} {_n(y - r)}L{_n(x + r)} {_n(y)}L{_n(x)} {_n(y + r)}L{_n(x - r)} {_n(y)}Z"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
