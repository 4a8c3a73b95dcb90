"""doubly watch: runs that are finished, training, empty, broken, with hostile names, and very large."""

import io
import json
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from doubly.cli.watch import watch
from doubly.cli.watched_run import sparkline
from doubly.rundir import RunDir, append_metrics, write_json

HOSTILE = ["[red]no[/] [/nothing]", "\x1b[2Jcleared\r\n", "\ud83d half", "<script>", "猫" * 30, "x" * 500]


def row(epoch, validation=True, classes=None, **fields):
    classes = {"cat": 0.1, "deer": None, "frog": 0.725} if classes is None else classes
    metrics = {"on": "test", "n": 50, "sa": 0.5 + epoch / 100, "ra_pgd": 0.4, "ra_tail_30": 0.1, "per_class": classes}
    common = {"epoch": epoch, "loss": 2.0 / (epoch + 1), "lr": 0.1, "seconds": 30.0, "weight_ess": 0.9, "alarms": []}
    return {**common, **({"validation": metrics} if validation else {}), **fields}


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a run directory with these rows."""

    def call(folder="digits.at-s3", rows=(), epochs=10, name="digits.at"):
        path = tmp_path / folder
        path.mkdir()
        write_json(path / "config.json", {"name": name, "seed": 3, "epochs": epochs})
        if rows:
            (path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
        return path

    return call


def output(*words, width=80, **settings):
    out = Console(file=io.StringIO(), width=width, **settings)
    assert watch([str(word) for word in words], out, out) == 0
    return out.file.getvalue()


def test_a_sparkline_goes_from_lowest_to_highest_in_at_most_width_blocks():
    for values, width, expected in [
        (range(8), 10, "▁▂▃▄▅▆▇█"),
        ([3.0, 1.0], 10, "█▁"),
        ([1, 1, 5, 5], 2, "▁█"),
        ([2.0], 5, "▄"),
        ([1e300, -1e300], 5, "█▁"),
    ]:
        assert sparkline(values, width) == expected
    assert len(sparkline(range(1000), 40)) == 40


def test_a_run_in_training(make):
    alarms = [row(i, seconds=500.0 if i == 0 else 30.0, alarms=[f"alarm {i}"], validation=i != 1) for i in range(5)]
    lines = output(make(rows=alarms)).splitlines()
    assert lines[0] == "digits.at, seed 3"
    assert lines[1] == "epoch 5 of 10, about 2 min left"  # by the median: the first epoch was slow
    assert lines[2:6] == ["! and 2 earlier alarms", *(f"! epoch {i + 1}: alarm {i}" for i in (2, 3, 4))]
    for label, values in [
        ("training loss", "2 → 0.4 0.4"),
        ("learning rate", "0.1 → 0.1"),
        ("SA", "50.0% → 54.0% 54.0%"),
        ("RA-PGD", "40.0% → 40.0% 40.0%"),
        ("RA-Tail-30", "10.0% → 10.0% 10.0%"),
        ("effective sample size", "0.90 → 0.90"),
        ("seconds per epoch", "500.0 → 30.0"),
    ]:
        (line,) = [line for line in lines if line.strip().startswith(label)]
        assert " ".join(line.split()).endswith(f" {values}"), line
    assert lines[-2] == "weakest of 2 classes under PGD: cat 10.0%, frog 72.5% (test, n = 50)"


def test_several_runs_are_shown_once_each_and_those_in_training_first(make, tmp_path):
    finished = make("a", rows=[row(0)], epochs=1)
    with (finished / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 1, "lo')  # half-written
    make("b", rows=[row(0), row(1)], epochs=2000)
    make("c")
    lines = output(tmp_path, finished).splitlines()
    titles = [line for line in lines if line.startswith("digits.at")]
    assert titles == [f"digits.at, seed 3 in {name}" for name in "bca"]
    assert {"epoch 2 of 2000, about 16.6 h left", "waiting for the first epoch", "epoch 1 of 1, done in 30 s"} <= {
        *lines
    }


def test_broken_files_and_wrong_arguments_are_refused(cli, make):
    for words, message in [
        (["."], "not a run and contains none"),
        (["nowhere"], "not a run and contains none"),
        ([], "name the runs to watch"),
        ([".", "--every", "0"], "at least 1 second"),
    ]:
        code, out, err = cli("watch", *words)
        assert (code, out) == (2, "") and message in err
    path = make()
    for file, text, message in [
        ("metrics.jsonl", "{}\nno\n{}\n", "line 2 is not a row"),
        ("config.json", "[]", "not named fields"),
        ("config.json", "{", "not valid JSON"),
    ]:
        (path / file).write_text(text)
        code, out, err = cli("watch", path)
        assert code == 2 and message in err and "Traceback" not in err + out


def test_rows_from_other_programs_do_not_stop_it(make):
    odd = [
        {},
        {"loss": "x", "validation": 3, "alarms": 1},
        {"loss": 10**400, "validation": {"per_class": []}},
        {"loss": math.nan, "validation": {"per_class": {"a": math.inf}}},
    ]
    assert output(make(rows=odd, epochs="many")).splitlines() == ["digits.at, seed 3", "epoch 4", ""]
    assert "training loss" in output(make("one", rows=[*odd, row(4)], epochs=[]))


def test_hostile_names_are_only_output(make, tmp_path):
    alarms = [f"'{HOSTILE[1]}' {HOSTILE[0]}"]
    make("[bold]x", [row(0, classes=dict.fromkeys(HOSTILE, 0.5), alarms=alarms)], name=HOSTILE[0])
    text = output(tmp_path)
    assert "[red]no[/] [/nothing]" in text and "in [bold]x" in text and "<script>" in text
    assert "\x1b" not in text and "?[2Jcleared??" in text
    text.encode()


def test_a_very_large_run_stays_readable(make, tmp_path):
    classes = {f"class {i:04} with a long name, 名前": i / 1000 for i in reversed(range(1000))}
    rows = [row(i, validation=i % 1000 == 999, classes=classes, loss=12345.678 + i) for i in range(5000)]
    make(rows=rows, epochs=5000)
    for width in (40, 80, 200):
        text = output(tmp_path, width=width)
        lines = text.splitlines()
        assert max(map(cell_len, lines)) <= width and len(lines) <= 40
        assert "weakest of 1,000 classes" in text and "class 0000" in text and "class 0005" not in text


def test_it_updates_until_the_run_is_complete(make, monkeypatch):
    path = make(epochs=3)
    pauses = []

    def sleep(seconds):
        append_metrics(RunDir(path), row(len(pauses)))
        pauses.append(seconds)

    monkeypatch.setattr("doubly.cli.watch.time.sleep", sleep)
    text = output(path, "--every", 7, force_terminal=True, height=30, _environ={})
    assert pauses == [7, 7, 7] and "waiting for the first epoch" in text
    assert all(f"epoch {done} of 3" in text for done in (1, 2, 3)) and "done in" in text
    assert "epoch" in output(make("new"), "--once", force_terminal=True) and len(pauses) == 3


def test_ctrl_c_ends_it_without_a_message(cli, make, monkeypatch):
    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("doubly.cli.watch.time.sleep", sleep)
    monkeypatch.setattr("doubly.cli.OUT", Console(force_terminal=True))
    code, _, err = cli("watch", make())
    assert (code, err) == (130, "")
