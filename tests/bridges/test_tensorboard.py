"""What TensorBoard is given, read back with its own reader."""

import sys

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import TENSORS, EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from doubly.bridges.tensorboard import TensorBoard, bars, scalars
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.rundir import read_metrics
from doubly.training.api import train


def read(folder):
    """(tag -> [(step, value)], steps of the pictures, [(step, text)] of the alarms), as the web page gets them."""
    found = EventAccumulator(str(folder), {TENSORS: 0}).Reload()
    events = {tag: found.Tensors(tag) for tag in found.Tags()["tensors"]}
    images = [event.step for event in events.pop("per_class", [])]
    texts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.pop("alarms/text_summary", [])]
    points = {tag: [(e.step, make_ndarray(e.tensor_proto).item()) for e in kept] for tag, kept in events.items()}
    return points, images, texts


class Heard:
    def __init__(self):
        self.steps, self.rows, self.said = [], [], []

    def step(self, *place):
        self.steps.append(place)

    def row(self, row):
        self.rows.append(row)

    def say(self, sentence):
        self.said.append(sentence)


def row(epoch, per_class=None, alarms=()):
    validation = {
        "sa": 0.9,
        "ra_pgd": 0.5,
        "ra_tail_30": 0.25,
        "ra_margin": 0.4,
        "worst_class": {"name": "a", "ra_pgd": 0.1},
    }
    return {
        "epoch": epoch,
        "loss": 1.0,
        "alarms": list(alarms),
        "validation": {**validation, "per_class": per_class or {"a": 0.1}},
    }


def test_every_number_of_a_run_arrives_and_the_other_watch_hears_all(tiny, tmp_path):
    heard = Heard()
    with TensorBoard(tmp_path / "run" / "tensorboard", heard) as board:
        tiny.train(tiny.run(), tmp_path / "run", watch=board)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    points, images, _ = read(tmp_path / "run" / "tensorboard")
    for tag, key in [("train/loss", "loss"), ("train/lr", "lr"), ("train/weight_ess", "weight_ess")]:
        assert points[tag] == [(r["epoch"], pytest.approx(r[key])) for r in rows], tag
    assert [step for step, _ in points["train/seconds"]] == [0, 1, 2]
    for key in ("sa", "ra_pgd", "ra_tail_30", "ra_margin"):
        assert points[f"validation/{key}"] == [(r["epoch"], pytest.approx(r["validation"][key])) for r in rows[1:]], key
    assert points["validation/worst_class"][1] == (2, pytest.approx(rows[2]["validation"]["worst_class"]["ra_pgd"]))
    for name, value in rows[2]["validation"]["per_class"].items():
        assert points[f"per_class/{name}"][1] == (2, pytest.approx(value))
    assert images == [1, 2]  # where the validation was measured
    assert len(heard.steps) == 3 * tiny.steps and heard.rows == rows


@pytest.mark.parametrize("epochs_lost", [0, 1])
def test_a_resumed_run_has_no_point_twice(tiny, tmp_path, epochs_lost):
    run = tiny.run(epochs=6, save_seconds=1e9)
    folder = tmp_path / "run" / "tensorboard"
    after = 3 * tiny.steps + 2
    with TensorBoard(folder) as board:
        tiny.stopped(run, tmp_path / "run", after, watch=board)
        for lost in range(epochs_lost):  # rows that came after the checkpoint, as a kill leaves them
            board.row(row(3 + lost, {"gone": 0.3}, ["gone"]))
    with TensorBoard(folder) as board:
        tiny.train(run, tmp_path / "run", resume=True, watch=board)
    points, images, texts = read(folder)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert points["train/loss"] == [(r["epoch"], pytest.approx(r["loss"])) for r in rows]
    assert [step for step, _ in points["train/loss"]] == list(range(6))
    assert images == [1, 3, 5] and texts == []
    assert not points.get("per_class/gone")


def test_from_python(tiny, splits, tmp_path):
    with TensorBoard(str(tmp_path)) as board:
        run = tiny.run()
        done = train(
            tiny.model(), splits.train, run.method, test=splits.test, epochs=2, validation=run.validation, watch=board
        )
    assert [r["epoch"] for r in done.metrics] == [0, 1]
    assert read(tmp_path)[0]["train/loss"] == [(r["epoch"], pytest.approx(r["loss"])) for r in done.metrics]


HOSTILE = {"\ud83d half": 0.5, "<script>\n$x": 0.25, "a/b/c": 0.75, "名" * 40: 1.0, "empty": None}


def test_hostile_names_and_alarms_are_only_written(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.row(row(0, HOSTILE, ["collapse: '\ud83d\x1b'"]))
    points, images, texts = read(tmp_path)
    tags = sorted(tag for tag in points if tag.startswith("per_class/"))
    assert tags == ["per_class/<script>?$x", "per_class/? half", "per_class/a/b/c", f"per_class/{'名' * 40}"]
    assert images == [0] and texts == [(0, "collapse: '??'")]


def test_a_thousand_classes_make_a_hundred_curves_and_a_readable_picture():
    classes = {f"c{i}": i / 1000 for i in range(1000)}
    assert sum(tag.startswith("per_class/") for tag in scalars(row(0, classes))) == 100
    height, width, channels = bars(classes, 0).shape
    assert height < 1200 and width < 700 and channels == 3
    assert bars({"none": None}, 0).shape[0] < 300


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "world", lambda: (1, 2))
    heard = Heard()
    TensorBoard(tmp_path / "board", heard).row(row(0))
    assert len(heard.rows) == 1 and not (tmp_path / "board").exists()


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'doubly\[tensorboard\]'"):
        TensorBoard(tmp_path)
