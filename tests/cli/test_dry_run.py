"""doubly train … --dry-run: one line, and nothing else happens."""

import re

import pytest
import torch
from rich.console import Console

from doubly.cli import main
from doubly.jobs.cost import PassTimes

LINE = re.compile(
    r"(?P<method>\S+), (?P<model>\S+), (?P<epochs>\d+) epochs of (?P<data>\S+) \((?P<images>[\d,]+) images\): "
    r"about (?P<passes>\S+) passes per step \((?P<forward>\S+) forward, (?P<backward>\S+) backward\), "
    r"(?P<time>\S+ \w+) on this device \(cpu, (?P<threads>\d+ threads?), \S+ \w+ a step; measured in \d+ s\)\n"
)
SMALL = ["--device", "cpu", "--threads", "1"]


@pytest.fixture
def call(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("doubly.jobs.cost.MAX_SECONDS", 0.01)
    monkeypatch.setattr("doubly.cli.OUT", Console(width=80))
    monkeypatch.setattr("doubly.cli.ERR", Console(width=80, stderr=True))
    threads = torch.get_num_threads()

    def run(*words):
        code = main(["train", *words, *SMALL, "--dry-run"])
        return code, *capfd.readouterr()

    yield run
    torch.set_num_threads(threads)


def test_a_run_is_told_in_one_line_and_nothing_is_written(call, tmp_path):
    code, out, err = call("digits.imbalanced.trades", "--epochs", "7", "--model.width", "2")
    found = LINE.fullmatch(out)
    assert code == 0 and found and not list(tmp_path.iterdir())
    assert err == ""
    assert [found[part] for part in ("method", "model", "epochs", "data", "images")] == [
        *("TRADES", "SmallCNN", "7", "digits", "859")
    ]
    assert [found[part] for part in ("passes", "forward", "backward", "threads")] == ["13", "13", "12", "1 thread"]


def test_without_the_data_the_published_sizes_count_and_it_is_said(call):
    code, out, err = call("cifar10.small.at", "--data.train-images", "None")
    found = LINE.fullmatch(out)
    assert code == 0 and (found["data"], found["images"], found["model"]) == ("CIFAR-10", "50,000", "NarrowResNet")
    assert "doubly data fetch cifar10" in err and "as if the published files were here" in err


def test_data_that_nobody_published_must_be_there(call):
    code, out, err = call("digits.at", "--set", 'data.source={"kind": "dataset.folder", "path": "nowhere"}')
    assert code == 2 and not out and "nowhere" in err and err.count("\n") == 1


def test_the_seconds_are_those_of_the_steps_that_are_left(call, monkeypatch, capfd):
    """Ten milliseconds a pass of an image: 7 steps of 128 images, of 2 passes each; what is measured takes no time."""
    monkeypatch.setattr(
        "doubly.jobs.cost.measure_passes", lambda run, size, threads: PassTimes(0.0, 0.01, 0.01, 128, 1)
    )
    words = ["digits.imbalanced.at", "--model.width", "2", "--epochs", "4", "--validation.size", "1", "--output", "run"]
    words += ["--method.attack.steps", "1", "--validation.attack.steps", "1"]
    assert LINE.fullmatch(call(*words)[1])["time"] == f"{4 * 7 * 128 * 2 * 0.01:.0f} s"
    assert main(["train", *words, *SMALL]) == 0
    capfd.readouterr()
    left = LINE.fullmatch(call(*words, "--resume")[1])
    assert (left["epochs"], left["time"]) == ("0", "0 s")
