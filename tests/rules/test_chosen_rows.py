"""Tables of scores with several protocols, metrics or tasks: one of each is chosen, never are they mixed without a word."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import acclimate
from acclimate.cli.main import app
from acclimate_competitions.errors import Refusal

# As `acclimate export` writes scores.csv.
HEADER = "entrant,set,score,se,n,missing,protocol"
BETTER = {
    "direct": {"ann": (0.9, 0.2), "bob": (0.5, 0.5), "cy": (0.1, 0.8)},
    "prepared": {"ann": (0.3, 0.4), "bob": (0.6, 0.6), "cy": (0.9, 0.9)},
}


def scores(*, header: str = HEADER, protocols: tuple[str, ...] = ("direct", "prepared")) -> str:
    rows = [
        f"{name},{task},{score},0.01,50,0,{protocol}"
        for protocol in protocols
        for name, own in BETTER[protocol].items()
        for task, score in zip(("digit", "prime"), own, strict=True)
    ]
    return "\n".join([header, *rows]) + "\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "scores.csv"
    path.write_text(scores())
    return path


def refusal(call: Any) -> Refusal:
    with pytest.raises(Refusal) as refused:
        call()
    assert refused.value.code == "scores_invalid"
    return refused.value


def test_a_protocol_is_chosen_of_a_table_of_scores(table: Path) -> None:
    for protocol, best in (("direct", "ann"), ("prepared", "cy")):
        ranked = acclimate.rank(table, score="score", se="se", protocol=protocol, tasks=["digit"])
        assert [row["entrant"] for row in ranked["ranking"]][0] == best
        assert [row["score"] for row in ranked["ranking"]][0] == 0.9
        assert f"{table}: 6 of 12 rows are of --protocol {protocol}" in ranked["notes"]
        assert f"{table}: 3 of 6 rows are of --tasks digit" in ranked["notes"]
        agreed = acclimate.stability({"t": table}, protocol=protocol)
        assert (agreed["t"]["models"], agreed["t"]["tasks"]) == (3, 2)
        assert agreed["t"]["mean_tau_b"] == {"direct": -1.0, "prepared": 1.0}[protocol]
        assert "t is a long table: 3 entrants in 2 tasks; not looked at: 'se', 'n', 'missing'" in agreed["notes"]
        compared = acclimate.compare(scores=table, protocol=protocol)
        assert (compared["entrants"], compared["tasks"]) == (3, 2)
    casp = acclimate.rank(table, method="casp", protocol="prepared")
    assert [row["entrant"] for row in casp["ranking"]] == ["cy", "bob", "ann"]


def test_two_protocols_are_never_mixed_and_the_hint_says_how_to_choose(table: Path) -> None:
    calls = (
        lambda: acclimate.rank(table, score="score", se="se", tasks=["digit"]),
        lambda: acclimate.rank(table, method="casp"),
        lambda: acclimate.stability({"t": table}),
        lambda: acclimate.compare(scores=table),
    )
    for call in calls:
        found = refusal(call)
        assert "mixes 2 protocols: 'direct', 'prepared'" in found.sentence
        assert "choose one with --protocol" in str(found.hint)
        assert "table-PROTOCOL" in str(found.hint)


def test_a_protocol_of_other_letters_or_of_other_entrants_is_one_too(tmp_path: Path) -> None:
    apart = "model,Protocol,score,se\nann,direct,0.9,0.1\nbob,prepared,0.5,0.1\n"
    path = tmp_path / "apart.csv"
    path.write_text(apart)
    assert "mixes 2 protocols" in refusal(lambda: acclimate.rank(path, score="score", se="se")).sentence
    chosen = acclimate.rank(path, score="score", se="se", protocol="direct")
    assert [row["entrant"] for row in chosen["ranking"]] == ["ann"]


def test_a_protocol_that_there_is_not_is_refused_with_those_that_there_are(table: Path, tmp_path: Path) -> None:
    found = refusal(lambda: acclimate.stability({"t": table}, protocol="adapted"))
    assert (found.sentence, found.hint) == ("t: no protocol 'adapted'", "there are 'direct', 'prepared'")
    plain = tmp_path / "plain.csv"
    plain.write_text("model,a,b\nx,1,2\ny,2,1\n")
    for call in (
        lambda: acclimate.stability({"t": plain}, protocol="direct"),
        lambda: acclimate.compare(scores=plain, protocol="direct"),
        lambda: acclimate.rank(plain, method="casp", protocol="direct"),
    ):
        assert "no column 'protocol'" in refusal(call).sentence


def test_a_metric_is_chosen_where_a_column_names_several(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("model,task,metric,score\nx,a,acc,1\ny,a,acc,0\nx,a,nll,0.4\ny,a,nll,0.3\nx,b,acc,1\ny,b,acc,0\n")
    assert "mixes 2 metrics" in refusal(lambda: acclimate.stability({"t": path})).sentence
    found = acclimate.stability({"t": path}, metric="acc")
    assert (found["t"]["models"], found["t"]["tasks"]) == (2, 2)


def test_a_column_of_numbers_that_is_called_metric_is_one_of_scores() -> None:
    table = pa.table({"model": ["x", "y"], "metric": [0.5, 0.25], "se": [0.01, 0.01]})
    found = acclimate.rank(table, score="metric", se="se")
    assert [row["score"] for row in found["ranking"]] == [0.5, 0.25]


def test_several_tasks_of_one_entrant_are_refused_and_of_several_said(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(scores(protocols=("prepared",)))
    found = refusal(lambda: acclimate.rank(path, score="score", se="se"))
    assert "has scores in 2 tasks: 'digit', 'prime'" in found.sentence
    assert "--tasks chooses one" in str(found.hint)
    unknown = refusal(lambda: acclimate.rank(path, score="score", se="se", tasks=["colour"]))
    assert (unknown.sentence, unknown.hint) == (f"{path}: no task 'colour'", "there are 'digit', 'prime'")
    apart = pa.table({"model": ["x", "y"], "dataset": ["a", "b"], "score": [0.5, 0.2], "se": [0.1, 0.1]})
    notes = acclimate.rank(apart, score="score", se="se")["notes"]
    assert "the table: rows are of 2 tasks, taken as one: 'a', 'b'; --tasks chooses" in notes
    bare = pa.table({"model": ["x", "y"], "score": [0.5, 0.2], "se": [0.1, 0.1]})
    assert "no column of tasks" in refusal(lambda: acclimate.rank(bare, score="score", se="se", tasks=["a"])).sentence


def test_who_names_no_column_of_scores_is_told_which_there_are(table: Path) -> None:
    found = refusal(lambda: acclimate.rank(table))
    assert found.sentence == "no column of score is named"
    assert "has the columns 'set', 'score', 'se', 'n', 'missing', 'protocol'" in str(found.hint)
    without = refusal(lambda: acclimate.rank(table, score="score"))
    assert "no column of se is named" in without.sentence
    assert "'missing'" in str(without.hint)


def test_the_commands_take_the_protocol(table: Path) -> None:
    for words in (
        ["rank", "--scores", table, "--score", "score", "--se", "se", "--tasks", "prime"],
        ["compare", "--scores", table],
        ["stability", "--scores", f"t={table}"],
    ):
        done = CliRunner().invoke(app, [*map(str, words), "--protocol", "prepared"])
        assert done.exit_code == 0, done.output
        assert "6 of 12 rows are of --protocol prepared" in done.output
