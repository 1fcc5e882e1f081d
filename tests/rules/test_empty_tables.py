"""A file of scores of nobody, and tables of which nothing is left: no command ranks nothing and calls it a result."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from acclimate.cli.main import app
from acclimate_competitions.errors import Refusal

ITEMS = "entrant,task,example,metric,protocol,score\n"
LONG = ITEMS + "x,a,1,acc,direct,1\nx,b,1,acc,prepared,1\n"


def command(*words):
    done = CliRunner().invoke(app, words)
    if isinstance(done.exception, Refusal):
        return 1, f"{done.exception.code}: {done.exception.sentence} ({done.exception.hint})"
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(
    "words",
    [
        "rank --items items",
        "rank --items items --ways",
        "rank --items predictions --metric accuracy",
        "rank --scores means --score s --se e",
        "rank --scores means --method casp",
        "compare --items items",
        "compare --scores means",
        "stability --items items",
        "stability --scores t=means",
        "stability --scores t=means --scores u=means",
        "report items -o r.html",
        "export --items items --out o",
        "rank --items good --items items",
    ],
)
def test_a_file_with_a_header_only_is_refused_by_every_command(words, form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "means": "m,s,e\n",
        "items": ITEMS,
        "predictions": "entrant,example,target,prediction\n",
        "good": LONG,
    }.items():
        if form == "csv":
            Path(name).write_text(text)
        else:
            head, *rows = (line.split(",") for line in text.splitlines())
            pq.write_table(pa.table({one: [row[place] for row in rows] for place, one in enumerate(head)}), name)
    code, output = command(*words.split())
    assert code == 1, output
    assert "has no rows" in output
    assert "scores_invalid" in output
    assert "was it written to its end?" in output
    assert not Path("o").exists()
    assert not Path("r.html").exists()


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        ("rank --items t --tasks a --protocol prepared", LONG, "no row is of --protocol prepared and --tasks a"),
        ("rank --items t --missing exclude", "entrant,example,score\nx,1,\n", "nobody has a score in every set"),
        ("stability --items t --missing exclude", "entrant,example,score\nx,1,\n", "nobody has a score in every set"),
        ("report t -o r.html", "entrant,example,score\nx,1,\n", "nobody has a score in every set"),
        ("rank --scores t --score s --se e --missing exclude", "m,s,e\nx,1,\n", "nobody has both a score and a se"),
        ("compare --scores t --missing exclude", "m,a,b\nx,1,\n", "no entrant has a score in every task"),
        ("stability --scores t=t --missing exclude", "m,a,b\nx,1,\n", "no model has a score in every task"),
        ("stability --scores t=t --models q*", "m,a,b\nx,1,2\n", "no model matches 'q*'"),
        ("stability --scores t=t --scores u=u --common", "m,a,b\nx,1,2\n", "have no model in common"),
        ("stability --scores t=t --scores v=v --common", "m,a,b\nx,1,2\n", "have no task in common"),
    ],
)
def test_where_nobody_is_left_the_command_refuses(words, text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t").write_text(text)
    Path("u").write_text("m,a,b\nz,1,2\n")
    Path("v").write_text("m,c,d\nx,1,2\n")
    code, output = command(*words.split())
    assert code == 1, output
    assert says in output
    assert "scores_invalid" in output
