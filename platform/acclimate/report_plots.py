"""More plots of the report, by the same rules as plots.py: significance map, podium, effect of preparation, scores by round."""

from collections.abc import Mapping, Sequence

from acclimate.plots import BAR, DARK, EDGE, FAINT, GREY, INK, Svg, extent, number, plain

_DASHES = ("none", "7 4", "2 3", "10 3 2 3")


def _label(names: Sequence[str]) -> float:
    return max(70.0, min(220.0, max((extent(plain(name)) for name in names), default=0.0) + 8))


def _short(places: int) -> float:
    return max(20.0, min(34.0, 640.0 / max(1, places)))


def significance(names: Sequence[str], adjusted: Sequence[Sequence[float | None]], *, level: float) -> str:
    """Who is better than whom: a filled square where the row's entrant is better by Holm's adjusted p, else a dot.

    Args:
        names: by rank.
        adjusted: [m][m], p of row and column, signed by who is better: negative where the column's entrant is.
        level: p at or below it is significant.
    """
    cell, label = _short(len(names)), _label(names)
    left, top = label + 44, 48.0
    side = cell * len(names)
    svg = Svg(max(left + side + 16, 680.0), top + side + 52, title="Pairs of entrants that differ significantly")
    for place, name in enumerate(names):
        y = top + cell * (place + 0.5)
        svg.text((26, y + 4.5), str(place + 1), anchor="end", fill=GREY)
        svg.name((36, y + 4.5), name, width=label)
        svg.text((left + cell * (place + 0.5), top - 10), str(place + 1), anchor="middle", fill=GREY, font_size=12)
        for column in range(len(names)):
            _square(svg, names, adjusted, at=(place, column), cell=cell, corner=(left, top), level=level)
    y = top + side + 30
    svg.add("rect", x=36, y=y - 11, width=13, height=13, fill=DARK)
    svg.text((56, y), f"the row's entrant is better (p ≤ {level:g})", font_size=12, fill=GREY)
    svg.add("circle", cx=302, cy=y - 4, r=2.4, fill=GREY)
    svg.text((312, y), "not told apart; columns are numbered as rows", font_size=12, fill=GREY)
    return svg.document()


def _square(
    svg: Svg,
    names: Sequence[str],
    adjusted: Sequence[Sequence[float | None]],
    *,
    at: tuple[int, int],
    cell: float,
    corner: tuple[float, float],
    level: float,
) -> None:
    row, column = at
    x, y = corner[0] + cell * column, corner[1] + cell * row
    p = adjusted[row][column]
    sure = p is not None and 0 <= p <= level and row != column
    told = (
        ""
        if row == column
        else f"{plain(names[row])}, {plain(names[column])}: p {number(None if p is None else abs(p), 4)}"
    )
    fill = FAINT if row == column else DARK if sure else "#ffffff"
    svg.add("rect", x=x + 1, y=y + 1, width=cell - 2, height=cell - 2, fill=fill, stroke=FAINT, title=told)
    if row != column and not sure and p is not None:
        svg.add("circle", cx=x + cell / 2, cy=y + cell / 2, r=2.2, fill=GREY)


def podium(names: Sequence[str], shares: Sequence[Sequence[float]]) -> str:
    """How often each entrant has each rank: the area of a disc is the share of bootstrap samples.

    Args:
        names: by rank.
        shares: [m][ranks].
    """
    cell, label = _short(len(names)), _label(names)
    ranks = max((len(row) for row in shares), default=1)
    left, top = label + 24, 56.0
    svg = Svg(
        max(left + cell * ranks + 20, 560.0),
        top + cell * len(names) + 46,
        title="Ranks in bootstrap samples of the examples",
    )
    svg.text((left + cell * ranks / 2, 18), "rank", anchor="middle", fill=GREY, font_size=12)
    for rank in range(ranks):
        x = left + cell * (rank + 0.5)
        svg.line((x, top - 6), (x, top + cell * len(names)), stroke=FAINT)
        svg.text((x, top - 14), str(rank + 1), anchor="middle", fill=GREY, font_size=12)
    for place, name in enumerate(names):
        y = top + cell * (place + 0.5)
        svg.name((12, y + 4.5), name, width=label)
        for rank, share in enumerate(shares[place]):
            if share > 0:
                told = f"{plain(name)}: rank {rank + 1} in {share:.1%}"
                radius = max(1.2, (cell / 2 - 1.5) * share**0.5)
                svg.add("circle", cx=left + cell * (rank + 0.5), cy=y, r=radius, fill=BAR, stroke=DARK, title=told)
    svg.text(
        (12, top + cell * len(names) + 28),
        "the disc's area is the share of samples in which the entrant has the rank",
        font_size=12,
        fill=GREY,
    )
    return svg.document()


