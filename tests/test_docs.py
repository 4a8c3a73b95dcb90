"""What the pages say exists: every name of ours, every test, every file they link to; and the paper map is whole."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from doubly.report.study import comparison_markdown, study_markdown
from doubly.rundir import read_json

ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs" / "paper-map.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ISSUES = {"Foundation", "CID", "Baselines", "Data", "Evaluation", "Report", "Scale"}

NAME = re.compile(r"(?<![\w./-])doubly(?:\.[A-Za-z_]\w*)+")
TEST = re.compile(r"(?<![\w./-])(tests/[\w/.-]+\.py)((?:::\w+)+)")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)=\"([^\"]+)\"", re.MULTILINE)
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(rf"{FENCED.pattern}|`[^`\n]*`", FENCED.flags)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def exists(name):
    """Whether the dotted name is a module, an attribute, or a field of a dataclass (which need not be an attribute)."""
    package, *parts = name.split(".")
    found = import_module(package)
    for place, part in enumerate(parts, 1):
        inside = f"{found.__name__}.{part}" if isinstance(found, ModuleType) else ""
        if inside and hasattr(found, "__path__") and find_spec(inside):
            found = import_module(inside)
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return place == len(parts) and part in getattr(found, "__dataclass_fields__", {})
    return True


@cache
def defined(path):
    """The tests of a file, as `test_name` or `TestClass::test_name`."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    inside = [(f"{node.name}::", node.body) for node in body if isinstance(node, ast.ClassDef)]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {
        f"{prefix}{node.name}"
        for prefix, nodes in [("", body), *inside]
        for node in nodes
        if isinstance(node, functions) and node.name.startswith("test_")
    }


def anchors(path):
    """What the headings of a page can be reached by, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def unknown_names(text):
    return sorted({name for name in NAME.findall(text) if not exists(name)})


def missing_tests(text):
    return sorted({path + name for path, name in TEST.findall(text) if name[2:] not in defined(ROOT / path)})


def broken_links(page, text):
    broken = []
    for target in ("".join(groups) for groups in LINK.findall(CODE.sub("", text))):
        if re.match(r"[a-z][a-z0-9+.-]*:|//", target):  # another place: https:, mailto:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    return broken


def reached(page, seen):
    """The pages that links lead to from this one, itself among them."""
    seen.add(page)
    for target in ("".join(groups).partition("#")[0] for groups in LINK.findall(CODE.sub("", page.read_text("utf-8")))):
        if target.endswith(".md") and (other := (page.parent / target).resolve()) in PAGES and other not in seen:
            reached(other, seen)
    return seen


def test_every_page_can_be_reached_from_the_readme():
    assert set(PAGES) - reached(ROOT / "README.md", set()) == set()


@each_page
def test_every_name_exists(page):
    assert unknown_names(page.read_text(encoding="utf-8")) == []


@each_page
def test_every_test_exists(page):
    assert missing_tests(page.read_text(encoding="utf-8")) == []


@each_page
def test_every_link_leads_somewhere(page):
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_what_does_not_exist_is_found():
    good = "`doubly.DONE` doubly.bilevel.cid doubly.methods.DONE.temperature doubly.report.tables.table x/doubly.git"
    bad = ["doubly.methods.DONE.nonsense", "doubly.methods.DONE.temperature.values", "doubly.nowhere.at_all"]
    assert unknown_names(f"{good} {' '.join(bad)}") == bad
    here, other = "tests/test_docs.py::test_every_name_exists", "tests/test_docs.py::test_nothing_at_all"
    assert missing_tests(f"{here}, {other}, tests/nowhere.py::test_it") == ["tests/nowhere.py::test_it", other]
    text = '[a](numerics.md) ![b](images/no.png) [c](https://x.org) [d](#tables) [e](#no) `[f](g)`\n<img src="h.png">'
    assert broken_links(MAP, text) == ["images/no.png", "#no", "h.png"]


# --- the paper map ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    header: list[str]
    cells: list[str]

    def __getitem__(self, column):
        return self.cells[self.header.index(column)]


def rows(text):
    """Every row of every table, with the header of its table."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *body = ([c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines())
        yield from (Row(header, cells) for cells in body)


ROWS = list(rows(MAP.read_text(encoding="utf-8")))
STATUS = re.compile(rf"done\b|\*open: issue ({'|'.join(sorted(ISSUES))})\*|\*proof only\*")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.cells[0])
def test_every_row_has_a_status(row):
    assert row.header[-1] == "status" and len(row.cells) == len(row.header) and all(row.cells)
    assert STATUS.match(row["status"])
    assert set(re.findall(r"issue (\w+)", row["status"])) <= ISSUES
    if row["status"].startswith("done"):
        assert NAME.search(row["code" if "code" in row.header else "where"]) and TEST.search(row["test"])


def numbers(cells, pattern):
    """The numbers that the pattern finds, ranges such as 5–7 filled in."""
    found = [match for cell in cells for match in re.findall(f"{pattern}(?:–{pattern})?", cell)]
    return {number for first, last in found for number in range(int(first), int(last or first) + 1)}


def test_nothing_of_the_paper_is_left_out():
    first = [row.cells[0] for row in ROWS if row.header[0] == "paper"]
    assert numbers(first, r"\((\d+)\)") == set(range(1, 40))
    assert numbers([row["line"] for row in ROWS if row.header[0] == "line"], r"\b(\d+)\b") == set(range(1, 14))
    for kind, count in {"Assumption": 3, "Lemma": 4, "Theorem": 1, "Table": 4, "Figure": 6}.items():
        assert numbers(first, rf"{kind} (\d+)") == set(range(1, count + 1))
    assert [row["point"] for row in ROWS if row.header[0] == "point"] == [
        *(f"A{k}" for k in range(1, 24)),
        "A23b",
        *(f"A{k}" for k in range(24, 29)),
    ]


@pytest.mark.parametrize(
    ("page", "results", "made"),
    [
        ("results.md", "digits_comparison.json", comparison_markdown),
        ("digits.md", "digits.json", study_markdown),
    ],
)
def test_no_number_of_a_table_is_typed_in_by_hand(page, results, made):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = [line for line in made(read_json(ROOT / "docs" / "results" / results)).splitlines() if line.startswith("|")]
    assert len(rows) > 50 and [row for row in rows if row not in text] == []
