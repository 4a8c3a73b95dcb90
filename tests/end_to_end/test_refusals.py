"""Input that can be corrected: exit code 2, one sentence with the remedy, no traceback, and nothing on disk is lost."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from doubly import DONE, PGD, Batch, LinfBall, TrainStep, UsageError, evaluate, train
from doubly.checkpoints.files import Checkpoint, load_checkpoint, save_checkpoint
from doubly.locks import lock_directory
from doubly.rundir import sha256

NETWORKS = """
import torch
from torch import nn

def flat(out):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, out))

class Nan(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = flat(10)

    def forward(self, x):
        return self.layer(x) * float("nan")

def nan():
    return Nan()

def too_few():
    return flat(9)

def images():
    return nn.Conv2d(1, 10, 3, padding=1)

def one_row():
    return nn.Sequential(nn.Flatten(0), nn.Linear(128 * 64, 10))

def no_network():
    return 3
"""
QUICK = ["--epochs", "1", "--threads", "1", "--method.attack.steps", "1", "--validation.attack.steps", "1"]


def contents(folder):
    """Return every file below with its checksum; the lock does not count."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock" and "__pycache__" not in p.parts)
    return {str(p.relative_to(folder)): sha256(p) for p in files}


def is_one_sentence(err):
    return err.count("\n") == 1 and err.startswith("doubly: ")


@pytest.fixture
def finished(cli, tmp_path):
    """Return words that train a small run, and the directory where that has been done."""
    words = ["train", "digits.at", "--model.width", "2", *QUICK]
    assert cli(*words, "--output", "run")[0] == 0
    return words, tmp_path / "run"


def test_settings_that_only_training_itself_can_check_are_refused_before_anything_is_written(cli, tmp_path):
    for words, message in [
        (["--device", "cuda:77"], "device 'cuda:77' is not available here"),
        (["--threads", "0"], "threads must be at least 1, got 0"),
        (["--method.attack.threat.radius", "2"], "epsilon must lie in (0, 1]"),
    ]:
        code, out, err = cli("train", "digits.at", "--output", "run", *words)
        assert code == 2 and message in err and is_one_sentence(err) and contents(tmp_path) == {}
    for words in (["evaluate", "x"], ["export", "x", "--output", "y.safetensors"], ["report", "x"], ["report"]):
        code, out, err = cli(*words)
        assert (code, out) == (2, "") and is_one_sentence(err) and contents(tmp_path) == {}


def test_directories_that_cannot_be_trained_in_are_refused_and_stay_as_they_are(cli, tmp_path, finished):
    words, path = finished
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    (tmp_path / "thesis.tex").write_text("precious")
    before = contents(tmp_path)
    for more, message in [
        (["--output", "run"], "already holds a run: add --resume"),
        (["--output", "thesis"], "thesis is not empty (chapter.tex): choose another --output"),
        (["--output", "thesis", "--resume"], "thesis is not empty (chapter.tex): choose another --output"),
        (["--output", "thesis.tex"], "thesis.tex cannot hold a run"),
    ]:
        code, _, err = cli(*words, *more)
        assert code == 2 and message in err and is_one_sentence(err)
    with lock_directory(path):
        code, _, err = cli(*words, "--output", path, "--resume")
    process = f"is in use by another run (process {os.getpid()}); wait for it or choose another --output"
    assert code == 2 and process in err and is_one_sentence(err)
    assert contents(tmp_path) == before


def test_a_foreign_configuration_is_not_resumed(cli, tmp_path, finished):
    (tmp_path / "other").mkdir()
    for config in ("{}", "[]", '{"kind": "sgd"}', '{"model": "gpt"}', "{", ""):
        (tmp_path / "other" / "config.json").write_text(config)
        before = contents(tmp_path)
        for words in (finished[0], ["train"]):
            code, _, err = cli(*words, "--output", "other", "--resume")
            assert code == 2 and "config" in err and is_one_sentence(err)
        assert contents(tmp_path) == before


def cut(last):
    file = last / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])


def flip(last):
    file = last / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def other_network(last):
    tensors, info = load_checkpoint(last)
    del info["checksums"]
    save_checkpoint(last.parent, "last", Checkpoint({**tensors, "model": nn.Linear(2, 2).state_dict()}, info))


