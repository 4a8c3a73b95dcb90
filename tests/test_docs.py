"""The pages are right: names, tests and links exist, every page can be reached, and public names are documented."""

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from doubly.errors import UsageError
from doubly.methods import AT, DONE, Method
from doubly.report.study import comparison_markdown, study_markdown
from doubly.rundir import read_json

ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs" / "paper-map.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}

NAME = re.compile(r"(?<![\w./(-])doubly(?:\.[A-Za-z_]\w*)+(?!\w*\.md)")
TEST = re.compile(r"(?<![\w./-])(tests/[\w/.-]+\.py)((?:::\w+)*)")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)=\"([^\"]+)\"", re.MULTILINE)
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(rf"{FENCED.pattern}|`[^`\n]*`", FENCED.flags)
API = re.compile(r"^::: (doubly[\w.]*)$", re.MULTILINE)


def problems_by_page(find):
    """Return the problems that `find(page, text)` lists, by page, without pages that have none."""
    return {page.name: problems for page, text in TEXTS.items() if (problems := find(page, text))}


# --- names, tests and links ------------------------------------------------------------------------------------------


def exists(name):
    """Return whether the dotted name is a module, an attribute, or a field of a dataclass."""
    package, *parts = name.split(".")
    value = import_module(package)
    for place, part in enumerate(parts, 1):
        module = f"{value.__name__}.{part}" if isinstance(value, ModuleType) else ""
        if module and hasattr(value, "__path__") and find_spec(module):
            try:
                value = import_module(module)
            except UsageError:  # a bridge to a library that is not installed: look for the name in its source
                source = Path(find_spec(module).origin).read_text(encoding="utf-8")
                return all(re.search(rf"^\s*(class|def) {name}\b", source, re.M) for name in parts[place:])
        elif hasattr(value, part):
            value = getattr(value, part)
        else:
            return place == len(parts) and part in getattr(value, "__dataclass_fields__", {})
    return True


@cache
def defined_tests(path):
    """Return the tests of a file, as `test_name` or `TestClass::test_name`."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    classes = [(f"{node.name}::", node.body) for node in body if isinstance(node, ast.ClassDef)]
    return {
        f"{prefix}{node.name}"
        for prefix, nodes in [("", body), *classes]
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def anchors(path):
    """Return the anchors of the headings of a page, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def unknown_names(_, text):
    return sorted({name for name in NAME.findall(text) if not exists(name)})


def missing_tests(_, text):
    return sorted(
        {
            path + name
            for path, name in TEST.findall(text)
            if not (ROOT / path).is_file() or (name and name[2:] not in defined_tests(ROOT / path))
        }
    )


def links(text):
    return ["".join(groups) for groups in LINK.findall(CODE.sub("", text))]


def broken_links(page, text):
    broken = []
    for target in links(text):
        if re.match(r"[a-z][a-z0-9+.-]*:|//", target):  # another server
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        outside = ROOT / "docs" in page.parents and ROOT / "docs" not in file.resolve().parents  # not on the site
        generated = anchor.startswith("doubly.")  # by mkdocstrings, and checked by `make docs`
        if outside or not file.exists() or (anchor and not generated and anchor not in anchors(file)):
            broken.append(target)
    return broken


def test_every_name_in_a_page_exists():
    assert problems_by_page(unknown_names) == {}


def test_every_test_in_a_page_exists():
    assert problems_by_page(missing_tests) == {}


def test_every_link_leads_to_a_page_of_the_site_and_a_heading():
    assert problems_by_page(broken_links) == {}


def test_every_page_is_in_the_navigation_and_linked():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if ROOT / "docs" in page.parents}
    assert set(re.findall(r"[\w/-]+\.md", nav)) == pages

    def reach(page, seen):
        seen.add(page)
        for target in (target.partition("#")[0] for target in links(TEXTS[page])):
            if target.endswith(".md") and (other := (page.parent / target).resolve()) in TEXTS and other not in seen:
                reach(other, seen)
        return seen

    assert set(PAGES) - reach(ROOT / "README.md", set()) == set()


def test_pages_use_no_private_codes_and_name_nothing_outside_the_repository():
    pattern = re.compile(r"\bA\d{1,2}b?\b|\.\./shared|methods\.md")
    assert problems_by_page(lambda _, text: pattern.findall(text)) == {}


