import copy
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest
from waiting import WITHIN

from acclimate import plots, report
from acclimate_competitions import ranking, stability, tables
from acclimate_competitions.definition import Interval, Policy, Task, Ties

NAMES = (
    "ann",
    "東京モデル",
    "\u202eevil",
    '<script>alert("x")</script>',
    "זהב",
    "a" * 200,
    "=cmd|' /C calc'!A0",
    "b&b",
)
TASKS = tuple(Task(name, "choice", "", ("a", "b"), "accuracy", 0.5) for name in ("digit", "<i>", "prime"))
POLICY = Policy(
    "mean", "worst", Ties("shared", 0.0), Interval("simultaneous", 0.95, 300, 1), None, ("majority", "untrained")
)
INFO = {
    "competition": "digits",
    "round": "digits-2027-1",
    "data_is_public": True,
    "licence": "CC-BY-4.0",
    "phases": [{"phase": "sealed", "at": "2027-03-01T00:00:00.000000Z"}],
    "recipe": {"epochs": 6},
}


def round_documents(names, *, tasks=TASKS, failed=()):
    random = np.random.default_rng(2)
    rows = []
    for place, entrant in enumerate([*names, "majority"]):
        for task in tasks:
            for seed in (None, 11, 12):
                if seed is not None and entrant in failed:
                    continue
                for item in range(40):
                    hit = float(random.random() < 0.5 + 0.05 * place)
                    protocol, example = "direct" if seed is None else "prepared", f"x{item}"
                    row = (entrant, protocol, task.name, seed, "accuracy", example, example, hit, None)
                    rows.append(dict(zip(tables.SCORES.names, row, strict=True)))
    scores = pa.Table.from_pylist(rows, schema=tables.SCORES)
    settings = {"tasks": tasks, "policy": POLICY, "entrants": names}
    return ranking.rank(scores, **settings).document(), stability.of_round(scores, **settings, draws=20).document()


@pytest.fixture(scope="module")
def documents():
    return round_documents(NAMES, failed=("b&b",))


class Page(HTMLParser):
    """Tags, attributes and text of a page, with a check that tags close in order."""

    VOID = frozenset({"meta", "br", "link"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def page_text(documents, tmp_path_factory):
    out = tmp_path_factory.mktemp("reports") / "deep" / "report.html"
    assert (
        report.write(out, title='Digits & <"letters">', ranking=documents[0], stability=documents[1], info=INFO) == out
    )
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    return out.read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_stands_alone(page_text):
    page = Page(page_text)
    assert page.tags.count("svg") == 3
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "xlink:href")]
    assert "url(" not in page_text
    assert "@import" not in page_text


def test_names_are_shown_and_do_no_harm(page_text):
    text = "".join(Page(page_text).texts)
    assert '<script>alert("x")</script>' in text
    assert "東京モデル" in text
    assert "זהב" in text
    assert "\\u202eevil" in text
    assert "\u202e" not in page_text
    assert "<i>" in text
    assert 'Digits & <"letters">' in text


def test_every_number_of_the_ranking_stands_in_a_table(page_text, documents):
    cells = set(Page(page_text).texts)
    for row in documents[0]["ranking"]:
        assert f"{row['rank_low']}–{row['rank_high']}" in cells
        assert row["score"] is None or f"{row['score']:.4f}" in cells
        assert f"{row['direct_score']:.4f}" in cells
    for effect in documents[1]["effects"].values():
        for line in effect["pairs"]:
            assert all(f"{value:.3f}".replace("-", "−") in cells for value in line)


def test_baselines_are_marked_as_unranked(page_text):
    assert page_text.count("class='baseline'") == 2
    assert page_text.count("baseline, unranked") == 2


@pytest.mark.parametrize(
    ("public", "said"), [(True, "not blindness"), (False, "sealed before the round opened"), (None, "is not stated")]
)
def test_what_is_known_of_the_data_is_said(documents, tmp_path, public, said):
    out = report.write(
        tmp_path / "r.html",
        title="t",
        ranking=documents[0],
        stability=documents[1],
        info={**INFO, "data_is_public": public},
    )
    assert said in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("count", [0, 1, 2, 60])