def components(effects: Mapping[str, tuple[float | None, float | None]]) -> str:
    """Share of the first component under each protocol as a bar, with its permutation null as an upright line."""
    svg = Svg(640, 60 + 44 * len(effects) + 60, title="Share of the first principal component, beside chance")
    left, width = 110.0, 440.0
    bottom = 34 + 44 * len(effects)
    for step in range(6):
        x = left + width * step / 5
        svg.line((x, 30), (x, bottom), stroke=FAINT)
        svg.text((x, bottom + 18), f"{step / 5:.1f}", anchor="middle", fill=GREY, font_size=12)
    for place, (name, (share, null)) in enumerate(effects.items()):
        y = 56.0 + 44 * place
        svg.text((left - 12, y + 4.5), name, anchor="end")
        if share is not None:
            svg.add("rect", x=left, y=y - 9, width=width * share, height=18, fill=BAR, stroke=EDGE, title=number(share))
            svg.text((left + width + 14, y + 4.5), number(share))
        if null is not None:
            x = left + width * null
            svg.line((x, y - 14), (x, y + 14), stroke=INK, stroke_width=3)
    svg.add("rect", x=left, y=bottom + 32, width=26, height=12, fill=BAR, stroke=EDGE)
    svg.text((left + 34, bottom + 42), "share of the first component", font_size=12, fill=GREY)
    svg.line((left + 224, bottom + 30), (left + 224, bottom + 46), stroke=INK, stroke_width=3)
    svg.text((left + 234, bottom + 42), "the same by chance (columns permuted)", font_size=12, fill=GREY)
    return svg.document()


def by_round(rounds: Sequence[str], lines: Mapping[str, Sequence[tuple[float, float | None] | None]]) -> str:
    """Each entrant's score with its standard error, round by round.

    Args:
        rounds: in their order.
        lines: entrant -> (score, standard error) by round, None where it did not take part.
    """
    known = [point for points in lines.values() for point in points if point is not None]
    reach = [(score - (se or 0.0), score + (se or 0.0)) for score, se in known] or [(0.0, 1.0)]
    low, high = min(a for a, _ in reach), max(b for _, b in reach)
    low, high = (low - 0.5, high + 0.5) if high <= low else (low, high)
    label, left, top, height = _label(list(lines)), 92.0, 30.0, 330.0
    plot = max(420.0, 110.0 * (len(rounds) - 1))
    svg = Svg(left + plot + label + 80, top + max(height, 20.0 * len(lines)) + 56, title="Scores by round")
    step = plot / max(1, len(rounds) - 1)

    def y(value: float) -> float:
        return top + height * (1 - (value - low) / (high - low))

    for tick in range(5):
        value = low + (high - low) * tick / 4
        svg.line((left - 24, y(value)), (left + plot, y(value)), stroke=FAINT)
        svg.text((left - 30, y(value) + 4.5), number(value), anchor="end", fill=GREY, font_size=12)
    for place, name in enumerate(rounds):
        svg.name(
            (left + step * place, top + height + 24), name, width=max(60.0, step - 8), anchor="middle", font_size=12
        )
    ends = []
    for number_, (name, points) in enumerate(lines.items()):
        before = None
        nudge = (number_ - (len(lines) - 1) / 2) * 2.0
        for place, point in enumerate(points):
            here = None if point is None else (left + step * place + nudge, y(point[0]))
            if here is not None and point is not None:
                if before is not None:
                    svg.line(before, here, stroke=DARK, stroke_width=1.4, stroke_dasharray=_DASHES[number_ % 4])
                error = point[1] or 0.0
                svg.line((here[0], y(point[0] - error)), (here[0], y(point[0] + error)), stroke=GREY)
                told = f"{plain(name)}, {plain(rounds[place])}: {number(point[0])}"
                svg.add(
                    "circle",
                    cx=here[0],
                    cy=here[1],
                    r=3.6,
                    fill=DARK if number_ % 2 else "#ffffff",
                    stroke=DARK,
                    title=told,
                )
            before = here
        last = next((point for point in reversed(points) if point is not None), None)
        if last is not None:
            ends.append((y(last[0]), name, before))
    _names_apart(svg, sorted(ends, key=lambda end: end[0]), x=left + plot + 30, width=label)
    return svg.document()


def _names_apart(
    svg: Svg, ends: Sequence[tuple[float, str, tuple[float, float] | None]], *, x: float, width: float
) -> None:
    """Names beside the ends of their lines, moved down where they would overlap, joined to them by a thin line."""
    lowest = 0.0
    for at, name, end in ends:
        lowest = max(at, lowest + 18)
        if end is not None:
            svg.line((end[0] + 6, end[1]), (x - 4, lowest), stroke=GREY, stroke_width=0.6)
        svg.name((x, lowest + 4.5), name, width=width)