def test_mistakes_in_a_page_are_detected():
    good = "`doubly.DONE` doubly.bilevel.cid doubly.methods.DONE.temperature [x](doubly.md) x/doubly.git"
    bad = ["doubly.methods.DONE.nonsense", "doubly.methods.DONE.temperature.values", "doubly.nowhere.at_all"]
    assert unknown_names(MAP, f"{good} {' '.join(bad)}") == bad
    real, missing = "tests/test_docs.py::test_every_name_in_a_page_exists", "tests/test_docs.py::test_nothing_at_all"
    text = f"{real}, {missing}, tests/nowhere.py::test_it, tests/test_docs.py"
    assert missing_tests(MAP, text) == ["tests/nowhere.py::test_it", missing]
    text = "[a](numerics.md) ![b](no.png) [c](https://x.org) [d](#tables) [e](#no) `[f](g)` [h](../README.md)"
    text += '\n<img src="i">'
    assert broken_links(MAP, text) == ["no.png", "#no", "../README.md", "i"]


# --- docstrings of the public names ----------------------------------------------------------------------------------

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
SENTENCE = re.compile(r"[A-Z].*\.")
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (import_module("doubly"), import_module("doubly.bilevel"))
    for name in module.__all__
    if callable(getattr(module, name))
}


def sections(docstring):
    """Return the sections of a docstring in Google style by title."""
    parts = SECTION.split(docstring)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(docstring, *titles):
    """Return the names that the sections with these titles explain."""
    text = "".join(sections(docstring).get(title, "") for title in titles)
    return set(re.findall(r"^    \**(\w+)(?: \(.*?\))?:", text, re.MULTILINE))


def source_tree(thing):
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def raised_errors(function):
    """Return the names of the errors that a function raises itself."""
    errors = [node.exc for node in ast.walk(source_tree(function)) if isinstance(node, ast.Raise) and node.exc]
    names = [error.func if isinstance(error, ast.Call) else error for error in errors]
    return {name.id for name in names if isinstance(name, ast.Name)} - {"NotImplementedError"}


