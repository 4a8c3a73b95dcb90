import re
from html.parser import HTMLParser

import pytest

from doubly.errors import UsageError
from doubly.report import write_report

HOSTILE = "<script>alert(1)</script> $x_ & |"


class Tags(HTMLParser):
    """Counts the elements a browser would make, and keeps every address it might fetch."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


def parsed(page):
    tags = Tags()
    tags.feed(page)
    return tags


def test_the_report_is_complete(make_run, tmp_path):
    for name, robust in (("at", 0.4), ("done_pgd", 0.7)):
        path = make_run(f"digits.imbalanced.{name}", robust=robust)
    page = write_report([path.parent], tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    text = page.read_text(encoding="utf-8")
    for expected in ("up from", "PGD-20", "radius", "torch", "runs/with space&#39;", "prefers-color-scheme: dark"):
        assert expected in text
    names = {f"digits.imbalanced-{name}" for name in ("per_class", "pareto", "cost", "curves", "confusion")}
    files = {f"figures/{name}.{ending}" for name in names for ending in ("png", "svg")}
    found = {str(p.relative_to(page.parent)) for p in page.parent.rglob("*") if p.is_file()}
    assert found == files | {"report.html", "table.md", "table.csv", "table.tex"}


def test_nothing_from_data_becomes_markup_and_nothing_is_fetched(make_run, tmp_path):
    run = make_run(name=f"{HOSTILE}.at", classes=[HOSTILE, "b"], note=HOSTILE)
    tags = parsed(write_report([run], tmp_path / "out").read_text(encoding="utf-8"))
    assert tags.tags.count("script") == 1 and tags.tags.count("svg") == 5
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in tags.addresses)


def test_pictures_follow_the_text_color_and_do_not_share_names(make_run, tmp_path):
    text = write_report([make_run()], tmp_path / "out").read_text(encoding="utf-8")
    assert "currentColor" in text and "#1c1d20" not in "".join(text.split("<svg")[1:])
    names = [set(re.findall(r'<clipPath id="(\w+)"', svg)) for svg in text.split("<svg")[1:]]
    assert all(names) and len(names) == 5 and len(set().union(*names)) == sum(map(len, names))


def test_each_protocol_gets_its_own_table(make_run, tmp_path):
    runs = [make_run(), make_run(seed=1, protocol={"attack": "PGD", "steps": 50})]
    page = write_report(runs, tmp_path / "out")
    assert parsed(page.read_text(encoding="utf-8")).tags.count("table") == 4  # each with its classes
    assert "PGD-50" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "figures" / "digits.imbalanced-2-curves.png").is_file()


def test_no_runs_write_nothing(tmp_path):
    with pytest.raises(UsageError):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_two_sections_share_a_picture(make_run, tmp_path):
    runs = [make_run("exp-2.at", classes=["x1", "x2"]), *(make_run("exp.at", classes=[f"{c}1", f"{c}2"]) for c in "ab")]
    page = write_report(runs, tmp_path / "out").read_text(encoding="utf-8")
    assert len(list((tmp_path / "out" / "figures").glob("*-per_class.png"))) == 3
    drawn = [svg for svg in page.split("<svg")[1:] if ">a1</" in svg or ">b1</" in svg or ">x1</" in svg]
    assert drawn and all(sum(f">{name}1</" in svg for name in "abx") == 1 for svg in drawn)


def test_a_second_report_leaves_no_picture_of_the_first(make_run, tmp_path):
    write_report([make_run("one.at")], tmp_path / "out")
    write_report([make_run("two.at")], tmp_path / "out")
    assert {path.name.split(".")[0].split("-")[0] for path in (tmp_path / "out" / "figures").iterdir()} == {"two"}


def test_half_a_character_does_not_stop_the_page(make_run, tmp_path):
    path = make_run()
    text = (path / "config.json").read_text().replace("digits", "d\\udc80")
    (path / "config.json").write_text(text)
    assert write_report([path], tmp_path / "out").is_file()
