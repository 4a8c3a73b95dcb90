"""Lines and bars during training and evaluation."""

from io import StringIO

from rich.console import Console
from rich.progress import Progress

from doubly.cli.progress import ProgressBar, ProgressLines, describe_epoch, terminal_progress

ROW = {"epoch": 4, "loss": 1.23456, "lr": 0.05}
VALIDATION = {"on": "holdout", "n": 20, "sa": 0.5, "ra_pgd": 0.25, "ra_tail_30": 0.125}


def test_a_row_is_one_line():
    assert describe_epoch(ROW) == "epoch 5: training loss 1.23, learning rate 0.05"
    weighted = {**ROW, "r": 0.1, "weight_ess": 0.5, "weight_mean": 1.0, "alarms": []}
    assert describe_epoch(weighted) == f"{describe_epoch(ROW)}, r 0.1, effective sample size 0.50"
    text = describe_epoch({**ROW, "validation": VALIDATION})
    assert text == f"{describe_epoch(ROW)} | holdout (n = 20): SA 50.0%, RA-PGD 25.0%, RA-Tail-30 12.5%"


def test_files_get_lines_for_messages_validations_and_attacks():
    out = StringIO()
    with terminal_progress(Console(file=out), epochs=5) as callback:
        callback.on_message("a message with [markup]")
        callback.on_step(0, 1, 10), callback.on_images(1, 2), callback.on_time_left(3.0)
        callback.on_epoch(ROW)
        callback.on_epoch({**ROW, "validation": VALIDATION})
        callback.on_attack(0, 4, "apgd-ce", 12, None)
        callback.on_attack(1, 4, "square", 3, 30.0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "a message with [markup]" and lines[1].startswith("epoch 5: ")
    assert lines[2:] == ["chunk 1 of 4, apgd-ce: 12 robust", "chunk 2 of 4, square: 3 robust, about 30 s left"]
    assert type(callback) is ProgressLines


def test_terminals_get_bars_too():
    console = Console(file=StringIO(), force_terminal=True)
    with terminal_progress(console, epochs=5) as callback:
        assert isinstance(callback, ProgressBar)
    with terminal_progress(console, bars=False) as callback:  # another process than the first
        assert type(callback) is ProgressLines
    bars = Progress(console=console)
    callback = ProgressBar(console, bars, epochs=5)
    callback.on_step(2, 3, 10)
    callback.on_images(100, 360)
    callback.on_time_left(None)
    callback.on_time_left(30.0)
    assert [(task.completed, task.total) for task in bars.tasks] == [(23, 50), (100, 360), (0, None)]
    assert bars.tasks[2].description == "AutoAttack, about 30 s left"
