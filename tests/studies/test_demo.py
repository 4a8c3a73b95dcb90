"""The demonstration with small runs: its table, its differences and its page."""

import re
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from doubly.checkpoints.load import load_run
from doubly.config.serialize import with_changes
from doubly.errors import UsageError
from doubly.evaluation.intervals import paired_seed_difference, tail_accuracy
from doubly.recipes.digits import digits
from doubly.rundir import RunDir, read_json
from doubly.studies import demo
from doubly.studies.demo import SETTINGS, demo_directories, run_demo
from doubly.studies.digits import run_digits_study

TINY = {
    "epochs": 1,
    "batch_size": 512,
    "model.width": 2,
    "method.attack.steps": 1,
    "validation.attack.steps": 1,
    "validation.size": 20,
}
ROWS = {"AT": "at-s{}", "AT repaired": "at-s{}-repaired", "DONE-PGD": "done_pgd-s{}", "DONE-CLASS": "done_class-s{}"}


@pytest.fixture(scope="module")
def small(inline):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "digits", lambda method, imbalanced: with_changes(digits(method, imbalanced), TINY))
        patch.setitem(demo.SHARED, "epochs", 1)
        yield


@pytest.fixture(scope="module")
def shown(small, tmp_path_factory):
    """(what was printed, the folder, the page)"""
    folder, printed = tmp_path_factory.mktemp("demo"), StringIO()
    page = run_demo(folder, 1, 2, Console(file=printed, width=160))
    return printed.getvalue(), folder, page


def test_the_table_shows_the_strong_attack_of_every_method(shown):
    text, folder, _ = shown
    lines = (folder / "demo.md").read_text().splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    assert list(rows) == ["method", "---", *ROWS]
    for label, row in list(rows.items())[2:]:
        tests = [read_json(RunDir(folder / ROWS[label].format(seed)).evaluation) for seed in (0, 1)]
        cells = [cell.strip(" *") for cell in row.split("|")[2:-1]]
        assert all(cell in text for cell in cells)
        for cell, key in zip(cells, ("sa", "ra_strong", "ra_strong_tail_30"), strict=False):
            assert cell.startswith(f"{50 * (tests[0][key] + tests[1][key]):.1f} ± ")
        worst = [test["worst_class_ra_strong"]["ra_strong"] for test in tests]
        assert cells[3].startswith(f"{50 * sum(worst):.1f} ± ")
        tails = [test["ra_strong_tail_30"] for test in tests]
        baseline = [read_json(RunDir(folder / f"at-s{seed}").evaluation)["ra_strong_tail_30"] for seed in (0, 1)]
        difference = re.fullmatch(r"([+-]\d+\.\d) \([+-]\d+\.\d, [+-]\d+\.\d\)", cells[4])
        assert cells[4] == "" if label == "AT" else difference[1] == f"{50 * (sum(tails) - sum(baseline)):+.1f}"
    caption = " ".join(text.split())
    assert (
        "360 test images, mean ± sd over 2 seeds" in caption
        and "the strong attack (ε = 0.15" in caption
        and "95 % interval" in caption
    )


def test_the_difference_of_tails_is_paired_over_images_and_seeds():
    y = np.repeat(np.arange(10), 20)
    second = np.random.default_rng(0).random((3, 200)) < 0.6
    assert paired_seed_difference(second, second, y, tail_accuracy, 50) == (0, 0, 0)
    first = second.copy()
    first[:, y == 4] = True  # the tail changes where class 4 was among the weakest three
    value, low, high = paired_seed_difference(first, second, y, tail_accuracy, 200)
    tails = [[np.sort(row.reshape(10, 20).mean(1))[:3].mean() for row in part] for part in (first, second)]
    assert value == pytest.approx(np.mean(tails[0]) - np.mean(tails[1])) and low <= value <= high
    assert paired_seed_difference(np.ones_like(second), np.zeros_like(second), y, tail_accuracy, 20) == (1, 1, 1)


def test_the_runs_share_data_and_seeds(shown):
    runs = [load_run(path) for path in demo_directories(shown[1], 2)]
    names = [f"digits.imbalanced.{method}" for method in (*SETTINGS, "at")]
    assert [run.name for run in runs[::2]] == names and runs[6].label == "AT repaired"
    assert [run.seed for run in runs] == [0, 1] * 4 and len({run.data for run in runs}) == 1
    assert len({run.validation for run in runs}) == 1 and runs[0].data.holdout == 0.2


def test_the_page_exists_and_needs_nothing_else(shown):
    _, folder, page = shown
    assert page == folder / "report.html"
    text = page.read_text()
    assert "AT repaired" in text and "RA-strong" in text and "<svg" in text
    assert {"table.md", "table.csv", "table.tex", "figures"} <= {path.name for path in folder.iterdir()}


def test_a_second_time_nothing_is_done_and_the_table_is_the_same(shown, monkeypatch):
    text, folder, page = shown
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    monkeypatch.setattr("doubly.studies.demo.evaluate_run", None)
    monkeypatch.setattr("doubly.report.Report.write", lambda report, output: output / "report.html")
    printed = StringIO()
    assert run_digits_study("demo", folder, 1, 2, Console(file=printed, width=160)) == page
    out = printed.getvalue()
    assert out.startswith("6 of 6 runs are done already")
    assert out.split("Imbalanced digits")[1] == text.split("Imbalanced digits")[1]


def test_a_run_that_failed_is_named(small, tmp_path):
    (tmp_path / "done_pgd-s0").mkdir()
    (tmp_path / "done_pgd-s0" / "letter.txt").write_text("a file of the user")
    with pytest.raises(UsageError, match=r"done_pgd-s0: .*is not empty \(letter\.txt\)"):
        run_demo(tmp_path, 1, 1, Console(file=StringIO()))
    assert all(RunDir(tmp_path / f"{method}-s0").evaluation.exists() for method in ("at", "done_class"))
