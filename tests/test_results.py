"""What the pages say about our own runs is made from the files in results/, and from nothing else."""

import re
from pathlib import Path

import pytest

from doubly.report import Report, collect, forms

ROOT = Path(__file__).parents[1]
STUDY, PAGE = ROOT / "results" / "cifar10-small", ROOT / "docs" / "cifar10"


def test_the_tables_are_those_of_the_results():
    made = Report.of([STUDY]).tables
    assert (PAGE / "table.md").read_text(encoding="utf-8") == "\n".join(map(forms.markdown, made))
    assert (PAGE / "table.csv").read_text(encoding="utf-8") == forms.csv(made)


def test_the_reading_quotes_the_tables():
    """Every row of a table in the page of the study is a row of the report."""
    quoted = (ROOT / "docs" / "cifar10.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in quoted if re.match(r"\| [A-Z][\w-]* \| [\d*]", line)]
    made = (PAGE / "table.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) >= 4 and [row for row in rows if row not in made] == []


@pytest.mark.parametrize("run", collect([STUDY]), ids=lambda run: run.path.name)
def test_a_result_is_whole_and_small(run):
    assert len(run.metrics) == run.config["epochs"] and run.evaluation["n"] == 2000
    assert run.path.name == f"{run.config['name']}-s{run.seed}"
    files = {file.name: file.stat().st_size for file in run.path.iterdir()}
    assert {"config.json", "environment.json", "metrics.jsonl", "evaluation.json"} <= set(files)
    assert set(files) <= {"gallery.npz", "evaluation.npz", "config.json", "environment.json", "metrics.jsonl"} | {
        "evaluation.json"
    }
    assert sum(files.values()) < 2**20
