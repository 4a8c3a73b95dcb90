"""Runs that were stopped: they end with the bits of a run that was not."""

import errno
import os
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from doubly.attacks import PGD
from doubly.callbacks import Callback
from doubly.checkpoints.files import seal_checkpoint
from doubly.config import serialize
from doubly.errors import UsageError
from doubly.methods import DONE, WAT, DONEClass, Method
from doubly.rundir import read_json, read_metrics, sha256
from doubly.threat import LinfBall
from doubly.types import Objective


def rows_of(output):
    rows = read_metrics(output / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in ("seconds", "peak_memory")} for row in rows]


def dropout():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Dropout(0.5), nn.ReLU(), nn.Linear(12, 3))


def batch_norm():
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, 3)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("network", "ema_decay"), [(dropout, None), (batch_norm, 0.9)], ids=["plain", "averaged"])
def test_a_run_stopped_at_any_step_ends_with_the_same_bits(tiny, tmp_path, same_bits, network, ema_decay):
    tiny.network = network
    # 3 steps per epoch, the best of 2 validations
    run = tiny.run(DONE(tiny.attack, cap=3.0), holdout=0.2, ema_decay=ema_decay)
    tiny.train(run, tmp_path / "whole")
    for after in range(1, 9):
        output = tmp_path / str(after)
        tiny.stopped(run, output, after)
        tiny.train(run, output, resume=True)
        for name in ("last", "best"):
            tensors, info = tiny.checkpoint(output, name)
            expected, expected_info = tiny.checkpoint(tmp_path / "whole", name)
            assert same_bits(tensors, expected), f"stopped after step {after}"
            assert {**info, "checksums": 0, "seconds": 0} == {**expected_info, "checksums": 0, "seconds": 0}
        assert rows_of(output) == rows_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "method",
    [WAT(PGD(LinfBall(0.1), 2, start="gaussian")), DONEClass(driver="holdout", interval=2)],
    ids=["wat", "class"],
)
def test_a_run_that_learns_from_held_out_images_ends_with_the_same_bits(tiny, tmp_path, same_bits, method):
    run = tiny.run(method, holdout=0.3)  # 3 steps per epoch
    tiny.train(run, tmp_path / "whole")
    for _ in range(8):
        tiny.stopped(run, tmp_path / "parts", after=1, resume=True)
    tiny.train(run, tmp_path / "parts", resume=True)
    assert same_bits(tiny.checkpoint(tmp_path / "whole")[0], tiny.checkpoint(tmp_path / "parts")[0])
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "parts")


def test_a_run_stopped_in_every_step_ends_with_the_same_bits(tiny, tmp_path, same_bits, adversarial):
    tiny.network = dropout
    run = tiny.run(adversarial)
    tiny.train(run, tmp_path / "whole")
    for _ in range(12):
        tiny.stopped(run, tmp_path / "parts", after=1, resume=True)
    tiny.train(run, tmp_path / "parts", resume=True)
    assert same_bits(tiny.checkpoint(tmp_path / "whole")[0], tiny.checkpoint(tmp_path / "parts")[0])
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "parts")


class Crashing(Callback):
    """Raises after a step or an epoch."""

    def __init__(self, step=None, epoch=None):
        self.step, self.epoch = step, epoch

    def on_step(self, epoch, step, steps):
        if (epoch, step) == self.step:
            raise RuntimeError("power cut")

    def on_epoch(self, row):
        if row["epoch"] == self.epoch:
            raise RuntimeError("power cut")


def test_a_crash_loses_no_more_than_since_the_last_checkpoint(tiny, tmp_path, same_bits):
    run = tiny.run(save_seconds=0.0)
    with pytest.raises(RuntimeError, match="power cut"):
        tiny.train(run, tmp_path / "cut", callbacks=[Crashing(step=(1, 3))])
    assert [tiny.checkpoint(tmp_path / "cut")[1][key] for key in ("epoch", "step")] == [1, 2]
    tiny.train(run, tmp_path / "cut", resume=True)
    tiny.train(run, tmp_path / "whole")
    assert same_bits(tiny.checkpoint(tmp_path / "whole")[0], tiny.checkpoint(tmp_path / "cut")[0])


