"""doubly train --tensorboard."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from doubly.rundir import read_metrics

WORDS = ["train", "digits.imbalanced.done_pgd", "--model.width", 2, "--method.attack.steps", 1, "--epochs", 2]
SMALL = [
    *WORDS,
    "--validation.attack.steps",
    1,
    "--validation.size",
    20,
    "--threads",
    1,
    "--device",
    "cpu",
    "--output",
    "run",
]


def test_curves_stand_beside_the_metrics(here, tmp_path):
    code, out, err = here(*SMALL, "--tensorboard")
    assert (code, err) == (0, "") and "epoch 2: loss" in out
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [row["epoch"] for row in rows] == [0, 1]
    assert [event.value for event in board.Scalars("train/r")] == pytest.approx([row["r"] for row in rows])
    assert [event.step for event in board.Images("per_class")] == [1]


def test_without_the_package_nothing_is_begun(here, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err = here(*SMALL, "--tensorboard")
    assert code == 2 and "pip install 'doubly[tensorboard]'" in err and not (tmp_path / "run").exists()
