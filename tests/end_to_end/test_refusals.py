"""Input that can be mended: exit code 2, one sentence with the fix, no traceback, and nothing on disk is lost."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from doubly import DONE, PGD, Batch, LinfBall, TrainStep, UsageError, evaluate, train
from doubly.checkpoints.files import load, save
from doubly.cli import main
from doubly.errors import NonFiniteError
from doubly.rundir import lock_directory, sha256

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
BROKEN = ["--epochs", "1", "--threads", "1", "--channels-last", "no"]


def named(value):
    """The words of a case are its name."""
    return " ".join(value) if isinstance(value, list) else ""


def contents(folder):
    """Every file below, and what is in it; the lock is nobody's loss."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock" and "__pycache__" not in p.parts)
    return {str(p.relative_to(folder)): sha256(p) for p in files}


def one_sentence(err):
    """`err` is a single line that begins with our name, and no traceback."""
    assert err.count("\n") == 1 and err.startswith("doubly: "), err
    assert "Traceback" not in err
    return err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Words that train a small run, and the directory where that has been done."""
    folder = tmp_path_factory.mktemp("finished")
    words = ["train", "digits.at", "--model.width", "2", *QUICK]
    assert main([*words, "--output", str(folder / "run")]) == 0
    return words, folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the finished run, to be spoilt."""
    words, source = finished
    return words, shutil.copytree(source, tmp_path / "run")


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method.attack.threat.radius", "0"], "epsilon must lie in (0, 1], got 0"),
        (["--method.attack.threat.radius", "-0.1"], "epsilon must lie in (0, 1], got -0.1"),
        (["--method.attack.threat.radius", "8"], "8 gray levels are 8/255"),
        (["--method.attack.threat.radius", "nan"], "epsilon must lie in (0, 1]"),
        (["--method.attack.threat.radius", "8/0"], "'8/0' is not a number: write 0.03 or 8/255"),
        (["--method.attack.steps", "-1"], "steps >= 0"),
        (["--validation.attack.steps", "-5"], "steps >= 0"),
        (["--method.attack.restarts", "0"], "restarts >= 1"),
        (["--epochs", "0"], "at least 1"),
        (["--batch", "-3"], "at least 1"),
        (["--validation.every", "0"], "at least 1"),
        (["--data.holdout", "1.5"], "share in [0, 1)"),
        (["--ema-decay", "1"], "decay in [0, 1)"),
        (["--optimizer.momentum", "2"], "momentum lies in [0, 1)"),
        (["--optimizer.lr.turn", "0"], "turns inside (0, 1)"),
        (["--data.source.fold", "5"], "fold=5 of folds=5"),
        (["--device", "cuda:77"], "device 'cuda:77' is not to be had here"),
        (["--threads", "0"], "threads"),
        (["--weights", "w.pt"], "--weights goes with --model"),
        (["--set", "methd=method.at"], "did you mean 'method'"),
        (["--config"], "--config needs a value"),
    ],
    ids=named,
)
def test_a_number_outside_what_is_allowed(here, tmp_path, words, said):
    code, _, err = here("train", "digits.at", "--output", "run", *words)
    assert code == 2 and said in one_sentence(err)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "digits.imbalanced.don_pgd"], "did you mean 'digits.imbalanced.done_pgd'?"),
        (["train", "imagenet"], "there is no recipe 'imagenet': there are"),
        (["train", "--output", "x"], "name a recipe"),
        (["train", "--resume", "--output", "x"], "x is no run directory"),
        (["train", "digits.at", "--config", "x.json"], "not both"),
        (["train", "--config", "x.json"], "x.json does not exist"),
        (["evaluate", "x"], "x is no run directory"),
        (["export", "x", "--output", "y.safetensors"], "x is no run directory"),
        (["list", "method"], "did you mean 'methods'?"),
        (["trian", "digits.at"], "there is no verb 'trian'"),
    ],
    ids=named,
)
def test_a_name_that_is_not_known(here, tmp_path, words, said):
    code, out, err = here(*words)
    assert code == 2 and said in one_sentence(err) and out == ""
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(("config", "said"), [('{"kind": "sgd"}', "does not describe a run"), ("7", '"kind"')])
def test_a_file_that_is_no_config(here, tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    code, _, err = here("train", "--config", "config.json", "--output", "run")
    assert code == 2 and said in one_sentence(err) and list(contents(tmp_path)) == ["config.json"]


@pytest.mark.parametrize("words", [["--epoch", "3"], ["--epochs", "three"], ["--method.cup", "5"]], ids=named)
def test_a_flag_that_is_not_known_is_explained(here, tmp_path, words):
    code, _, err = here("train", "digits.done_pgd", "--output", "run", *words)
    assert code == 2 and "Traceback" not in err and contents(tmp_path) == {}
    assert {"--epoch": "--epochs", "--epochs": "three", "--method.cup": "--method.cap"}[words[0]] in err


def test_another_process_says_the_same(doubly):
    done = doubly.run("train", "digits.at", "--method.attack.threat.radius", "2", "--output", "run")
    assert done.returncode == 2 and "epsilon must lie in (0, 1]" in one_sentence(done.stderr) and done.stdout == ""
    assert contents(doubly.folder) == {}


# --- directories -----------------------------------------------------------------------------------------------------


def test_a_directory_that_holds_a_run(here, run):
    words, path = run
    before = contents(path)
    code, _, err = here(*words, "--output", path)
    assert code == 2 and "already holds a run: add --resume" in one_sentence(err)
    assert contents(path) == before


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_directory_that_holds_something_else(here, tmp_path, finished, resume):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    before = contents(tmp_path)
    code, _, err = here(*finished[0], "--output", "thesis", *resume)
    assert code == 2 and "thesis is not empty (chapter.tex): choose another --output" in one_sentence(err)
    assert contents(tmp_path) == before


def test_a_file_is_no_directory(here, tmp_path, finished):
    (tmp_path / "thesis.tex").write_text("precious")
    code, _, err = here(*finished[0], "--output", "thesis.tex")
    assert code == 2 and "thesis.tex cannot hold a run" in one_sentence(err)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("config", ["{}", "[]", '{"kind": "sgd"}', '{"model": "gpt"}', "{", ""])
def test_a_foreign_config_is_not_resumed(here, tmp_path, finished, config):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(config)
    before = contents(tmp_path)
    for words in (finished[0], ["train"]):
        code, _, err = here(*words, "--output", "other", "--resume")
        assert code == 2 and "config" in one_sentence(err)
    assert contents(tmp_path) == before


def test_two_runs_at_once_in_one_directory(here, run):
    words, path = run
    before = contents(path)
    with lock_directory(path):
        code, _, err = here(*words, "--output", path, "--resume")
    assert code == 2
    assert f"is in use by another run (process {os.getpid()}); wait for it or choose another --output" in one_sentence(
        err
    )
    assert contents(path) == before


# --- checkpoints -----------------------------------------------------------------------------------------------------


def cut(last):
    file = last / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])