def fields_with_text(kind):
    """Return the fields of a class, or of a base class, that are explained by a string below them."""
    bodies = [source_tree(base).body for base in kind.__mro__ if base is kind or base.__module__.startswith("doubly")]
    return {
        field.target.id
        for body in bodies
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def class_problems(kind):
    docstring = "\n".join(filter(None, map(inspect.getdoc, (kind, vars(kind).get("__init__")))))
    if issubclass(kind, Exception) or getattr(kind, "_is_protocol", False):
        return
    explained = entries(docstring, "Args", "Attributes") | fields_with_text(kind)
    yield from (f"does not explain {name}" for name in inspect.signature(kind).parameters if name not in explained)
    own = [vars(kind)[name] for name in ("__init__", "__post_init__") if name in vars(kind)]
    own = [function for function in own if "<string>" not in function.__code__.co_filename]  # made by dataclass
    errors = {error for function in own for error in raised_errors(function)}
    yield from (f"does not explain {error}" for error in errors - entries(docstring, "Raises"))


def function_problems(function):
    docstring, signature = inspect.getdoc(function) or "", inspect.signature(function)
    yield from (f"does not explain {n}" for n in signature.parameters if n not in entries(docstring, "Args"))
    if signature.return_annotation not in (None, "None") and not {"Returns", "Yields"} & set(sections(docstring)):
        yield "does not say what it returns"
    yield from (f"does not explain {e}" for e in raised_errors(function) - entries(docstring, "Raises"))


def docstring_problems(thing):
    """List what the docstring of a public class or function lacks."""
    first_line = (inspect.getdoc(thing) or "").partition("\n")[0]
    if not SENTENCE.fullmatch(first_line):
        yield f"begins with '{first_line}', which is not a sentence"
    yield from (class_problems if inspect.isclass(thing) else function_problems)(thing)


def method_problems(kind, name, function):
    """List what the docstring of a method lacks. A base class, or another public class, may explain the parameters."""
    docstring = inspect.getdoc(getattr(kind, name)) or ""
    if not SENTENCE.fullmatch(docstring.partition("\n")[0]):
        yield f"begins with '{docstring.partition(chr(10))[0]}', which is not a sentence"
    others = [getattr(other, name, None) for other in (*kind.__mro__, *PUBLIC.values())]
    explained = {entry for other in others for entry in entries(inspect.getdoc(other) or "", "Args")}
    explained |= set(re.findall(r"`(\w+)`", docstring))
    parameters = list(inspect.signature(function).parameters)[1:]
    yield from (f"does not explain {parameter}" for parameter in parameters if parameter not in explained)


def public_methods(kind):
    functions = {name: getattr(value, "__func__", value) for name, value in vars(kind).items()}
    return [
        (name, function)
        for name, function in functions.items()
        if inspect.isfunction(function) and (name == "__call__" or not name.startswith("_"))
    ]


def test_every_public_name_documents_arguments_returns_and_errors():
    problems = {name: result for name, thing in PUBLIC.items() if (result := list(docstring_problems(thing)))}
    assert problems == {}


def test_every_method_of_a_public_class_is_documented():
    problems = {
        f"{name}.{method}": result
        for name, kind in PUBLIC.items()
        if inspect.isclass(kind) and not (issubclass(kind, Method) and kind not in (AT, DONE))  # parts of a formula
        for method, function in public_methods(kind)
        if (result := list(method_problems(kind, method, function)))
    }
    assert problems == {}


def test_docstrings_that_lack_something_are_detected():
    def lacks_everything(x, y) -> int:
        """of x and y"""
        raise ValueError(x, y)

    @dataclass
    class Lacks:
        """A class."""

        a: int
        """known"""
        b: int

        def __post_init__(self):
            raise TypeError

    assert list(docstring_problems(lacks_everything)) == [
        "begins with 'of x and y', which is not a sentence",
        "does not explain x",
        "does not explain y",
        "does not say what it returns",
        "does not explain ValueError",
    ]
    assert list(docstring_problems(Lacks)) == ["does not explain b", "does not explain TypeError"]


def test_a_list_begins_after_an_empty_line():
    """MkDocs shows a list that follows a code block or a sentence directly as part of a paragraph."""

    def directly(page, text):
        lines = FENCED.sub("```", text).splitlines() if page.is_relative_to(ROOT / "docs") else []
        return [
            line for before, line in pairwise(lines) if line.startswith("- ") and before[:2] not in ("", "- ", "  ")
        ]

    assert problems_by_page(directly) == {}


def test_the_api_pages_show_every_public_name_and_every_method():
    shown = [name for page in TEXTS if page.parent.name == "api" for name in API.findall(TEXTS[page])]
    # The function of a module of the same name needs its full name; otherwise the page would show the module.
    full_names = {f"{name}.{name.rpartition('.')[2]}" if find_spec(name) else name for name in PUBLIC}
    assert full_names <= set(shown) and len(shown) == len(set(shown))
    reference = TEXTS[ROOT / "docs" / "method-reference.md"]
    modules = {kind.__module__ for kind in import_module("doubly.methods").METHODS.values()}
    assert modules <= set(API.findall(reference))


# --- the paper map and the tables of results -------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    header: list[str]
    cells: list[str]

    def __getitem__(self, column):
        return self.cells[self.header.index(column)]


def table_rows(text):
    """Yield every row of every table, with the header of its table."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *body = ([c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines())
        yield from (Row(header, cells) for cells in body)


ROWS = list(table_rows(TEXTS[MAP]))


def test_every_row_of_the_paper_map_has_a_status_and_what_is_done_names_code_and_test():
    for row in ROWS:
        assert row.header[-1] == "status" and len(row.cells) == len(row.header) and all(row.cells), row
        assert re.match(r"done\b|\*proof only\*", row["status"]), row
        if row["status"].startswith("done"):
            assert NAME.search(row["code" if "code" in row.header else "where"]) and TEST.search(row["test"]), row


def numbers(cells, pattern):
    """Return the numbers that the pattern matches, with ranges such as 5–7 filled in."""
    matches = [match for cell in cells for match in re.findall(f"{pattern}(?:–{pattern})?", cell)]
    return {number for first, last in matches for number in range(int(first), int(last or first) + 1)}


def test_the_paper_map_has_every_equation_line_table_and_figure():
    first = [row.cells[0] for row in ROWS if row.header[0] == "paper"]
    assert numbers(first, r"\((\d+)\)") == set(range(1, 40))
    assert numbers([row["line"] for row in ROWS if row.header[0] == "line"], r"\b(\d+)\b") == set(range(1, 14))
    for kind, count in {"Assumption": 3, "Lemma": 4, "Theorem": 1, "Table": 4, "Figure": 6}.items():
        assert numbers(first, rf"{kind} (\d+)") == set(range(1, count + 1))
    assert len([row for row in ROWS if row.header[0] == "open in the paper"]) == 29


def test_no_number_of_a_table_of_results_is_typed_by_hand():
    for page, results, markdown in (
        ("results.md", "digits_comparison.json", comparison_markdown),
        ("digits.md", "digits.json", study_markdown),
    ):
        lines = markdown(read_json(ROOT / "docs" / "results" / results)).splitlines()
        rows = [line for line in lines if line.startswith("|")]
        assert len(rows) > 50 and [row for row in rows if row not in TEXTS[ROOT / "docs" / page]] == []
