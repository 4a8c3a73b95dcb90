from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from doubly.cli import main
from doubly.data import Digits
from doubly.evaluation.intervals import bootstrap_difference
from doubly.jobs.search import Search, with_changes
from doubly.methods import METHODS as KINDS
from doubly.recipes.digits import FAST, METHODS, unsearched
from doubly.report.study import comparison_markdown
from doubly.rundir import read_json
from doubly.studies import digits_comparison, digits_study
from doubly.studies.digits_comparison import OWN, arms, comparison, searches

ALL = (*METHODS, *FAST)
RECIPES = [f"digits.{prefix}{method}" for prefix in ("imbalanced.", "") for method in ALL]


def test_every_method_of_the_table_is_compared():
    compared = {type(method) for method in (*METHODS.values(), *FAST.values())}
    assert compared == set(KINDS.values())


def test_every_method_gets_the_same_small_search():
    found = searches(Path("study"))
    assert list(found) == RECIPES
    for search in found.values():
        assert (search.trials, search.splits, search.holdout) == (6, 1, 0.25) and search.base.epochs <= 30
        assert {"optimizer.lr.peak", "optimizer.weight_decay"} <= set(search.space)
        assert len(search.candidates()) == 6
        assert search.base.data.source == Digits(0, 5)
    # What a method has of its own is a field that it has.
    for method in ALL:
        for path, values in OWN.get(method, {}).items():
            for value in values:
                assert with_changes(unsearched(method, True), {path: value}) is not None


def test_no_earlier_choice_enters_a_search():
    for method in ALL:
        run = unsearched(method, True)
        assert (run.optimizer.lr.peak, run.optimizer.weight_decay) == (0.1, 5e-4)
        assert run.method == {**METHODS, **FAST}[method]


def test_the_first_row_of_each_table_is_the_plain_one():
    rows = arms({name: {} for name in RECIPES})
    tables = dict.fromkeys(arm.table for arm in rows)
    assert list(tables) == ["imbalanced", "balanced", "fast, imbalanced", "fast, balanced"]
    heads = {table: next(arm.label for arm in rows if arm.table == table) for table in tables}
    assert heads == {table: "fast_at" if "fast" in table else "at" for table in tables}
    assert len(rows) == 2 * len(ALL)
    assert {arm.run.epochs for arm in rows if arm.table.startswith("fast")} == {25}


TINY = {"batch": 64, "model.width": 4, "validation.attack.steps": 1, "validation.size": 20}


@pytest.fixture(scope="module")
def compared(inline, tmp_path_factory):
    """(folder, results) of two methods in each table, with one epoch each."""
    tiny = {**TINY, "method.attack.steps": 2}
    small = {"at": METHODS["at"], "gairat": METHODS["gairat"]}
    quick = {"fast_at": FAST["fast_at"], "n_fgsm": FAST["n_fgsm"]}
    folder = tmp_path_factory.mktemp("comparison")

    def shrunk(method, imbalanced):
        run = unsearched(method, imbalanced)
        return with_changes(run, {**(TINY if method in quick else tiny), "epochs": 1})

    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in [
            (digits_comparison, "METHODS", small),
            (digits_comparison, "FAST", quick),
            (digits_comparison, "unsearched", shrunk),
            (digits_comparison, "TRIALS", 1),
            (digits_comparison, "Search", partial(Search)),
            (digits_study, "FOLDS", 2),
            (digits_comparison, "FOLDS", 2),
            (digits_study, "bootstrap_difference", partial(bootstrap_difference, resamples=50)),
        ]:
            patch.setattr(module, name, value)
        yield folder, comparison(folder, 1, Console(file=StringIO()))


def test_it_ends_in_results_winners_and_a_table(compared, capfd):
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


def test_an_alarm_at_the_end_of_a_run_stands_below_the_table(compared):
    _, results = compared
    row = results["rows"][1]
    assert len(row["alarms"]) == 2  # a list for each fold
    silenced = {**results, "rows": [{**r, "alarms": [[], []]} for r in results["rows"]]}
    assert "ended with an alarm" not in comparison_markdown(silenced)
    said = {**row, "alarms": [[], ["collapse: 100% of the answers are '8'"]]}
    text = comparison_markdown({**silenced, "rows": [silenced["rows"][0], said, *silenced["rows"][2:]]})
    assert f"`{row['label']}`, fold 1, ended with an alarm: collapse: 100% of the answers are '8'." in text


def test_the_command_skips_what_is_done(compared, monkeypatch, capfd):
    folder, results = compared
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    assert main(["reproduce", "digits", "--output", str(folder), "--jobs", "1"]) == 0
    out, _ = capfd.readouterr()
    assert "16 of 16 runs are done already" in out
    assert (folder / "results.md").read_text() == comparison_markdown(results)
