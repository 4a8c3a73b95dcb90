import base64
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from doubly import report
from doubly.errors import UsageError
from doubly.report import Report, write_report
from doubly.report.tables import COSTS
from doubly.rundir import read_json, write_json
from doubly.text import escape_html

HOSTILE = "<script>alert(1)</script> $x_ & |"


class Tags(HTMLParser):
    """Collects the elements that a browser would make, and every address that it might fetch."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.addresses = [], []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


@pytest.fixture
def without_pictures(monkeypatch):
    """Drawing takes seconds; these tests are about the page and its files."""
    monkeypatch.setattr(report, "section_pictures", lambda comparison, stem: [])
    monkeypatch.setattr(report, "overview_pictures", lambda sides, stem: [])


def test_the_report_is_complete(make_run, tmp_path):
    panel = {"verdict": "suspicious", "lines": [{"name": "more steps", "verdict": "suspicious", "text": "5 points"}]}
    for name, robust in (("at", 0.4), ("done_pgd", 0.7)):
        path = make_run(f"digits.imbalanced.{name}", robust=robust)
    write_json(path / "evaluation.json", read_json(path / "evaluation.json") | {"trust": panel})
    page = write_report([path.parent], tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    text = page.read_text(encoding="utf-8")
    for expected in ("PGD-20", "radius", "torch", "runs/with space&#39;", "prefers-color-scheme: dark", "5 points"):
        assert expected in text
    assert "<dt>RA-Tail-30</dt><dd>mean RA-PGD" in text and "<dt>RA-AA</dt>" not in text  # columns of the table only
    for explained in ("tail", "average", "ε", "worst class", "strong attack", "repaired"):
        assert f"<dt>{explained}</dt>" in text
    for element in (
        '<abbr title="mean robust accuracy of the weakest',
        '<button type="button" title="accuracy under PGD"',
    ):
        assert element in text
    order = ['class="lead"', 'aria-label="Accuracy"', "<summary>Cost of training", ">What next<", "Each class under"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    cost = text[text.index("<summary>Cost of training") : text.index('id="terms"')]
    assert all(
        text.count(f">{name}</button>") == cost.count(f">{name}</button>") == 1 for name in COSTS if name in cost
    )
    (sheet,) = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', text)
    assert base64.b64decode(sheet) == (page.parent / "table.csv").read_bytes()
    names = {f"digits.imbalanced-{name}" for name in ("per_class", "pareto", "cost", "curves", "confusion")}
    files = {f"figures/{name}.{ending}" for name in names for ending in ("png", "svg")}
    written = {str(p.relative_to(page.parent)) for p in page.parent.rglob("*") if p.is_file()}
    assert written == files | {"report.html", "table.md", "table.csv", "table.tex"}
    pictures = text.split("<svg")[1:]
    assert "currentColor" in text and "#1c1d20" not in "".join(pictures)
    ids = [set(re.findall(r'<clipPath id="(\w+)"', svg)) for svg in pictures]
    assert all(ids) and len(ids) == 5 and len(set().union(*ids)) == sum(map(len, ids))


def test_text_from_data_is_never_markup_and_nothing_is_fetched(make_run, tmp_path):
    run = make_run(name=f"{HOSTILE}.at", classes=[HOSTILE, "b"], note=HOSTILE)
    tags = Tags(write_report([run], tmp_path / "out"))
    assert tags.tags.count("script") == 1 and tags.tags.count("svg") == 3
    local = ("#", "data:image/png;base64,", "data:text/csv;")
    assert all(address.startswith(local) for address in tags.addresses)


def test_pairs_of_clean_and_attacked_images_stand_before_the_figures(make_run, tmp_path, without_pictures):
    run, pixels = make_run(classes=[HOSTILE, "b"]), np.zeros((4, 5, 5, 1), np.uint8)
    answers = {"labels": [0, 1, 1, 0], "answers_clean": [0, 0, 0, 0], "answers_attacked": [0, 0, 1, 1]}
    rest = {"weights": np.array([4.0, 3.0, 2.0, 1.0]), "hard": np.array([True, True, True, False]), "r": np.float64(1)}
    np.savez(run / "gallery.npz", clean=pixels, attacked=pixels, **{k: np.array(v) for k, v in answers.items()}, **rest)
    page = write_report([run], tmp_path / "out")
    assert Tags(page).tags.count("img") == 8
    found = re.findall(r"<br>(.*)</figcaption>", page.read_text(encoding="utf-8"))
    name = escape_html(HOSTILE)
    assert found == [
        "taken for b under attack",  # the attack's own doing comes first
        "recognized, also under attack",
        f"taken for {name} with and without attack",
        f"taken for {name}, under attack for b",
    ]


def test_settings_side_by_side_have_a_figure_of_the_methods_they_share(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "section_pictures", lambda comparison, stem: [])
    runs = [make_run(f"{name}.at", epochs=0) for name in ("digits", "digits.imbalanced")]
    text = write_report(runs, tmp_path / "out").read_text(encoding="utf-8")
    assert text.count("<svg") == 1 and "for the methods that all settings have; PGD-20" in text


def test_each_protocol_has_a_table_and_figures_of_its_own(make_run, tmp_path, without_pictures):
    runs = [make_run(), make_run(seed=1, protocol={"attack": "PGD", "steps": 50}), make_run("digits.imbalanced-2.at")]
    page = write_report(runs, tmp_path / "out")
    assert Tags(page).tags.count("table") == 9  # each with a table of costs and one of its classes
    assert "PGD-50" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    names = Report.of(runs)._names()
    assert names == ["digits.imbalanced", "digits.imbalanced-2", "digits.imbalanced-2-2"]


def test_a_second_report_deletes_figures_of_the_first_and_no_runs_write_nothing(make_run, tmp_path, without_pictures):
    page = write_report([make_run()], tmp_path / "out")
    (page.parent / "figures").mkdir()
    for name in ("old.png", "old.svg", "notes.txt"):
        (page.parent / "figures" / name).touch()
    write_report([make_run()], page.parent)
    assert [path.name for path in (page.parent / "figures").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        write_report([tmp_path / "empty"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_half_a_surrogate_pair_does_not_stop_the_page(make_run, tmp_path, without_pictures):
    path = make_run()
    text = (path / "config.json").read_text().replace("digits", "d\\udc80")
    (path / "config.json").write_text(text)
    assert write_report([path], tmp_path / "out").is_file()
