"""A leaderboard: entries are checked, protocols are never mixed, and names from outside are only shown."""

import contextlib
import copy
import io
import json
import re
from html.parser import HTMLParser

import pytest

from doubly.cli import main
from doubly.report.leaderboard import group, read_entries, render
from doubly.report.leaderboard_entry import SCHEMA, check_entry, make_entry, read_entry
from doubly.report.run_result import read_run
from doubly.rundir import write_json


def call(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["leaderboard", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


def tags_of(text):
    """Return the tags of a page with their attributes, as a browser reads them."""
    tags, parser = [], HTMLParser()
    parser.handle_starttag = lambda tag, names: tags.append((tag, names))
    parser.feed(text)
    return tags


@pytest.fixture
def entry(make_run):
    return make_entry(read_run(make_run()))


def changed(entry, path, value):
    result = copy.deepcopy(entry)
    *parents, last = path.split(".")
    part = result
    for name in parents:
        part = part[name]
    part[last] = value
    return result


def test_runs_foreign_networks_and_sent_entries_share_a_table_of_one_protocol(make_run, tmp_path):
    first, second = make_run(robust=0.5), make_run("digits.imbalanced.done_pgd", robust=0.7)
    protocol = read_run(first).evaluation["protocol"]
    other = make_run("digits.cfol", protocol={**protocol, "seed": 1})
    foreign = make_run("x.foreign", robust=0.6)
    (foreign / "config.json").unlink()
    code, out, err = call("--entry", foreign, "--name", "from elsewhere", "--link", "https://example.org/net")
    assert code == 0, err
    (tmp_path / "entries").mkdir()
    (tmp_path / "entries" / "sent.json").write_text(out)
    assert read_entry(tmp_path / "entries" / "sent.json")["cost"]["seconds"] == 12.0
    page = tmp_path / "page.html"
    code, out, err = call(first, second, other, tmp_path / "entries", first, "--output", page)
    assert code == 0 and "4 entries, 2 protocols" in out, err
    big, small = group(read_entries([first, second, other, tmp_path / "entries"]))
    assert [row[0].text for row in big.rows] == ["digits.imbalanced.done_pgd", "from elsewhere", "digits.imbalanced.at"]
    assert [row[0].text for row in small.rows] == ["digits.cfol"] and big.identity != small.identity
    titles = [title for title, _ in big.columns]
    assert titles[3:6] == ["SA", "RA-PGD", "RA-Tail-30"] and "training" in titles and "passes" in titles
    text = page.read_text()
    assert 'href="https://example.org/net"' in text and text.count("<table>") == 2
    addresses = {value for _, names in tags_of(text) for name, value in names if name in ("src", "href")}
    assert {address for address in addresses if address[0] != "#"} == {"https://example.org/net"}  # self-contained
    code, _, err = call(first, other, "--one-protocol", "--output", tmp_path / "none.html")
    assert code == 2 and "2 protocols, which differ in seed" in err and not (tmp_path / "none.html").exists()


def test_autoattack_of_another_kind_has_its_own_table_and_suspicious_numbers_are_not_best(entry):
    attacked = [changed(entry, "autoattack", {"label": "RA-AA", "n": n}) for n in (10, 20)]
    assert [len(board.entries) for board in group([entry, attacked[0]])] == [2]
    assert [len(board.entries) for board in group([entry, *attacked])] == [1, 1, 1]
    (board,) = group([{**entry, "name": "good"}, {**entry, "name": "a bad one", "trust": "suspicious"}])
    assert [row[0].text for row in board.rows] == ["good", "a bad one"]
    assert [any(cell.is_best for cell in row) for row in board.rows] == [True, False]


def test_an_entry_is_checked_field_by_field(entry, tmp_path):
    cases = [
        ("name", "", "name has 0 characters"),
        ("name", 3, "name must be string, got 3"),
        ("schema", "doubly.leaderboard.9", "schema is 'doubly.leaderboard.9'"),
        ("link", "javascript:alert(1)", "link is 'javascript:alert(1)'"),
        ("link", "https://x.org/\"onclick='a'", "link is"),
        ("extra", 1, "the file has the unknown field 'extra'"),
        ("accuracies.ra_pgd", 1.5, "accuracies.ra_pgd is 1.5, allowed are 0 to 1"),
        ("accuracies.ra_pgd", 0.99, "accuracies.ra_pgd is 0.99, but the classes average"),
        ("accuracies.ra_tail_30", 0.99, "accuracies.ra_tail_30 is 0.99, but the weakest classes have"),
        ("accuracies.sa", None, "accuracies.sa is None"),
        ("accuracies.sa", float("nan"), "accuracies.sa must be number or null, got nan"),
        ("per_class", {}, "per_class is empty"),
        ("per_class.0.n", True, "per_class.0.n must be integer"),
        ("per_class.0.n", 0, "null for those without"),
        ("n", 7, "n is 7, but the classes have 400 images"),
        ("cost.seconds", -1, "cost.seconds is -1, allowed are 0"),
        ("protocol", [], "protocol must be object"),
        ("protocol.attack", {"threat": {"radius": "big"}, "rule": {"size": 1}}, "does not describe an attack"),
    ]
    file = tmp_path / "entry.json"
    for path, value, sentence in cases:
        bad = changed(entry, path, value)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            check_entry(bad, "entry.json")
    for text, sentence in [
        (json.dumps({**entry, "n": 7}), "entry.json is no valid entry: n is 7"),
        ("[1]", "entry.json"),
        ("{", "entry.json"),
        (json.dumps({key: value for key, value in entry.items() if key != "protocol"}), "protocol is missing"),
    ]:
        file.write_text(text)
        code, _, err = call(file)
        assert code == 2 and sentence in err and err.count("\n") == 1, err
    for words, sentence in [
        ([], "at least one entry"),
        ([tmp_path / "nowhere"], "is not a run and contains none"),
        (["--name", "x"], "add --entry DIR"),
        (["--entry", tmp_path], "has not been evaluated"),
    ]:
        code, _, err = call(*words)
        assert code == 2 and sentence in err, (words, err)
    assert json.loads(call("--schema")[1]) == SCHEMA


HOSTILE = "</td><script>alert(1)</script>\x1b[31m\" onmouseover='x'"


def test_hostile_names_are_only_shown(entry, tmp_path):
    bad = {**entry, **dict.fromkeys(("name", "method", "data", "trained_on", "trust"), HOSTILE)}
    bad["per_class"] = {HOSTILE + name: row for name, row in entry["per_class"].items()}
    bad["protocol"] = {**entry["protocol"], "note of mine": HOSTILE, "attack": {"kind": HOSTILE, "start": HOSTILE}}
    write_json(tmp_path / "bad.json", bad)
    text = render(group(read_entries([tmp_path / "bad.json"])))
    tags = tags_of(text)
    assert [tag for tag, _ in tags].count("script") == 1 and "\x1b" not in text
    assert not [name for _, names in tags for name, _ in names if name.startswith("on")]
    assert "&lt;script&gt;" in text
