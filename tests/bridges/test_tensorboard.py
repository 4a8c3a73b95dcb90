"""What TensorBoard is given, read back with its own reader."""

import sys
from dataclasses import replace

import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import TENSORS, EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.bridges.tensorboard import TensorBoard, bars, scalars
from doubly.config import Validation
from doubly.config.serialize import with_changes
from doubly.errors import Interrupted, UsageError
from doubly.methods import Standard
from doubly.recipes import recipe
from doubly.rundir import read_metrics
from doubly.threat import LinfBall
from doubly.training.api import train
from doubly.training.loop import train_run

SMALL = {"batch_size": 512, "model.width": 2, "validation.every": 2, "validation.size": 20, "device": "cpu"}


@pytest.fixture(scope="module")
def run():
    return with_changes(replace(recipe("digits.at"), method=Standard()), {**SMALL, "validation.attack.steps": 1})


def read(folder):
    """Return curves as tag -> [(step, value)], the steps of pictures, and alarms as [(step, text)]."""
    events = EventAccumulator(str(folder), {TENSORS: 0}).Reload()
    tensors = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    images = [event.step for event in tensors.pop("per_class", [])]
    alarms = [
        (event.step, event.tensor_proto.string_val[0].decode()) for event in tensors.pop("alarms/text_summary", [])
    ]
    curves = {tag: [(e.step, make_ndarray(e.tensor_proto).item()) for e in points] for tag, points in tensors.items()}
    return curves, images, alarms


def row(epoch, per_class=None, alarms=()):
    accuracies = {"sa": 0.9, "ra_pgd": 0.5, "ra_tail_30": 0.25, "ra_margin": 0.4}
    worst = {"worst_class": {"name": "a", "ra_pgd": 0.1}, "per_class": per_class or {"a": 0.1}}
    return {"epoch": epoch, "loss": 1.0, "alarms": list(alarms), "validation": {**accuracies, **worst}}


def test_every_metric_of_a_run_is_written(run, tmp_path):
    train_run(replace(run, epochs=3), tmp_path, callbacks=[TensorBoard.in_run_dir(tmp_path)])
    rows = read_metrics(tmp_path / "metrics.jsonl")
    curves, images, _ = read(tmp_path / "tensorboard")
    for key in ("loss", "lr", "weight_ess"):
        assert curves[f"train/{key}"] == [(r["epoch"], pytest.approx(r[key])) for r in rows], key
    assert [step for step, _ in curves["train/seconds"]] == [0, 1, 2]
    for key in ("sa", "ra_pgd", "ra_tail_30", "ra_margin"):
        assert curves[f"validation/{key}"] == [(r["epoch"], pytest.approx(r["validation"][key])) for r in rows[1:]], key
    assert curves["validation/worst_class"][1] == (2, pytest.approx(rows[2]["validation"]["worst_class"]["ra_pgd"]))
    for name, value in rows[2]["validation"]["per_class"].items():
        assert curves[f"per_class/{name}"][1] == (2, pytest.approx(value))
    assert images == [1, 2]  # after each validation


def test_a_resumed_run_has_no_point_twice(run, tmp_path):
    run, steps = replace(run, epochs=6, save_seconds=1e9), iter(range(100))
    board = TensorBoard.in_run_dir(tmp_path)
    with pytest.raises(Interrupted):
        train_run(run, tmp_path, callbacks=[board], stop=lambda: next(steps) == 3 * 3 + 1)
    board.on_epoch(row(3, {"gone": 0.3}, ["gone"]))  # of an epoch after the checkpoint, as a kill leaves it
    board.close()
    train_run(run, tmp_path, resume=True, callbacks=[board])
    curves, images, alarms = read(tmp_path / "tensorboard")
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert curves["train/loss"] == [(r["epoch"], pytest.approx(r["loss"])) for r in rows]
    assert [step for step, _ in curves["train/loss"]] == list(range(6))
    assert images == [1, 3, 5] and "gone" not in [text for _, text in alarms]
    assert not curves.get("per_class/gone")


def test_it_is_a_callback_of_train(tmp_path):
    x = torch.rand(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    data = (x, torch.arange(30) % 3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    validation = Validation(attack=PGD(LinfBall(0.1), 1, SignStep(0.1)))
    result = train(
        model, data, Standard(), test=data, epochs=2, validation=validation, callbacks=[TensorBoard(str(tmp_path))]
    )
    assert read(tmp_path)[0]["train/loss"] == [(r["epoch"], pytest.approx(r["loss"])) for r in result.metrics]


HOSTILE = {"\ud83d half": 0.5, "<script>\n$x": 0.25, "a/b/c": 0.75, "名" * 40: 1.0, "empty": None}


def test_hostile_names_and_alarms_are_only_written(tmp_path):
    board = TensorBoard(tmp_path)
    board.on_epoch(row(0, HOSTILE, ["collapse: '\ud83d\x1b'"]))
    board.close()
    curves, images, alarms = read(tmp_path)
    tags = sorted(tag for tag in curves if tag.startswith("per_class/"))
    assert tags == ["per_class/<script>?$x", "per_class/? half", "per_class/a/b/c", f"per_class/{'名' * 40}"]
    assert images == [0] and alarms == [(0, "collapse: '??'")]


def test_many_classes_make_a_hundred_curves_and_a_readable_picture():
    classes = {f"c{i}": i / 1000 for i in range(1000)}
    assert sum(tag.startswith("per_class/") for tag in scalars(row(0, classes))) == 100
    height, width, channels = bars(classes, 0).shape
    assert height < 1200 and width < 700 and channels == 3
    assert bars({"none": None}, 0).shape[0] < 300


def test_without_the_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'doubly\[tensorboard\]'"):
        TensorBoard(tmp_path)
