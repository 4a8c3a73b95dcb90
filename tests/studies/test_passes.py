"""The table of passes in the docs is what the command prints."""

from pathlib import Path

import pytest

from doubly.recipes.digits import FAST, METHODS
from doubly.studies.passes import both, markdown

PAGE = Path(__file__).parents[2] / "docs" / "cost.md"


@pytest.fixture(scope="module")
def table():
    return markdown()


def test_the_page_holds_what_the_command_prints(table):
    """But for FAT, whose attacks end when they end."""
    page = PAGE.read_text(encoding="utf-8").splitlines()
    lines = [line for line in table.splitlines() if not line.startswith("| FAT |")]
    assert len(lines) == 2 + len(METHODS) + len(FAST) - 1
    assert [line for line in lines if line not in page] == []


def test_what_is_foreseen_is_what_is_counted(table):
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert {name for name, foreseen, counted in rows if foreseen != counted} <= {"FAT"}


def test_at_is_ten_steps_and_the_update():
    assert both("at") == ("11 + 11", "11 + 11")