def test_rows_that_are_ahead_of_the_checkpoint_are_written_again(tiny, tmp_path):
    run = tiny.run(save_seconds=1e9)
    tiny.stopped(run, tmp_path, after=2)
    with pytest.raises(RuntimeError, match="power cut"):
        tiny.train(run, tmp_path, resume=True, callbacks=[Crashing(epoch=1)])
    assert len(rows_of(tmp_path)) == 2 and tiny.checkpoint(tmp_path)[1]["epoch"] == 0
    tiny.train(run, tmp_path, resume=True)
    assert [row["epoch"] for row in rows_of(tmp_path)] == [0, 1, 2]


def test_resuming_a_finished_run_changes_nothing(tiny, tmp_path, same_bits):
    tiny.train(tiny.run(), tmp_path)
    tensors, metrics = tiny.checkpoint(tmp_path)[0], (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "evaluation.json").write_text("{}")
    model = tiny.train(tiny.run(), tmp_path, resume=True)
    assert same_bits(tensors, tiny.checkpoint(tmp_path)[0])
    assert metrics == (tmp_path / "metrics.jsonl").read_bytes() and (tmp_path / "evaluation.json").exists()
    assert torch.equal(model[1].weight, tensors["model/1.weight"])


def test_an_outdated_evaluation_is_removed_when_training_continues(tiny, tmp_path):
    tiny.stopped(tiny.run(), tmp_path, after=5)
    (tmp_path / "evaluation.json").write_text("{}")
    tiny.train(tiny.run(), tmp_path, resume=True)
    assert not (tmp_path / "evaluation.json").exists()


def test_a_run_is_not_resumed_on_other_images(tiny, tmp_path):
    tiny.stopped(tiny.run(), tmp_path, after=3)
    splits, train = tiny.splits, tiny.splits.train
    for other in (
        replace(train, y=train.y.flip(0)),
        replace(train, x=255 - train.x),
        train.subset(range(len(train) - 1)),
    ):
        with pytest.raises(UsageError, match="was trained on other images than those here"):
            tiny.train(tiny.run(), tmp_path, resume=True, splits=replace(splits, train=other))
    tiny.train(tiny.run(), tmp_path, resume=True)


def test_a_directory_with_something_else_is_refused(tiny, tmp_path):
    tiny.stopped(tiny.run(), tmp_path / "run", after=3)
    with pytest.raises(UsageError, match=r"already holds a run: add --resume to continue it \(in Python resume=True\)"):
        tiny.train(tiny.run(), tmp_path / "run")
    with pytest.raises(UsageError, match=r"another configuration \(seed: 0 -> 1\): resume it without that change"):
        tiny.train(tiny.run(seed=1), tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match=r"is not empty \(run\)"):
        tiny.train(tiny.run(), tmp_path)
    tiny.train(tiny.run(save_seconds=7.0, microbatch=8), tmp_path / "run", resume=True)  # not what is computed


def test_an_attempt_that_fails_before_training_leaves_the_directory_free(tiny, tmp_path):
    with pytest.raises(UsageError, match="no parameters"):
        tiny.train(tiny.run(), tmp_path, model=tiny.model().requires_grad_(False))
    tiny.train(tiny.run(epochs=1), tmp_path)


def test_a_checkpoint_that_lacks_something_is_called_damaged(tiny, tmp_path):
    tiny.stopped(tiny.run(), tmp_path, after=3)
    state = tmp_path / "checkpoints" / "last" / "state.json"
    text = state.read_text()
    for name in ("choices", "best_score", "epoch"):
        state.write_text(text.replace(f'"{name}"', '"other"'))
        seal_checkpoint(state.parent)
        with pytest.raises(UsageError, match=rf"is damaged \(KeyError\('{name}'\)\): delete it to begin again"):
            tiny.train(tiny.run(), tmp_path, resume=True)


def test_a_configuration_that_was_changed_after_the_checkpoint_is_refused(tiny, tmp_path):
    tiny.stopped(tiny.run(), tmp_path, after=3)
    config = tmp_path / "config.json"
    assert config.read_text().count('"batch_size": 16') == 1
    config.write_text(config.read_text().replace('"batch_size": 16', '"batch_size": 17'))
    with pytest.raises(UsageError, match=r"config\.json was changed after"):
        tiny.train(tiny.run(batch_size=17), tmp_path, resume=True)


