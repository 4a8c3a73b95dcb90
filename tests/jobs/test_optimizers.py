"""Another optimizer than SGD, named in the configuration: it trains, resumes to the same bits, and can be searched."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from doubly.config import AdamW
from doubly.config.serialize import with_change, with_changes
from doubly.errors import Interrupted
from doubly.jobs.search import Search, run_searches
from doubly.recipes import recipe
from doubly.training.loop import train_run

TINY = {"epochs": 1, "batch_size": 256, "model.width": 2, "method.attack.steps": 1, "validation.attack.steps": 1}


@pytest.fixture(scope="module")
def adamw():
    """digits.at as `--set optimizer=optimizer.adamw` makes it."""
    run = with_changes(with_change(recipe("digits.at"), "optimizer", "optimizer.adamw"), TINY)
    assert run.optimizer == AdamW()
    return replace(run, device="cpu")


def test_adamw_resumes_to_the_same_bits(adamw, tmp_path, saved_run):
    train_run(adamw, tmp_path / "whole")
    steps = iter(range(100))
    with pytest.raises(Interrupted):
        train_run(adamw, tmp_path / "stopped", stop=lambda: next(steps) == 2)
    assert saved_run(tmp_path / "stopped") != saved_run(tmp_path / "whole")
    train_run(adamw, tmp_path / "stopped", resume=True)
    stopped = saved_run(tmp_path / "stopped")
    assert stopped == saved_run(tmp_path / "whole")
    assert {"state/optimizer/0/exp_avg", "state/optimizer/0/exp_avg_sq"} <= stopped.tensors.keys()
    assert stopped.rows[0]["lr"] == pytest.approx(adamw.optimizer.lr.at(5 / 6))  # of the last of six steps


def test_the_learning_rate_of_adamw_can_be_searched(adamw, tmp_path, inline):
    search = Search(adamw, {"optimizer.lr.peak": [1e-4, 1e-2]}, tmp_path, trials=2, splits=1)
    (result,) = run_searches([search], 1, Console(file=StringIO()))
    assert {row["changes"]["optimizer.lr.peak"] for row in result["trials"]} == {1e-4, 1e-2}
    assert all(row["holdouts"][0]["n"] == 359 for row in result["trials"])
    best = with_changes(adamw, result["winner"]).optimizer
    assert type(best) is AdamW and best.lr.peak == result["winner"]["optimizer.lr.peak"]
