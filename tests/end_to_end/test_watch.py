"""doubly watch: runs that are finished, at work, empty, broken, hostile, huge."""

import io
import json
import math
import subprocess
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console

from doubly.cli.frames import frame
from doubly.cli.watch import look, watch
from doubly.rundir import RunDir, append_metrics, write_json


def row(epoch, validation=True, classes=None, **more):
    classes = {"cat": 0.1, "deer": None, "frog": 0.725} if classes is None else classes
    measured = {"on": "test", "n": 50, "sa": 0.5 + epoch / 100, "ra_pgd": 0.4, "ra_tail_30": 0.1, "per_class": classes}
    found = {"epoch": epoch, "loss": 2.0 / (epoch + 1), "lr": 0.1, "seconds": 30.0, "weight_ess": 0.9, "alarms": []}
    return {**found, **({"validation": measured} if validation else {}), **more}


@pytest.fixture
def make(tmp_path):
    """A run directory with these rows."""

    def call(folder="digits.at-s3", rows=(), epochs=10, name="digits.at"):
        path = tmp_path / folder
        path.mkdir()
        write_json(path / "config.json", {"name": name, "seed": 3, "epochs": epochs})
        if rows:
            (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
        return path

    return call


def shown(*words, width=80, **settings):
    out = Console(file=io.StringIO(), width=width, **settings)
    assert watch([str(word) for word in words], out) == 0
    return out.file.getvalue()


def test_a_run_at_work(make):
    alarm = row(3, alarms=["collapse: all answers are 'cat'"])
    text = shown(make(rows=[row(0, seconds=500.0), row(1, validation=False), row(2), alarm]))
    lines = text.splitlines()
    assert lines[0] == "digits.at, seed 3"
    assert lines[1].endswith(" epoch 4 of 10, about 3 min left")  # by the median: the first epoch was slow
    assert lines[1].count("━") == 16 and lines[1].count("─") == 24
    for label, values in [
        ("training loss", "2 → 0.5 ▼0.5"),
        ("learning rate", "0.1 → 0.1 ▲0.1"),
        ("SA", "50.0 → 53.0 % ▲53.0"),
        ("RA-PGD", "40.0 → 40.0 % ▲40.0"),
        ("RA-Tail-30", "10.0 → 10.0 % ▲10.0"),
        ("eff. sample size", "0.90 → 0.90 ▼0.90"),
    ]:
        assert any(label in line and values in line for line in lines), label
    at = next(i for i, line in enumerate(lines) if line.startswith("RA-PGD of classes"))
    assert lines[at].endswith("test, n = 50")
    assert [line.split()[:2] for line in lines[at + 1 : at + 3]] == [["cat", "10.0"], ["frog", "72.5"]]
    assert "! epoch 4: collapse: all answers are 'cat'" in lines


def test_a_run_that_is_done_and_its_half_written_end(make):
    path = make(rows=[row(0), row(1)], epochs=2)
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 2, "lo')
    assert "epoch 2 of 2, done in 60 s" in shown(path)


def test_many_alarms_leave_the_last_three(make):
    lines = shown(make(rows=[row(i, alarms=[f"alarm {i}"]) for i in range(9)])).splitlines()
    assert lines[-4:] == ["! and 6 earlier alarms", "! epoch 7: alarm 6", "! epoch 8: alarm 7", "! epoch 9: alarm 8"]


def test_a_run_without_rows_waits(make):
    assert shown(make()).splitlines() == ["digits.at, seed 3", "waiting for the first epoch"]


def test_a_folder_is_its_runs_those_at_work_first(make, tmp_path):
    make("a", rows=[row(0)], epochs=1)
    make("b", rows=[row(0), row(1)], epochs=2000)
    make("c")
    lines = shown(tmp_path, tmp_path / "a").splitlines()  # a named twice is shown once
    titles = [line for line in lines if line.startswith("digits.at")]
    assert titles == [f"digits.at, seed 3 in {name}" for name in "bca"]
    assert "waiting for the first epoch" in lines and any("about 16.6 h left" in line for line in lines)
    assert "weakest classes  cat 10 %, frog 72 %" in lines


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", "[]", "not named fields"),
        ("config.json", "{", "not valid JSON"),
        ("metrics.jsonl", "{}\nno\n{}\n", "line 2 is not a row"),
    ],
)
def test_broken_files_are_told(here, make, file, text, said):
    path = make()
    (path / file).write_text(text)
    code, out, err = here("watch", path)
    assert code == 2 and said in err and "Traceback" not in err + out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["."], "not a run and contains none"),
        (["nowhere"], "not a run and contains none"),
        ([], "name what to watch"),
        ([".", "--every", "0"], "at least 1 second"),
    ],
)
def test_what_is_no_run_is_refused(here, words, said):
    code, out, err = here("watch", *words)
    assert (code, out) == (2, "") and said in err


