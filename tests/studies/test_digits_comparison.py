"""Every method on digits: what is planned, and the comparison in miniature."""

from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from doubly.config.serialize import with_changes
from doubly.data import Digits
from doubly.evaluation.intervals import bootstrap_difference
from doubly.methods import METHODS as KINDS
from doubly.recipes.digits import FAST, METHODS, unsearched
from doubly.report.study import comparison_markdown
from doubly.rundir import read_json
from doubly.studies import digits_comparison, folds
from doubly.studies.digits import run_digits_study
from doubly.studies.digits_comparison import METHOD_SPACES, plan_rows, plan_searches, run_comparison

ALL = (*METHODS, *FAST)
RECIPES = [f"digits.{prefix}{method}" for prefix in ("imbalanced.", "") for method in ALL]


def test_every_method_gets_the_same_small_search_from_the_same_settings():
    assert {type(method) for method in (*METHODS.values(), *FAST.values())} == set(KINDS.values())
    searches = plan_searches(Path("study"))
    assert list(searches) == RECIPES
    for name, search in searches.items():
        assert (search.trials, search.splits, search.holdout) == (6, 1, 0.25) and search.base.epochs <= 30, name
        assert {"optimizer.lr.peak", "optimizer.weight_decay"} <= set(search.space), name
        assert len(search.candidates()) == 6 and search.base.data.source == Digits(0, 5), name
    for method in ALL:
        run = unsearched(method, True)  # no earlier choice enters a search
        assert (run.optimizer.lr.peak, run.optimizer.weight_decay) == (0.1, 5e-4), method
        assert run.method == {**METHODS, **FAST}[method]
        for path, values in METHOD_SPACES.get(method, {}).items():
            for value in values:
                assert with_changes(run, {path: value}) is not None  # a setting that the method has


def test_each_table_begins_with_plain_adversarial_training():
    rows = plan_rows({name: {} for name in RECIPES})
    tables = dict.fromkeys(row.table for row in rows)
    assert list(tables) == ["imbalanced", "balanced", "fast, imbalanced", "fast, balanced"]
    heads = {table: next(row.label for row in rows if row.table == table) for table in tables}
    assert heads == {table: "fast_at" if "fast" in table else "at" for table in tables}
    assert len(rows) == 2 * len(ALL)
    assert {row.run.epochs for row in rows if row.table.startswith("fast")} == {25}


TINY = {"batch_size": 64, "model.width": 4, "validation.attack.steps": 1, "validation.size": 20, "epochs": 1}


@pytest.fixture(scope="module")
def compared(inline, tmp_path_factory):
    """(folder, results) of two methods in each table, with one epoch each."""
    slow = {"at": METHODS["at"], "gairat": METHODS["gairat"]}
    fast = {"fast_at": FAST["fast_at"], "n_fgsm": FAST["n_fgsm"]}
    folder = tmp_path_factory.mktemp("comparison")

    def small(method, imbalanced):
        steps = {} if method in fast else {"method.attack.steps": 2}
        return with_changes(unsearched(method, imbalanced), {**TINY, **steps})

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"METHODS": slow, "FAST": fast, "unsearched": small, "TRIALS": 1, "FOLDS": 2}.items():
            patch.setattr(digits_comparison, name, value)
        patch.setattr(folds, "FOLDS", 2)
        patch.setattr(folds, "bootstrap_difference", partial(bootstrap_difference, resamples=50))
        yield folder, run_comparison(folder, 1, Console(file=StringIO()))


def test_it_ends_in_results_winners_and_a_table(compared):
    folder, results = compared
    assert read_json(folder / "results.json") == results
    assert set(read_json(folder / "winners.json")) == {
        f"digits.{prefix}{method}" for prefix in ("", "imbalanced.") for method in ("at", "gairat", "fast_at", "n_fgsm")
    }
    rows = {(row["table"], row["label"]): row for row in results["rows"]}
    assert len(rows) == 8 and not any(row["failed"] for row in rows.values())
    for row in rows.values():
        assert row["n"] == 1797 and len(row["per_fold"]["ra_margin"]) == len(row["seconds"]) == 2
    assert rows["balanced", "at"]["passes"] == {"forward": 3.0, "backward": 3.0}
    assert rows["fast, balanced", "fast_at"]["passes"] == {"forward": 2.0, "backward": 2.0}
    text = comparison_markdown(results)
    assert "### Imbalanced digits" in text and "### Fast, balanced digits" in text
    assert "| gairat |" in text and "RA-margin" in text and "3.0 + 3.0" in text
    assert "Difference to `fast_at`" in text


def test_an_alarm_at_the_end_of_a_run_is_below_the_table(compared):
    _, results = compared
    row = results["rows"][1]
    assert len(row["alarms"]) == 2  # a list for each fold
    silent = {**results, "rows": [{**r, "alarms": [[], []]} for r in results["rows"]]}
    assert "ended with an alarm" not in comparison_markdown(silent)
    alarmed = {**row, "alarms": [[], ["collapse: 100% of the predictions are '8'"]]}
    text = comparison_markdown({**silent, "rows": [silent["rows"][0], alarmed, *silent["rows"][2:]]})
    assert f"`{row['label']}`, fold 1, ended with an alarm: collapse: 100% of the predictions are '8'." in text


def test_a_second_time_nothing_is_trained(compared, monkeypatch):
    folder, results = compared
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    printed = StringIO()
    page = run_digits_study("digits", folder, 1, 3, Console(file=printed, width=200))
    assert "16 of 16 runs are done already" in printed.getvalue()
    assert page.read_text() == comparison_markdown(results)
