"""doubly train … --dry-run."""

import re

import pytest

from doubly.jobs.cost import PassTimes

LINE = re.compile(
    r"(?P<method>\S+), (?P<model>\S+), (?P<epochs>\d+) epochs of (?P<data>\S+) \((?P<images>[\d,]+) images\): "
    r"about (?P<passes>\S+) passes per step \((?P<forward>\S+) forward, (?P<backward>\S+) backward\), "
    r"(?P<time>\S+ \w+) on this device \(cpu, (?P<threads>\d+ threads?), \S+ \w+ per step; measured in \d+ s\)\n"
)
SMALL = ["--device", "cpu", "--threads", "1"]


@pytest.fixture
def dry_run(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr("doubly.jobs.cost.MAX_SECONDS", 0.01)
    return lambda *words: cli("train", *words, *SMALL, "--dry-run")


def test_the_estimate_is_one_line_and_nothing_is_written(dry_run, tmp_path):
    code, out, err = dry_run("digits.imbalanced.trades", "--epochs", "7", "--model.width", "2")
    line = LINE.fullmatch(out)
    assert (code, err) == (0, "") and line and not list(tmp_path.iterdir())
    assert line.group("method", "model", "epochs", "data", "images") == ("TRADES", "SmallCNN", "7", "digits", "859")
    assert line.group("passes", "forward", "backward", "threads") == ("13", "13", "12", "1 thread")


def test_without_the_data_the_published_sizes_count_with_a_message(dry_run):
    code, out, err = dry_run("cifar10.small.at", "--data.train-images", "None")
    assert LINE.fullmatch(out).group("data", "images", "model") == ("CIFAR-10", "50,000", "NarrowResNet")
    assert code == 0 and "doubly data fetch cifar10" in err and "as if the published files were here" in err
    code, out, err = dry_run("digits.at", "--set", 'data.source={"kind": "dataset.folder", "path": "nowhere"}')
    assert (code, out) == (2, "") and "nowhere" in err and err.count("\n") == 1  # there is no such download


def test_the_seconds_are_those_of_the_steps_that_are_left(dry_run, cli, monkeypatch):
    """Ten milliseconds per pass of an image: 7 steps of 128 images, of 2 passes each; validations take no time."""

    def set_pass_seconds(seconds):
        times = PassTimes(0, seconds, seconds, 128, 1)
        monkeypatch.setattr("doubly.cli.dry_run.measure_passes", lambda run, size, threads: times)

    set_pass_seconds(0.01)
    words = ["digits.imbalanced.at", "--model.width", "2", "--epochs", "4", "--validation.size", "1", "--output", "run"]
    words += ["--method.attack.steps", "1", "--validation.attack.steps", "1"]
    assert LINE.fullmatch(dry_run(*words).out)["time"] == f"{4 * 7 * 128 * 2 * 0.01:.0f} s"
    assert cli("train", *words, *SMALL)[0] == 0
    assert LINE.fullmatch(dry_run(*words, "--resume").out).group("epochs", "time") == ("0", "0 s")
    set_pass_seconds(10)
    assert ", 43 min per step;" in dry_run(*words).out