def test_rows_of_another_making_do_not_stop_it(make):
    odd = [
        {},
        {"loss": "x", "validation": 3, "alarms": 1},
        {"loss": 10**400, "validation": {"per_class": []}},
        {"loss": math.nan, "validation": {"per_class": {"a": math.inf}}},
    ]
    assert shown(make(rows=odd, epochs="many")).splitlines() == ["digits.at, seed 3", "epoch 4"]
    assert "training loss" in shown(make("one", rows=[*odd, row(4)], epochs=[]))


HOSTILE = ["[red]no[/] [/nothing]", "\x1b[2Jcleared\r\n", "\ud83d half", "<script>", "猫" * 30, "x" * 500]


@pytest.mark.parametrize("several", [False, True])
def test_hostile_names_are_only_shown(make, tmp_path, several):
    alarms = [f"'{HOSTILE[1]}' {HOSTILE[0]}"]
    make("[bold]x", [row(0, classes=dict.fromkeys(HOSTILE, 0.5), alarms=alarms)], name=HOSTILE[0])
    if several:
        make("z")
    text = shown(tmp_path)
    assert "[red]no[/] [/nothing]" in text and "in [bold]x" in text
    assert "\x1b" not in text and "?[2Jcleared??" in text
    text.encode()


@pytest.mark.parametrize("width", [40, 57, 80, 119, 120, 200])
@pytest.mark.parametrize("several", [False, True])
def test_a_huge_run_stays_readable(make, tmp_path, width, several):
    classes = {f"class {i:04} with a long name, 名前": i / 1000 for i in reversed(range(1000))}
    rows = [row(i, validation=i % 1000 == 999, classes=classes, loss=12345.678 + i) for i in range(5000)]
    make(rows=rows, epochs=5000)
    if several:
        make("other", rows=rows[:20])
    text = shown(tmp_path, width=width)
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width and len(lines) <= 60
    assert "class 0000" in text and "class 0010" not in text
    assert several or "10 weakest of 1,000 classes" in text


def test_it_looks_again_until_the_run_is_complete(make, monkeypatch):
    path = make(epochs=3)
    naps = []

    def sleep(seconds):
        append_metrics(RunDir(path), row(len(naps)))
        naps.append(seconds)

    monkeypatch.setattr("doubly.cli.watch.time.sleep", sleep)
    text = shown(path, "--every", 7, force_terminal=True, height=24, _environ={})
    assert naps == [7, 7, 7] and "waiting for the first epoch" in text
    assert all(f"epoch {done} of 3" in text for done in (1, 2, 3)) and "done in" in text
    assert "epoch" in shown(make("new"), "--once", force_terminal=True) and len(naps) == 3


@pytest.mark.parametrize("height", [24, 31, 32, 50])
def test_a_screen_holds_all_of_one_run(make, height):
    rows = [row(i, classes={f"c{j}": j / 20 for j in range(20)}, alarms=["oh " * 40]) for i in range(2)]
    out = Console(file=io.StringIO(), width=80)
    out.print(frame(look([make(rows=rows)]), 80, height - 1))
    text = out.file.getvalue()
    assert text.count("\n") < height and "c2" in text and "! epoch 2" in text
    assert height < 50 or "c9" in text


def test_ctrl_c_ends_it_quietly(here, make, monkeypatch):
    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("doubly.cli.watch.time.sleep", sleep)
    monkeypatch.setattr("doubly.cli.OUT", Console(force_terminal=True))
    code, _, err = here("watch", make())
    assert (code, err) == (130, "")


def test_it_starts_without_torch(make):
    script = "import sys; from doubly.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    words = [sys.executable, "-c", script, "watch", make(rows=[row(0)]), "--every", "1"]
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0 and "epoch 1 of 10" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