def test_any_number_of_entrants_makes_a_page(tmp_path, count):
    documents = round_documents([f"entrant-{place}" for place in range(count)], tasks=TASKS[:1])
    out = report.write(tmp_path / "r.html", title="t", ranking=documents[0], stability=documents[1], info={})
    Page(out.read_text(encoding="utf-8"))


def test_a_page_without_stability(documents, tmp_path):
    out = report.write(tmp_path / "r.html", title="t", ranking=documents[0], stability={}, info={})
    assert Page(out.read_text(encoding="utf-8")).tags.count("svg") == 2


def test_sections_of_the_scores_by_example_stand_on_the_page(documents, tmp_path):
    from acclimate.report_sections import Section, Table

    section = Section(
        "podium", "Ranks & more", "Says <b>.", ("a caveat",), "", (Table("t", ("*entrant",), (("ann",),)),)
    )
    settings = {"title": "t", "ranking": documents[0], "stability": documents[1], "info": {}, "sections": [section]}
    text = report.write(tmp_path / "r.html", **settings).read_text(encoding="utf-8")
    assert "<h2>How sure the order is</h2>" in text and "Ranks &amp; more</h3>" in text and "Caveat: a caveat." in text
    Page(text)


def test_many_tasks_fit_the_heat_map(documents):
    tasks = [f"task-{place}" for place in range(24)]
    effect = {
        "pairs": [[0.5] * 24] * 24,
        "ceilings": [None] * 24,
        "interval": None,
        "component": None,
        "component_null": None,
    }
    found = copy.deepcopy(documents[1]) | {"tasks": tasks, "effects": {"direct": effect, "prepared": effect}}
    ET.fromstring(plots.agreement(found))


def test_pictures_are_valid_xml_with_whole_names_on_hovering(documents):
    for picture in (
        report.ranking_svg(documents[0]),
        plots.slope(documents[0]),
        plots.agreement(documents[1]),
    ):
        root = ET.fromstring(picture)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("role") == "img"
        assert root.get("aria-label")
    titles = {element.text for element in ET.fromstring(report.ranking_svg(documents[0])).iter() if element.text}
    assert "a" * 200 in titles
    assert not any("a" * 60 in text for text in re.findall(r"</title>([^<]*)</text>", report.ranking_svg(documents[0])))


def test_no_words_leave_the_picture_of_agreement(documents):
    found = copy.deepcopy(documents[1]) | {"tasks": ["a", "b"]}
    for effect in found["effects"].values():
        effect |= {"pairs": [row[:2] for row in effect["pairs"][:2]], "ceilings": effect["ceilings"][:2]}
    root = ET.fromstring(plots.agreement(found))
    words = [one for one in root.iter("{http://www.w3.org/2000/svg}text") if one.get("text-anchor", "start") == "start"]
    assert any("ceiling from halves" in "".join(one.itertext()) for one in words)
    for one in words:
        end = float(one.get("x", 0)) + plots.extent("".join(one.itertext()), size=float(one.get("font-size", 13)))
        assert end <= float(root.get("viewBox", "").split()[2]), "".join(one.itertext())


def test_a_count_that_is_not_known_is_no_word_of_python(documents):
    ranking = copy.deepcopy(documents[0])
    ranking["baselines"] = [{**ranking["ranking"][0], "entrant": "majority", "n": None}]
    assert ">None<" not in plots.rank_intervals(ranking)


def test_the_picture_places_ranks_and_sets(documents):
    picture = report.ranking_svg(documents[0])
    space = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in ET.fromstring(picture).iter(f"{space}rect") if bar.find(f"{space}title") is not None]
    rows = documents[0]["ranking"]
    assert len(bars) == len(rows)
    widths = [float(bar.get("width")) for bar in bars]
    spans = [row["rank_high"] - row["rank_low"] for row in rows]
    assert sorted(zip(spans, widths, strict=True)) == sorted(zip(spans, widths, strict=True), key=lambda pair: pair[1])


def test_the_report_needs_no_heavy_library():
    code = (
        "import sys, acclimate.report\n"
        "heavy = {'torch', 'mlflow', 'ray', 'transformers', 'matplotlib', 'pandas', 'scipy', 'numpy', 'pyarrow'}\n"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WITHIN, check=False)
    assert done.returncode == 0, done.stderr