def flip(last):
    file = last / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lose_state(last):
    (last / "state.json").unlink()


def garble_state(last):
    (last / "state.json").write_text("{")


def foreign_state(last):
    (last / "state.json").write_text('{"optimizer": "adam"}')


def foreign_network(last):
    """A whole checkpoint, of another network."""
    tensors, info = load(last)
    del info["checksums"]
    tensors["model"] = dict(nn.Linear(2, 2).state_dict())
    save(last.parent, "last", tensors, info)


def from_the_future(last):
    state = json.loads((last / "state.json").read_text())
    (last / "state.json").write_text(json.dumps({**state, "schema": 99}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "damaged (model.safetensors is missing or changed)"),
        (flip, "damaged (state.safetensors is missing or changed)"),
        (lose_state, "damaged (state.json is missing)"),
        (garble_state, "not valid JSON"),
        (foreign_state, "no checkpoint of doubly"),
        (foreign_network, "does not fit the model"),
        (from_the_future, "schema 99"),
    ],
)
def test_a_corrupt_or_foreign_checkpoint(here, run, spoil, said):
    words, path = run
    spoil(path / "checkpoints" / "last")
    before = contents(path)
    for verb in ([*words, "--output", path, "--resume"], ["evaluate", path]):
        code, _, err = here(*verb)
        assert code == 2 and said in one_sentence(err)
    assert contents(path) == before


