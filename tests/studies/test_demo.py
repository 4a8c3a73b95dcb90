"""The demonstration with small runs: its table and its page."""

import re
from io import StringIO

import pytest
from rich.console import Console

from doubly.checkpoints.load import load_run
from doubly.config.serialize import with_changes
from doubly.errors import UsageError
from doubly.recipes.digits import digits
from doubly.rundir import RunDir, read_json
from doubly.studies import demo
from doubly.studies.demo import run_demo
from doubly.studies.digits import run_digits_study
from doubly.studies.digits_study import METHODS

TINY = {
    "epochs": 1,
    "batch_size": 512,
    "model.width": 2,
    "method.attack.steps": 1,
    "validation.attack.steps": 1,
    "validation.size": 20,
}


@pytest.fixture(scope="module")
def small(inline):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "digits", lambda method, imbalanced: with_changes(digits(method, imbalanced), TINY))
        patch.setattr(demo, "EPOCHS", 1)
        yield


@pytest.fixture(scope="module")
def shown(small, tmp_path_factory):
    """(what was printed, the folder, the page)"""
    folder, printed = tmp_path_factory.mktemp("demo"), StringIO()
    page = run_demo(folder, 1, 2, Console(file=printed, width=160))
    return printed.getvalue(), folder, page


def test_the_table_has_every_metric_of_every_method(shown):
    text, folder, _ = shown
    for word in ("SA", "RA-PGD", "RA-Tail-30", "worst class", "seconds", "passes per step", "peak MB", "seeds"):
        assert word in text
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert list(rows) == ["AT", "DONE-PGD", "DONE-GD", "DONE-ADAM"]
    for method, row in zip(METHODS, rows.values(), strict=True):
        tests = [read_json(RunDir(folder / f"{method}-s{seed}").evaluation) for seed in (0, 1)]
        cells = [cell.strip() for cell in row.split("│")[2:-1]]
        for cell, key in zip(cells, ("sa", "ra_pgd", "ra_tail_30", "ra_margin", "ra_margin_tail_30"), strict=False):
            assert cell.startswith(f"{50 * (tests[0][key] + tests[1][key]):.1f} ± ")
        assert re.fullmatch(r"\d+ ± \d+", cells[6]) and cells[10] == "2"
        assert re.fullmatch(r"\d+\.0 \+ \d+\.0", cells[7])
    caption = " ".join(text.split())
    assert "360 test images" in caption and "PGD-1" in caption and "ε = 0.15" in caption


def test_the_runs_share_data_and_seeds(shown):
    runs = [load_run(shown[1] / f"{method}-s{seed}") for method in METHODS for seed in (0, 1)]
    assert [run.name for run in runs[::2]] == [f"digits.imbalanced.{method}" for method in METHODS]
    assert [run.seed for run in runs] == [0, 1] * 4 and len({run.data for run in runs}) == 1
    assert len({run.validation for run in runs}) == 1


def test_the_page_exists_and_needs_nothing_else(shown):
    _, folder, page = shown
    assert page == folder / "report.html"
    text = page.read_text()
    assert "DONE-ADAM" in text and "RA-Tail-30" in text and "<svg" in text
    assert {"table.md", "table.csv", "table.tex", "figures"} <= {path.name for path in folder.iterdir()}


def test_a_second_time_nothing_is_trained_and_the_table_is_the_same(shown, monkeypatch):
    text, folder, page = shown
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    monkeypatch.setattr("doubly.report.Report.write", lambda report, output: output / "report.html")
    printed = StringIO()
    assert run_digits_study("demo", folder, 1, 2, Console(file=printed, width=160)) == page
    out = printed.getvalue()
    assert out.startswith("8 of 8 runs are done already")
    assert [line for line in text.splitlines() if "│" in line] == [line for line in out.splitlines() if "│" in line]


def test_a_run_that_failed_is_named(small, tmp_path):
    (tmp_path / "done_gd-s0").mkdir()
    (tmp_path / "done_gd-s0" / "letter.txt").write_text("a file of the user")
    with pytest.raises(UsageError, match=r"done_gd-s0: .*is not empty \(letter\.txt\)"):
        run_demo(tmp_path, 1, 1, Console(file=StringIO()))
    assert all(RunDir(tmp_path / f"{method}-s0").evaluation.exists() for method in METHODS if method != "done_gd")
