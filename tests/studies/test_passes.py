"""The table of passes: predictions are what is counted, and the docs have what the command prints."""

from pathlib import Path

from doubly.recipes.digits import FAST, METHODS
from doubly.studies.passes import both, format_passes, passes_table

PAGE = Path(__file__).parents[2] / "docs" / "cost.md"


def test_the_docs_have_the_table_and_predictions_are_right():
    """FAT is left out: its attacks stop early."""
    lines = [line for line in passes_table().splitlines() if not line.startswith("| FAT |")]
    assert len(lines) == 2 + len(METHODS) + len(FAST) - 1
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line not in page] == []
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [name for name, predicted, counted in rows if predicted != counted] == []


def test_at_takes_ten_steps_and_the_update():
    assert [format_passes(passes) for passes in both("at")] == ["11 + 11", "11 + 11"]