# --- networks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    """The name of a module of wrong networks in the folder where we are."""
    name = f"wrong_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(NETWORKS)
    return name


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nan", r"epoch 0, step 0: the model's logits: 1280 of 1280 values are NaN or infinite"),
        ("too_few", r"the model returns 9 logits for 10 classes|labels run from 0 to 9 but the model returns 9"),
        ("images", r"must return logits of shape \(2, classes\), got \(2, 10, 8, 8\)"),
        ("one_row", r"the model cannot take images of shape \(1, 8, 8\)"),
        ("no_network", r"must return an nn.Module, got int"),
        ("nothing", r"has no attribute 'nothing'"),
    ],
)
@pytest.mark.parametrize("recipe", ["digits.at", "digits.done_pgd"])
def test_a_network_that_answers_wrongly(here, own, tmp_path, recipe, function, said):
    code, _, err = here("train", recipe, "--output", "run", "--model", f"{own}:{function}", *BROKEN)
    assert code == 2 and re.search(said, one_sentence(err))
    assert not (tmp_path / "run" / "checkpoints").exists()


# --- from Python -----------------------------------------------------------------------------------------------------

X, Y = torch.rand(40, 1, 4, 4), torch.arange(40) % 4
METHOD = DONE(PGD(LinfBall(0.1), 1))


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (X * 255, Y, r"in \[0,1\]"),
        (X - 0.5, Y, r"in \[0,1\]"),
        (X * float("nan"), Y, r"in \[0,1\]"),
        ((X * 255).long(), Y, "convert them to uint8"),
        (X.bool(), Y, "uint8 or floats"),
        (X, Y - 1, "labels reach from -1"),
        (X, Y + 1, "the model returns 4 logits"),
        (X, Y.float(), "one integer per image"),
        (X, Y[:-1], "40 images and 39 labels"),
        (X.flatten(1), Y, r"shape \(N, C, H, W\)"),
        (np.zeros((40, 8, 8, 3)), Y.numpy(), r"permute\(0, 3, 1, 2\)"),
    ],
)
def test_images_and_labels_are_checked(tmp_path, x, y, said):
    with pytest.raises(UsageError, match=said) as problem:
        train(network(), (x, y), METHOD, epochs=1, output=tmp_path / "run")
    assert "\n" not in str(problem.value)
    assert contents(tmp_path) == {} or set(contents(tmp_path)) <= {"run/config.json", "run/environment.json"}
    with pytest.raises(UsageError):
        evaluate(network(), (x, y))


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (X * 2, Y, r"must lie in \[0,1\]"),
        ((X * 255).to(torch.uint8), Y, "divide uint8 images by 255"),
        (X, Y + 1, "the model returns 4 logits"),
        (X, -Y, "labels run from -3 to 0"),
        (X, Y.float(), "whole numbers"),
    ],
)
def test_somebodys_own_loop_is_checked_too(x, y, said):
    with pytest.raises(UsageError, match=said):
        METHOD.objective(network(), Batch(x, y, torch.arange(40)), METHOD.init(), TrainStep())


def test_a_network_that_answers_nan_is_named_from_python():
    broken = network()
    with torch.no_grad():
        broken[1].weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="epoch 0, step 0: the model's logits"):
        train(broken, (X, Y), METHOD, epochs=1)


@pytest.mark.parametrize("radius", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_epsilon_is_a_fraction_of_the_image_range(radius):
    with pytest.raises(UsageError, match="epsilon"):
        LinfBall(radius)