def later_schema(last):
    state = json.loads((last / "state.json").read_text())
    (last / "state.json").write_text(json.dumps({**state, "schema": 99}))


def test_a_damaged_or_foreign_checkpoint_is_neither_resumed_nor_evaluated(cli, tmp_path, finished):
    words, source = finished
    for number, (damage, message) in enumerate(
        [
            (cut, "damaged (model.safetensors is missing or changed)"),
            (flip, "damaged (state.safetensors is missing or changed)"),
            (lambda last: (last / "state.json").unlink(), "damaged (state.json is missing)"),
            (lambda last: (last / "state.json").write_text("{"), "not valid JSON"),
            (lambda last: (last / "state.json").write_text('{"optimizer": "adam"}'), "no checkpoint of doubly"),
            (other_network, "does not fit the model"),
            (later_schema, "schema 99"),
        ]
    ):
        path = shutil.copytree(source, tmp_path / f"copy{number}")
        damage(path / "checkpoints" / "last")
        before = contents(path)
        for command in ([*words, "--output", path, "--resume"], ["evaluate", path]):
            code, _, err = cli(*command)
            assert code == 2 and message in err and is_one_sentence(err)
        assert contents(path) == before


def test_a_network_that_does_not_fit_is_refused(cli, tmp_path):
    module = f"wrong_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(NETWORKS)
    for function, message in [
        ("nan", r"epoch 0, step 0: the model's logits: 1280 of 1280 values are NaN or infinite"),
        ("too_few", r"the model returns 9 logits for 10 classes|labels run from 0 to 9 but the model returns 9"),
        ("images", r"must return logits of shape \(2, classes\), got \(2, 10, 8, 8\)"),
        ("one_row", r"the model cannot take images of shape \(1, 8, 8\)"),
        ("no_network", r"must return an nn.Module, got int"),
        ("nothing", r"has no attribute 'nothing'"),
    ]:
        for recipe in ("digits.at", "digits.done_pgd"):
            words = ["--model", f"{module}:{function}", "--epochs", "1", "--threads", "1", "--channels-last", "no"]
            code, _, err = cli("train", recipe, "--output", f"run-{recipe}-{function}", *words)
            assert code == 2 and re.search(message, err) and is_one_sentence(err), (recipe, function)
    assert not list(tmp_path.glob("*/checkpoints"))


# --- from Python -----------------------------------------------------------------------------------------------------

X, Y = torch.rand(40, 1, 4, 4), torch.arange(40) % 4
METHOD = DONE(PGD(LinfBall(0.1), 1))


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


def test_images_and_labels_are_checked_by_train_and_evaluate(tmp_path):
    for x, y, message in [
        (X * 255, Y, r"in \[0,1\]"),
        (X - 0.5, Y, r"in \[0,1\]"),
        (X * float("nan"), Y, "have NaN pixels"),
        ((X * 255).long(), Y, "convert them to uint8"),
        (X.bool(), Y, "uint8 or floats"),
        (X, Y - 1, "labels reach from -1"),
        (X, Y + 1, "subtract 1 from the labels"),
        (X, Y.float(), "one integer per image"),
        (X, Y[:-1], "40 images and 39 labels"),
        (X.flatten(1), Y, r"shape \(N, C, H, W\)"),
        (np.zeros((40, 8, 8, 3)), Y.numpy(), r"permute\(0, 3, 1, 2\)"),
    ]:
        with pytest.raises(UsageError, match=message) as error:
            train(network(), (x, y), METHOD, epochs=1, output=tmp_path / "run")
        assert "\n" not in str(error.value) and not (tmp_path / "run" / "checkpoints").exists()
        with pytest.raises(UsageError):
            evaluate(network(), (x, y))


def test_batches_of_a_loop_of_the_user_are_checked():
    for x, y, message in [
        (X * 2, Y, r"must lie in \[0,1\]"),
        ((X * 255).to(torch.uint8), Y, "divide uint8 images by 255"),
        (X, Y + 1, "subtract 1 from the labels"),
        (X, -Y, "labels run from -3 to 0"),
        (X, Y.float(), "whole numbers"),
    ]:
        with pytest.raises(UsageError, match=message):
            METHOD.objective(network(), Batch(x, y, torch.arange(40)), METHOD.init(), TrainStep())
