"""`acclimate report`: pages from bundles and tables, in a real browser, and their numbers."""

import dataclasses
import html
import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest
import rounds_made
from typer.testing import CliRunner
from waiting import WITHIN

from acclimate import report_data, report_page
from acclimate.cli.main import app
from acclimate_competitions import ways

SECTIONS = ["ranks", "slope", "agreement", "significance", "podium", "ways", "preparation"]
HOSTILE = (
    "ann",
    "東京モデル",
    "\u202eevil",
    '<script>alert("x")</script>',
    "זהב",
    "a" * 200,
    "=cmd|' /C calc'!A0",
    "b&b",
)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")


def rows_of(names, *, tasks=2, rounds=("r1",), protocols=("direct", "prepared"), examples=25, flat=False):
    random = np.random.default_rng(5)
    rows = []
    for round_, (place, name), task, protocol in itertools.product(rounds, enumerate(names), range(tasks), protocols):
        for seed, item in itertools.product([None] if protocol == "direct" else [1, 2], range(examples)):
            hit = 1.0 if flat else float(random.random() < 0.4 + 0.5 * place / len(names))
            rows.append(
                {"round": round_, "entrant": name, "protocol": protocol, "task": f"t{task}", "seed": seed, "example": f"x{item}", "score": hit}
            )  # fmt: skip
    return pa.Table.from_pylist(rows)


def made(table, **options):
    return report_page.make(report_data.read(table, options=options))


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.cells, self.texts = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.cells.append(data)


@pytest.fixture(scope="module")
def hostile():
    return made(rows_of(HOSTILE, rounds=("r1", '<b>"r2"')))


def test_a_page_stands_alone_and_no_name_does_harm(hostile):
    page = Page(hostile[0])
    assert not {"script", "link", "img", "iframe", "object", "base", "form", "b"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "xlink:href")]
    assert {value[0] for name, value in page.attributes if name == "href"} == {"#"}
    addresses = re.findall(r"https?://[^\s\"'<]+", hostile[0])
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # the name of a namespace
    assert "url(" not in hostile[0] and "@import" not in hostile[0] and "\u202e" not in hostile[0]
    text = "".join(page.texts)
    assert '<script>alert("x")</script>' in text and "東京モデル" in text and "\\u202eevil" in text


