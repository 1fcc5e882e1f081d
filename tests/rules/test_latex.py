"""`acclimate rank --latex`: a table that LaTeX reads back as what it was made of. No LaTeX is at hand, so a small reader of its rules stands for it."""

import re
from pathlib import Path

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from acclimate.cli import latex
from acclimate.cli.main import app
from acclimate.cli.output import plain

COMMANDS = {
    r"\textbackslash": "\\", r"\textasciicircum": "^", r"\textasciitilde": "~", r"\textless": "<", r"\textgreater": ">",
    r"\textbar": "|", r"\textquotesingle": "'", r"\textasciigrave": "`", r"\char34": '"',
}  # fmt: skip
JOINED = re.compile(r"--|``|''|,,|\?`|!`|<<|>>")


def typeset(source: str) -> str:
    """What LaTeX prints for the text of a cell; fails on whatever it would take for a command, a cell's end, or join."""
    printed, rest, before = "", source, ""
    while rest:
        if found := re.match(r"(\\(?:char34|[a-zA-Z]+))\{\}", rest):
            letter, rest, before = COMMANDS[found[1]], rest[found.end() :], ""
        elif rest.startswith("{}"):
            letter, rest, before = "", rest[2:], ""
        elif found := re.match(r"\\([{}$&#%_])", rest):
            letter, rest, before = found[1], rest[2:], ""
        else:
            letter, rest = rest[0], rest[1:]
            assert letter not in "\\{}$&#%_^~<>|\"'`\n\r\t", f"{letter!r} in {source!r}"
            assert not JOINED.search(before + letter), f"joined: {source!r}"
            before = letter
        printed += letter
    return printed


@pytest.mark.parametrize("letter", list("\\{}$&#%_^~<>|\"'`-?!,@*[]()+=/:;."))
def test_each_special_character_prints_as_itself(letter: str) -> None:
    for words in (letter, letter * 2, letter * 3, f"a{letter}b", f"{letter}1", f"{letter} x", f"x {letter}"):
        assert typeset(latex.text(words)) == words


@pytest.mark.parametrize(
    "words", ["?`", "!`", ",,", "--", "---", "''", "``", "a_b%c", "50 % & more", "\\input{x}", "$x^2$", "Ærø 蒙古"]
)
def test_words_print_as_they_are(words: str) -> None:
    assert typeset(latex.text(words)) == words


@given(st.text(max_size=12))
def test_whatever_a_name_is_it_prints_as_the_terminal_shows_it(words: str) -> None:
    assert typeset(latex.text(words)) == plain(words)


def scores(folder: Path) -> Path:
    path = folder / "a 100% & b_c.csv"
    names = ["R&D_50%", "a\\b{c}", "x--y"]
    pandas.DataFrame({"name": names, "score": [0.9, -0.25, 0.1], "se": [0.01, 0.02, 0.3]}).to_csv(path, index=False)
    return path


def test_the_table_has_each_row_with_rank_interval_score_and_error(tmp_path: Path) -> None:
    words = ["rank", "--scores", str(scores(tmp_path)), "--score", "score", "--se", "se"]
    done = CliRunner().invoke(app, [*words, "--latex"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    table = [line for line in lines if not line.startswith("%")]
    assert table[:4] == [
        r"\begin{tabular}{rclrr}",
        r"\toprule",
        r"Rank & 95\,\% interval & Entrant & Score & SE \\",
        r"\midrule",
    ]
    assert table[4:7] == [
        r"1 & 1 & R\&D\_50\% & 0.900 & 0.010 \\",
        r"2 & 2--3 & x-{}-y & 0.10 & 0.30 \\",
        r"3 & 2--3 & a\textbackslash{}b\{c\} & $-$0.250 & 0.020 \\",
    ]
    assert table[7:] == [r"\bottomrule", r"\end{tabular}"]
    assert r"% \usepackage{booktabs}" in lines
    assert "% errors are taken as independent: a table of scores does not tell otherwise" in lines
    assert "% Intervals hold each by itself with probability 0.95." in lines


def test_casp_and_unknown_errors_have_a_table_too(tmp_path: Path) -> None:
    table = tmp_path / "casp.csv"
    pandas.DataFrame({"group": ["a", "b"], "t1": [1.0, 2.0]}).to_csv(table, index=False)
    done = CliRunner().invoke(app, ["rank", "--method", "casp", "--scores", str(table), "--latex"])
    assert done.exit_code == 0, done.output
    assert r"& Sum of z-scores & SE \\" in done.stdout
    assert re.search(r"^1 & 1--2 & b & 1\.0+ & -- \\\\$", done.stdout, re.M), done.stdout


def test_both_forms_at_once_are_refused(tmp_path: Path) -> None:
    words = ["rank", "--scores", str(scores(tmp_path)), "--score", "score", "--se", "se"]
    assert CliRunner().invoke(app, [*words, "--latex", "--json"]).exit_code == 2
