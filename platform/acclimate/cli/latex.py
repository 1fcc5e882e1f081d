r"""A ranking as a LaTeX table, for a paper: `acclimate rank … --latex`. It needs the package booktabs, and a LaTeX that reads UTF-8, as all do since 2018.

Names are of strangers: every character that LaTeX takes for something else is escaped, pairs that its fonts join (--, ``) are kept apart, and what is
not printable is an escape, so that no line of a comment ends early.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from acclimate.cli.analysis_texts import aligned
from acclimate.cli.output import plain

_ESCAPED = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "'": r"\textquotesingle{}", "`": r"\textasciigrave{}", '"': r"\char34{}",
}  # fmt: skip
_JOINED = re.compile(r"(?<=[-?!,])(?=[-?!,])")
_NONE = "--"


def text(words: str) -> str:
    """Words as LaTeX prints them."""
    apart = _JOINED.sub("\0", plain(words))
    return "".join("{}" if c == "\0" else _ESCAPED.get(c, c) for c in apart)


def ranking(found: Mapping[str, Any]) -> Iterator[str]:
    """The result of rank as a tabular of booktabs: rank, its interval, entrant, score and standard error; notes are comments."""
    level = f"{100 * found['level']:.6g}"
    casp = found.get("method") == "casp"
    yield r"% \usepackage{booktabs}"
    for note in found["notes"]:
        yield f"% {plain(note)}"
    kind = "each by itself" if found["sets"] == "marginal" else "all together"
    yield f"% Intervals hold {kind} with probability {found['level']:.6g}."
    yield r"\begin{tabular}{rclrr}"
    yield r"\toprule"
    score = "Sum of z-scores" if casp else "Score"
    yield rf"Rank & {level}\,\% interval & Entrant & {score} & SE \\"
    yield r"\midrule"
    for row in found["ranking"]:
        low, high = row["rank_low"], row["rank_high"]
        span = str(low) if low == high else f"{low}--{high}"
        value, error = (_number(cell) for cell in aligned(row["score"], row["se"]))
        yield rf"{row['rank']} & {span} & {text(row['entrant'])} & {value} & {error} \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _number(cell: str) -> str:
    """A number with a minus sign, not a hyphen."""
    return _NONE if cell == "–" else cell.replace("-", "$-$")
