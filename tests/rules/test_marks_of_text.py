"""Text files as editors on Windows save them: with a mark (BOM) before UTF-8 they are read, in UTF-16 refused by that name."""

import codecs
from pathlib import Path

import pytest

from acclimate import config, harness_files, keys, score_tables
from acclimate.cli import options
from acclimate.client import receipts
from acclimate_competitions import definition, digests, reading, splits
from acclimate_competitions.errors import Refusal

MARK = codecs.BOM_UTF8
RAW = (definition.shipped("digits") / "competition.toml").read_bytes()
OTHERS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32")


def test_a_definition_reads_as_without_the_mark_and_its_digest_is_of_all_bytes() -> None:
    plain, marked = definition.parse(RAW), definition.parse(MARK + RAW.replace(b"\n", b"\r\n"))
    assert (marked.slug, marked.tasks, marked.ranking) == (plain.slug, plain.tasks, plain.ranking)
    assert marked.digest == digests.of_bytes(marked.raw) != plain.digest and marked.raw.startswith(MARK)
    with pytest.raises(Refusal) as caught:
        definition.parse(MARK + b"schema = 1\nslug = 3\n")
    assert any(problem.startswith("line 2: slug") for problem in caught.value.problems)


@pytest.mark.parametrize("encoding", OTHERS)
def test_a_definition_in_another_encoding_is_refused_by_its_name(encoding: str) -> None:
    with pytest.raises(Refusal) as caught:
        definition.parse(RAW.decode("utf-8").encode(encoding))
    assert caught.value.code == "definition_invalid"
    assert encoding[:6].upper() in caught.value.problems[0] and "save it as UTF-8" in caught.value.problems[0]


def test_settings_are_read_with_the_mark_and_refused_in_another_encoding(tmp_path: Path) -> None:
    file = tmp_path / "acclimate.toml"
    file.write_bytes(MARK + b"port = 9000\r\n")
    assert config.load(tmp_path, file=file, environ={}).port == 9000
    assert config.load(tmp_path, file=file, environ={}).origins["port"].endswith("line 1")
    file.write_text("port = 9000\n", "utf-16")
    with pytest.raises(Refusal) as caught:
        config.load(tmp_path, file=file, environ={})
    assert "UTF-16" in caught.value.problems[0] and str(file) in caught.value.problems[0]


def test_keys_are_read_with_the_mark(tmp_path: Path) -> None:
    made = keys.create(tmp_path / "cara", age=True)
    for name in (keys.ED25519_FILE, keys.AGE_FILE):
        path = made.folder / name
        path.write_bytes(MARK + path.read_bytes().replace(b"\n", b"\r\n"))
    found = keys.load(made.folder)
    assert found.age_identity == made.age_identity and found.public == made.public
    (made.folder / keys.AGE_FILE).write_text(str(made.age_identity), "utf-16")
    with pytest.raises(Refusal, match="is not an age key file"):
        keys.load(made.folder)
    vkey = tmp_path / "log.vkey"
    vkey.write_bytes(MARK + b"log.example.org+12712b8f+AAAA\r\n")
    assert options.read_key(str(vkey)) == "log.example.org+12712b8f+AAAA"
    vkey.write_text("log.example.org+12712b8f+AAAA", "utf-16")
    with pytest.raises(Refusal, match="UTF-16"):
        options.read_key(str(vkey))


def test_documents_are_read_with_the_mark_and_refused_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_bytes(MARK + b'{"a": 1}')
    assert reading.document(path) == {"a": 1}
    path.write_text('{"a": 1}', "utf-16")
    with pytest.raises(Refusal, match="UTF-16, not UTF-8: save it as UTF-8") as caught:
        reading.document(path)
    assert caught.value.code == "file_unreadable"


def test_what_programs_wrote_is_read_with_the_mark(tmp_path: Path) -> None:
    table = tmp_path / "scores.csv"
    table.write_bytes(MARK + b"entrant,task\r\na,0.5\r\n")
    assert "entrant" in score_tables.read(table).cells
    task = tmp_path / "task.yaml"
    task.write_bytes(MARK + b"task: one\n")
    assert harness_files.load(task) == {"task": "one"}
    table.write_text("entrant,task\na,0.5\n", "utf-16")
    with pytest.raises(Refusal, match="no text in UTF-8"):
        score_tables.read(table)


def test_a_receipt_is_read_with_the_mark(tmp_path: Path) -> None:
    path, said = tmp_path / "one.tlog-proof", []
    for mark in (b"", MARK):
        path.write_bytes(mark + b"c2sp.org/tlog-proof@v1\nextra ?\nindex 1\n\nnote\n")
        with pytest.raises(Refusal) as caught:
            receipts.read(path)
        said.append(caught.value.sentence)
    assert said[0] == said[1] and "must begin" not in said[0]


def test_a_tokenizer_that_its_library_would_not_read_is_refused_before_a_round_has_it(tmp_path: Path) -> None:
    competition = definition.parse(RAW)
    for task in competition.tasks:
        (tmp_path / "splits" / task.name).mkdir(parents=True)
    for data in (MARK + b"{}", "{}".encode("utf-16")):
        (tmp_path / "tokenizer.json").write_bytes(data)
        with pytest.raises(Refusal) as caught:
            splits.check(tmp_path, competition)
        assert any(problem.startswith("tokenizer.json: ") for problem in caught.value.problems)
