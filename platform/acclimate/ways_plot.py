"""The report's plot of the ways to rank, by the same rules as plots.py: told apart by shape and place, not by colour."""

from collections.abc import Mapping, Sequence

from acclimate.plots import BAR, DARK, EDGE, FAINT, GREY, Svg, extent, plain

_ROW, _APART = 36.0, 6.0
_PLACES = 22
"""Ranks that are numbered, at most."""


def ranks(names: Sequence[str], found: Mapping[str, Sequence[int]]) -> str:
    """Each entrant's rank in each way, and the bar from the best to the worst of them.

    Args:
        names: of the entrants.
        found: what a way is called, and after a colon what it is -> a rank for each name; five ways at most.
    """
    label = max(70.0, min(220.0, max((extent(plain(name)) for name in names), default=0.0) + 8))
    m = max((rank for row in found.values() for rank in row), default=1)
    cell = max(14.0, min(44.0, 640.0 / m))
    left, top = label + 30, 54.0
    bottom = top + _ROW * len(names)
    height = bottom + 30 + 22 * len(found)
    svg = Svg(max(left + cell * m + 20, 480.0), height, title="Rank of each entrant by the way of ranking")
    svg.text((left + cell * m / 2, 18), "rank", anchor="middle", fill=GREY, font_size=12)
    step = -(-m // _PLACES)
    for rank in range(1, m + 1):
        x = left + cell * (rank - 0.5)
        svg.line((x, top - 6), (x, bottom), stroke=FAINT)
        if rank == 1 or rank % step == 0:
            svg.text((x, top - 14), str(rank), anchor="middle", fill=GREY, font_size=12)
    for place, name in enumerate(names):
        y = top + _ROW * (place + 0.5)
        own = {way: row[place] for way, row in found.items()}
        svg.name((12, y + 4.5), name, width=label)
        low, high = left + cell * (min(own.values()) - 0.5) - 6, left + cell * (max(own.values()) - 0.5) + 6
        svg.add("rect", x=low, y=y - 16, width=high - low, height=32, rx=6, fill=BAR, stroke=EDGE)
        for number, (way, rank) in enumerate(own.items()):
            at = (left + cell * (rank - 0.5), y + _APART * (number - (len(own) - 1) / 2))
            _mark(svg, number, at, told=f"{plain(name)}: rank {rank} by {way.split(':')[0]}")
    for number, way in enumerate(found):
        y = bottom + 24 + 22 * number
        _mark(svg, number, (20, y - 4), told=way)
        svg.text((34, y), way, font_size=12, fill=GREY)
    return svg.document()


def _mark(svg: Svg, number: int, at: tuple[float, float], *, told: str) -> None:
    x, y = at
    if number == 0:
        svg.add("circle", cx=x, cy=y, r=2.8, fill=DARK, stroke=DARK, title=told)
    elif number == 1:
        svg.add("circle", cx=x, cy=y, r=2.8, fill="#ffffff", stroke=DARK, title=told)
    elif number == 2:
        svg.add("rect", x=x - 2.6, y=y - 2.6, width=5.2, height=5.2, fill="#ffffff", stroke=DARK, title=told)
    elif number == 3:
        shape = f"M{x} {y - 3.4}L{x + 3.6} {y + 2.6}L{x - 3.6} {y + 2.6}Z"
        svg.add("path", d=shape, fill="#ffffff", stroke=DARK, title=told)
    else:
        shape = f"M{x} {y - 3.6}L{x + 3.6} {y}L{x} {y + 3.6}L{x - 3.6} {y}Z"
        svg.add("path", d=shape, fill=DARK, stroke=DARK, title=told)