def test_every_plot_has_a_title_a_description_a_sentence_and_its_table(hostile):
    sections = re.findall(r"<section>.*?</section>", hostile[0], re.S)
    assert len(sections) == 2 * len(SECTIONS) + 1
    for section in sections:
        assert "<p class='says'>" in section and "<figure>" in section and "<table>" in section
        root = ET.fromstring(re.search(r"<figure>(.*?)</figure>", section, re.S)[1])
        assert root.get("role") == "img"
        labelled, described = root.get("aria-labelledby"), root.get("aria-describedby")
        assert {labelled, described} <= {element.get("id") for element in root.iter()}
    ids = [value for name, value in Page(hostile[0]).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_tables_have_the_numbers_of_the_json_and_the_plots_those_of_the_tables(hostile):
    page, document = hostile
    cells = set(Page(page).cells)
    json.dumps(document, allow_nan=False)
    for one in document["rounds"]:
        assert list(one["sections"]) == SECTIONS
        found = {key: section["numbers"] for key, section in one["sections"].items()}
        for row in found["ranks"]["ranking"]:
            assert {f"{row['rank_low']}–{row['rank_high']}", f"{row['score']:.4f}", f"{row['se']:.4f}"} <= cells
        for row in found["significance"]["pairs"]:
            assert f"{row['p_holm']:.4f}" in cells
        for effect in found["agreement"]["effects"].values():
            for line in effect["pairs"]:
                assert {f"{value:.3f}".replace("-", "−") for value in line} <= cells
        for name, shares in found["podium"]["ranks"].items():
            assert sum(shares) == pytest.approx(1)
            assert f"{shares[0]:.1%}" in cells, name
            if name.isascii() and name.isalnum() and len(name) < 20:
                for rank, share in enumerate(shares, 1):
                    assert (f"{name}: rank {rank} in {share:.1%}" in page) or share == 0
    assert document["across"]["rounds"]["numbers"]["agreement"][0]["entrants"] == len(HOSTILE)


def test_what_the_data_cannot_carry_is_said():
    _, document = made(rows_of(["ann", "bob", "cy"], tasks=1))
    sections = document["rounds"][0]["sections"]
    assert any("not informative: 3 entrants" in one for one in sections["preparation"]["caveats"])
    assert any("one task" in one for one in sections["ranks"]["caveats"])
    assert "one task" in sections["agreement"]["sentence"]
    _, document = made(rows_of(["ann", "bob"], protocols=("prepared",)))
    assert "one protocol" in document["rounds"][0]["sections"]["preparation"]["sentence"]
    assert document["rounds"][0]["sections"]["agreement"]["sentence"].startswith(
        "How far tasks agree: prepared, mean tau-b"
    )
    assert "both protocols" in document["rounds"][0]["sections"]["slope"]["sentence"]


@pytest.mark.parametrize(
    ("count", "tasks", "flat"),
    [(1, 1, False), (1, 2, False), (4, 2, True), pytest.param(100, 1, False, marks=pytest.mark.slow)],
)
def test_one_entrant_one_task_ties_and_a_hundred_make_a_page(count, tasks, flat):
    page, document = made(rows_of([f"e{place}" for place in range(count)], tasks=tasks, flat=flat, examples=8))
    Page(page)
    json.dumps(document, allow_nan=False)
    sections = document["rounds"][0]["sections"]
    assert len(sections["ranks"]["numbers"]["ranking"]) == count
    if flat:
        assert {row["rank"] for row in sections["ranks"]["numbers"]["ranking"]} == {1}
        assert not any(row["significant"] for row in sections["significance"]["numbers"]["pairs"])


def test_missing_scores_are_left_out_and_said():
    rows = rows_of(["ann", "bob", "cy"]).to_pylist()
    gap = [row for row in rows if not (row["entrant"] == "bob" and row["protocol"] == "prepared" and row["example"] == "x3")]  # fmt: skip
    page, document = made(pa.Table.from_pylist(gap))
    Page(page)
    caveats = document["rounds"][0]["sections"]["ranks"]["caveats"]
    assert any("missing" in one and "bob" in one for one in caveats)


def test_of_a_private_holdout_the_published_ranking_is_shown_and_the_rest_said():
    (found,) = report_data.read(rows_of(["ann", "bob"]), options={})
    private = dataclasses.replace(found, items={}, private=True)
    page, document = report_page.make([private])
    Page(page)
    assert list(document["rounds"][0]["sections"]) == ["ranks", "slope"]
    assert any("private" in one for one in document["rounds"][0]["sections"]["ranks"]["caveats"])


def test_lower_is_better_turns_the_order():
    table = rows_of(["ann", "bob", "cy"], examples=60)
    up, down = (made(table, **options)[1]["rounds"][0]["sections"] for options in ({}, {"lower_is_better": True}))
    assert up["ranks"]["numbers"]["ranking"][0]["entrant"] == down["ranks"]["numbers"]["ranking"][-1]["entrant"] == "cy"
    one, other = (
        max(part["podium"]["numbers"]["ranks"].items(), key=lambda item: item[1][0])[0] for part in (up, down)
    )
    assert (one, other) == ("cy", "ann")


def test_a_bundle_shows_its_published_ranking_and_a_notebook_runs(tmp_path, monkeypatch):
    fields = rounds_made.defined_fields
    monkeypatch.setattr(rounds_made, "defined_fields", lambda made: {**fields(made), "name": "autumn"})
    bundle = rounds_made.make(tmp_path / "round").write(tmp_path / "bundle")
    out, book = tmp_path / "report.html", tmp_path / "report.ipynb"
    done = CliRunner().invoke(
        app, ["report", str(bundle), "-o", str(out), "--notebook", str(book), "--json"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    # The definition, which several rounds may have, calls it otherwise.
    assert document["rounds"][0]["round"] == "autumn"
    published = json.loads((bundle / "ranking.json").read_text("utf-8"))
    assert document["rounds"][0]["sections"]["ranks"]["numbers"]["ranking"] == published["ranking"]
    Page(out.read_text("utf-8"))
    notebook = json.loads(book.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    monkeypatch.chdir(tmp_path)
    out.unlink()
    names = {}
    for cell in notebook["cells"]:
        assert set(cell) >= {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert json.loads(json.dumps(names["numbers"])) == document
    assert out.is_file()


def test_a_source_is_never_written_over_and_nothing_to_write_is_refused(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("entrant,example,score\nann,x,1\n", "utf-8")
    for words in (["-o", str(table)], []):
        assert CliRunner().invoke(app, ["report", str(table), *words]).exit_code == 1
    assert table.read_text("utf-8").startswith("entrant")


def test_the_ways_to_rank_stand_beside_each_other_and_what_agrees_by_necessity_is_said():
    names = ("ann", "bob", "cy", "dee", "eve")
    table = rows_of(names, tasks=1, protocols=("direct",), examples=40)
    section = made(table)[1]["rounds"][0]["sections"]["ways"]
    found = ways.ways(report_data.read(table, options={})[0].main)
    for way, ranks in section["numbers"]["ranks"].items():
        assert ranks == dict(zip(names, found.ranks[way], strict=True)), way
    # Right or wrong, one seed: three of the ways can only agree, whatever the scores are.
    ranks = section["numbers"]["ranks"]
    assert ranks["mean"] == ranks["mean_rank"] == ranks["bradley_terry"]
    assert any("shows nothing" in caveat for caveat in section["caveats"])
    graded = [{**row, "score": row["score"] + int(row["example"][1:]) / 100} for row in table.to_pylist()]
    told = made(pa.Table.from_pylist(graded))[1]["rounds"][0]["sections"]["ways"]
    assert not any("shows nothing" in caveat for caveat in told["caveats"])
    moved = max(max(row[name] for row in ranks.values()) - min(row[name] for row in ranks.values()) for name in names)
    assert (f"by {moved}." in section["sentence"]) if moved else section["sentence"].endswith("no rank moves.")


def test_a_way_that_is_undefined_is_left_out_and_named():
    rows = [
        {"entrant": name, "example": str(place), "score": grade}
        for name, grade in (("best", 1.0), ("mid", 0.5), ("low", 0.0))
        for place in range(30)
    ]
    page, document = made(pa.Table.from_pylist(rows))
    section = document["rounds"][0]["sections"]["ways"]
    assert "bradley_terry" not in section["numbers"]["ranks"]
    assert any(caveat.startswith("Bradley-Terry: undefined") for caveat in section["caveats"])
    assert section["sentence"].startswith("4 ways of ranking the same scores have the same first")
    assert "best: rank 1 by mean" in page


def chromium(tmp_path, *arguments):
    subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", *arguments],
        check=True, capture_output=True, timeout=WITHIN,
    )  # fmt: skip


@browser
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page_and_prints_it(hostile, tmp_path, dark):
    page = tmp_path / "report.html"
    page.write_text(hostile[0], "utf-8")
    picture, paper = tmp_path / "page.png", tmp_path / "page.pdf"
    shade = ["--blink-settings=preferredColorScheme=0"] if dark else []
    chromium(tmp_path, *shade, "--window-size=1000,3000", f"--screenshot={picture}", page.as_uri())
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 20_000
    chromium(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={paper}", page.as_uri())
    data = paper.read_bytes()
    assert data.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", data)) > 2


@browser
@pytest.mark.slow
def test_on_a_narrow_screen_names_and_plots_are_read(tmp_path):
    names = [
        f"{color}-{animal}" for color in ("amber", "blue", "dusky") for animal in ("fox", "whale", "heron", "otter")
    ]
    text, _ = made(rows_of(names, rounds=("2027-1", "2027-2")))
    # The page runs no script; the copy that is measured does.
    measured = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert measured != text
    script = """<script>document.title = JSON.stringify({
        names: Math.max(...[...document.querySelectorAll("td.name, th.name")].map(one => one.clientHeight)),
        plots: [...document.querySelectorAll("figure svg")].map(one => [one.clientWidth, +one.getAttribute("width")]),
        page: [document.documentElement.scrollWidth, window.innerWidth]})</script>"""
    page = tmp_path / "report.html"
    page.write_text(measured.replace("</body>", f"{script}</body>"), "utf-8")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=390,900", "--dump-dom", page.as_uri()],
        check=True, capture_output=True, timeout=WITHIN, text=True,
    )  # fmt: skip
    title = re.findall(r"<title>(.*?)</title>", done.stdout)[0]
    found = json.loads(html.unescape(title))
    # A name stands on two lines at most, and nothing but tables and plots is wider than the screen: these scroll by themselves.
    assert found["names"] <= 3 * 24, found
    assert found["page"][0] <= found["page"][1], found
    assert found["plots"] and all(shown >= min(wide, 600) for shown, wide in found["plots"]), found


A4, MARGIN = (595.3, 841.9), 14 / 25.4 * 72


@browser
@pytest.mark.slow
def test_on_paper_nothing_is_cut_off_and_no_figure_is_split(tmp_path):
    pdfium = pytest.importorskip("pypdfium2")
    names = [f"{color}-{animal}" for color in ("amber", "blue", "crimson", "dusky") for animal in ("fox", "whale", "heron", "otter", "lynx")]  # fmt: skip
    text, _ = made(rows_of([*names, "a-" + "very-" * 20 + "long-name"], tasks=6, rounds=("2027-1", "2027-2")))
    page, paper = tmp_path / "report.html", tmp_path / "page.pdf"
    page.write_text(text, "utf-8")
    chromium(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={paper}", page.as_uri())
    found = pdfium.PdfDocument(paper)
    # 2 × (7 figures with their tables, of which 190 pairs need four pages) and one across rounds.
    assert 20 <= len(found) <= 40
    words = []
    for sheet in found:
        assert sheet.get_size() == pytest.approx(A4, abs=1)
        for thing in sheet.get_objects():
            left, bottom, right, top = thing.get_pos() if hasattr(thing, "get_pos") else thing.get_bounds()
            # White behind everything may be as large as the sheet.
            if right - left < A4[0] - 1:
                assert left >= MARGIN - 2 and right <= A4[0] - MARGIN + 2, (left, right)
                assert bottom >= MARGIN - 2 and top <= A4[1] - MARGIN + 2, (bottom, top)
        reader = sheet.get_textpage()
        words.append(reader.get_text_bounded())
    # The browser shrinks a sheet on which something is too wide: capitals of the title would be lower than those of 21 pt.
    reader = found[0].get_textpage()
    boxes = [reader.get_charbox(place) for place in range(len("Stability report"))]
    assert max(top - bottom for _, bottom, _, top in boxes) > 0.66 * 21
    for figure in re.findall(r"<figure>(.*?)</figure>", text, re.S):
        labels = {label for label in re.findall(r"<text[^>]*>([a-z]+-[a-z]+)<", figure)}
        assert not labels or any(all(label in told for label in labels) for told in words), labels