def test_a_resumed_run_uses_its_number_of_threads_and_restores_that_of_the_caller(tiny, tmp_path, monkeypatch):
    tiny.stopped(tiny.run(), tmp_path, after=5)
    state = tmp_path / "checkpoints" / "last" / "state.json"
    assert read_json(state)["choices"]["threads"] == 1
    state.write_text(state.read_text().replace('"threads": 1', '"threads": 7'))
    seal_checkpoint(state.parent)
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    tiny.train(tiny.run(), tmp_path, resume=True)
    assert calls == [7, 1]


CALLS = []


@dataclass(frozen=True)
class HardestFirst(Method):
    """Draws classes by the losses that they had."""

    def init(self, counts=None):
        return {"losses": torch.tensor([0.0, 1.0, 3.0])}

    def sampling(self, state, progress):
        CALLS.append(state["losses"].tolist())
        return state["losses"].softmax(0)

    def objective(self, model, batch, state, step):
        logits = model(batch.x)
        losses = cross_entropy(logits, batch.y, reduction="none")
        CALLS.append(batch.ids.tolist())
        total = state["losses"].index_add(0, batch.y, losses.detach())
        return Objective(losses.mean(), losses.detach(), torch.ones(len(losses)), logits.detach(), {"losses": total})


def test_sampling_is_called_once_per_epoch_also_if_a_run_is_resumed_inside_one(tiny, tmp_path, monkeypatch, same_bits):
    monkeypatch.setitem(serialize.KINDS, "method.hardest_first", HardestFirst)
    monkeypatch.setitem(serialize._NAMES, HardestFirst, "method.hardest_first")
    run = tiny.run(HardestFirst())
    CALLS.clear()
    tiny.train(run, tmp_path / "whole")
    calls = list(CALLS)
    assert len(calls) == 15 and [len(entry) for entry in calls[::5]] == [3, 3, 3]
    classes = tiny.splits.train.y[torch.tensor([position for batch in calls[1:5] for position in batch])]
    assert torch.bincount(classes, minlength=3)[2] > 40  # of 60, by softmax(0, 1, 3): 84 %
    for after in (1, 4, 6, 11):
        CALLS.clear()
        tiny.stopped(run, tmp_path / str(after), after)
        tiny.train(run, tmp_path / str(after), resume=True)
        assert calls == CALLS, f"stopped after step {after}"
        assert same_bits(tiny.checkpoint(tmp_path / str(after))[0], tiny.checkpoint(tmp_path / "whole")[0])


def test_a_run_directory_that_goes_away_stops_the_run_and_is_not_made_again(tiny, tmp_path):
    path, moved = tmp_path / "run", tmp_path / "moved"
    for leave in (lambda: shutil.rmtree(path), lambda: path.rename(moved), lambda: (path.rename(moved), path.mkdir())):
        for seconds in (0.0, 1e9):  # the next thing that is written is a checkpoint, or a row of metrics

            class Leaving(Callback):
                def on_step(self, epoch, step, steps, leave=leave):
                    if (epoch, step) == (1, 2):
                        leave()

            with pytest.raises(UsageError, match=r"run was deleted, renamed or replaced.*--resume --output"):
                tiny.train(tiny.run(save_seconds=seconds), path, callbacks=[Leaving()])
            assert not path.exists() or not list(path.iterdir())
            assert seconds or not moved.exists() or (moved / "checkpoints" / "last" / "state.json").is_file()
            for folder in (path, moved):
                shutil.rmtree(folder, ignore_errors=True)


def test_a_full_disk_stops_the_run_with_a_sentence_and_the_checkpoint_before_resumes(tiny, tmp_path, monkeypatch):
    whole, run = tmp_path / "whole", tiny.run(save_seconds=0.0)
    tiny.train(run, whole)
    for limit in (3, 5, 9, 14, 22):  # writes that fit on the disk
        path, left = tmp_path / str(limit), [limit]

        def full(handle, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(UsageError, match=r"cannot be written: the disk is full.*unchanged: make room"):
                tiny.train(run, path)
        assert not [p for p in path.rglob(".*") if p.name != ".lock"]
        tiny.train(run, path, resume=True)
        assert sha256(path / "checkpoints/last/model.safetensors") == sha256(
            whole / "checkpoints/last/model.safetensors"
        )
