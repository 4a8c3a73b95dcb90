"""doubly evaluate and doubly compare: anyone's network, AutoAttack that was stopped or shared out, and bad input."""

import dataclasses
import gc
import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_digits

import doubly
from doubly.cli import main
from doubly.evaluation.config import EvalConfig
from doubly.rundir import read_json, sha256

NETS = "networks_of_somebody"
NETWORKS = """
import torch
from torch import nn
from torch.nn import functional as F

def linear(outputs=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))

class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)

def with_batch_norm(track=True, layer=lambda track: nn.BatchNorm2d(1, track_running_stats=track)):
    torch.manual_seed(0)
    return nn.Sequential(layer(track), nn.Dropout(0.5), *linear())

class OfColour(nn.Sequential):
    def forward(self, x):
        return super().forward(x[:, :1])

def of_color():
    return OfColour(*linear())

def as_many_as(classes):
    return linear(classes)

def two_thirds():
    return linear(3)

def seven():
    return linear(7)

def softmax():
    return nn.Sequential(linear(), nn.Softmax(1))

def centered_on_the_batch():
    return nn.Sequential(Called(lambda x: x - x.mean(0)), *linear())

def batch_statistics():
    return with_batch_norm(False)

def batch_statistics_of_vectors():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 4))

def dropout_at_all_times():
    return nn.Sequential(Called(F.dropout), *linear())

def nan():
    return nn.Sequential(linear(), Called(lambda x: x * float("nan")))

def pair():
    return nn.Sequential(linear(), Called(lambda x: (x, x)))

def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))

def key_error():
    return nn.Sequential(linear(), Called(lambda x: {}["logits"]))

def own_weights_do_not_fit():
    linear().load_state_dict({})

def of_a_path(path):
    return linear()

def number():
    return 3

def loud():
    return nn.Sequential(linear(), Called(lambda x: 1e4 * x))
"""
EPSILON = 0.27  # of twelve images two stand, both in the last chunk
AUTOATTACK = ["--epsilon", EPSILON, "--autoattack", "--images", 12, "--autoattack-chunk-size", 3]
PLAIN = ["--attacks", "pgd", "--no-trust"]
SEVERAL = [
    "--epsilon",
    0.9,
    "--attacks",
    "pgd",
    "--no-trust",
    "--images",
    12,
    "--autoattack-chunk-size",
    3,
]  # none stands
LABELS = range(4)


def contents(folder):
    """Every file below, and what is in it."""
    return {str(p.relative_to(folder)): sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def one_sentence(err):
    """`err` is a single line that begins with our name, and no traceback."""
    assert err.count("\n") == 1 and err.startswith("doubly: "), err
    assert "Traceback" not in err
    return err


def timeless(value):
    """JSON without the fields that say how long it took."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return value


def found(folder):
    return read_json(Path(folder) / "evaluation.json")


def outcome(folder):
    """All that an evaluation says, to be compared with another."""
    with np.load(Path(folder) / "evaluation.npz") as kept:
        return timeless(found(folder)), {name: kept[name].tolist() for name in kept.files}


def state(folder):
    """The one folder of AutoAttack's state."""
    (place,) = (Path(folder) / "autoattack").iterdir()
    return place


def quietly(*words):
    """`doubly` in this process: (exit code, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def closed(call, *words):
    """What `call` returns; if it raises, nothing that the traceback held open stays open."""
    problem = ""
    try:
        return call(*words)
    except (zipfile.BadZipFile, EOFError) as raised:
        problem = repr(raised)
    gc.collect()
    return pytest.fail(problem)


def command(function="linear", *words, weights="net.safetensors", data="digits.npz", output="out"):
    given = [] if weights is None else ["--weights", weights]
    return ["evaluate", "--model", f"{NETS}:{function}", *given, "--data", data, "--output", output, *words]


# --- what is measured ------------------------------------------------------------------------------------------------


def split():
    """24 images to measure and 36 others, of four digits, class by class."""
    source = load_digits()
    x, y = (source.images * 255 / 16).round().astype(np.uint8), source.target.astype(np.int64)
    each = np.stack([np.flatnonzero(y == label)[:15] for label in LABELS])
    test, train = each[:, :6].reshape(-1), each[:, 6:].reshape(-1)
    return x[train], y[train], x[test], y[test]


def nearest_mean(x, y, sharpness=4.0):
    """The linear network that answers with the class whose mean is nearest, and in doubt with the last."""
    means = torch.stack([torch.from_numpy(x[y == label] / 255).float().mean(0).flatten() for label in LABELS])
    doubt = torch.tensor([0.0, 0.0, 0.0, 4.0])
    return {"1.weight": sharpness * means, "1.bias": doubt - sharpness * means.square().sum(1) / 2}


@pytest.fixture(scope="module")
def workshop(shared):
    """A folder with networks, weights and data."""
    folder = shared.folder
    (folder / f"{NETS}.py").write_text(NETWORKS)
    x, y, x_test, y_test = split()
    arrays = {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}
    np.savez(folder / "digits.npz", **arrays)
    safetensors.numpy.save_file(arrays, folder / "digits.safetensors")
    np.savez(folder / "mirrored.npz", **{**arrays, "x_test": x_test[:, :, ::-1]})
    np.savez(folder / "normalized.npz", **{**arrays, "x_train": x / 64 - 1, "x_test": x_test / 64 - 1})
    np.savez(folder / "named.npz", **arrays, classes=np.array(["nought", "[bold]", "[/i]", "three"]))
    for part, pixels, labels in (("train", x, y), ("test", x_test, y_test)):
        for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            (folder / "photos" / part / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / "photos" / part / str(label) / f"{index}.png")
    weights = nearest_mean(x, y)
    safetensors.torch.save_file(weights, folder / "net.safetensors")
    torch.save(weights, folder / "net.pt")
    torch.save({f"module.{name}": value for name, value in weights.items()}, folder / "parallel.pt")
    torch.save({f"_orig_mod.{name}": value for name, value in weights.items()}, folder / "compiled.pt")
    torch.save({f"_orig_mod.module.{name}": value for name, value in weights.items()}, folder / "both.pt")
    torch.save({"state_dict": weights, "epoch": 3}, folder / "checkpoint.pt")
    blurred = {**weights, "1.weight": weights["1.weight"] + torch.linspace(-1, 1, 256).reshape(4, 64)}
    torch.save(blurred, folder / "other.pt")
    return shared


@pytest.fixture
def own(here, workshop, monkeypatch):
    """`doubly` in this process, in the folder with the networks; the output goes elsewhere."""
    monkeypatch.chdir(workshop.folder)
    return here


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


@pytest.fixture(scope="module")
def whole(workshop):
    """An evaluation with AutoAttack that nobody disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workshop.folder)
        code, out, err = quietly(*command("linear", *AUTOATTACK, output="whole"))
    assert code == 0, err
    return workshop.folder / "whole", out, err


@pytest.fixture
def copy(whole, output):
    """That evaluation, to be spoilt."""
    return shutil.copytree(whole[0], output)


@pytest.fixture(scope="module")
def plain(workshop):
    """Two evaluations without AutoAttack, of different weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workshop.folder)
        for name, weights in (("first", "net.safetensors"), ("second", "other.pt")):
            assert quietly(*command("linear", "--epsilon", 0.15, weights=weights, output=name))[0] == 0
    return workshop.folder / "first", workshop.folder / "second"


@pytest.fixture(scope="module")
def same_numbers(plain):
    """The accuracies that these weights have on these images, whatever file they come from."""
    return {key: found(plain[0])[key] for key in ("sa", "ra_pgd", "ra_tail_30", "per_class", "confusion")}


# --- anyone's weights and images -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights",
    [
        "net.pt",
        "parallel.pt",
        "compiled.pt",
        "checkpoint.pt",
        pytest.param("both.pt"),
    ],
)
def test_weights_mean_the_same_in_every_file(own, output, same_numbers, weights):
    code, out, err = own(*command("linear", "--epsilon", 0.15, "--no-trust", weights=weights, output=output))
    assert (code, err) == (0, "") and "RA-PGD" in out
    assert {key: found(output)[key] for key in same_numbers} == same_numbers
    assert found(output)["protocol"]["weights"] == weights


def test_arrays_are_read_from_safetensors_as_well(own, output, same_numbers):
    words = command("linear", "--epsilon", 0.15, "--no-trust", data="digits.safetensors", output=output)
    assert own(*words)[0] == 0
    assert {key: found(output)[key] for key in same_numbers} == same_numbers


def test_a_folder_of_class_folders_is_measured(own, output, same_numbers):
    code, _, err = own(*command("of_color", *PLAIN, data="photos", output=output))
    assert (code, err) == (0, "") and found(output)["sa"] == same_numbers["sa"]
    rows, expected = found(output)["per_class"], same_numbers["per_class"]
    assert [(name, row["n"], row["sa"]) for name, row in rows.items()] == [
        (name, row["n"], row["sa"]) for name, row in expected.items()
    ]


@pytest.mark.parametrize("data", ["digits", "digits.at"])
def test_a_dataset_or_a_recipe_gives_its_test_images_and_its_number_of_classes(own, output, data):
    code, _, err = own(*command("as_many_as", *PLAIN, weights=None, data=data, output=output))
    assert (code, err) == (0, "") and found(output)["n"] == 360 and len(found(output)["per_class"]) == 10


def test_the_output_has_a_name_if_none_is_given(here, workshop, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(workshop.folder)
    words = [word for word in command("linear", *PLAIN, output=None) if word not in ("--output", None)]
    words = [workshop.folder / word if str(word).startswith(("digits", "net.")) else word for word in words]
    code, out, err = here(*words)
    assert (code, err) == (0, "") and f"{NETS}:linear" in out
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert re.fullmatch(r"net-[0-9a-f]{6}", folder.name) and sorted(contents(folder)) == [
        "evaluation.json",
        "evaluation.npz",
        "gallery.npz",
    ]


def test_the_terminal_says_where_the_evaluation_is(own, output):
    _, out, _ = own(*command("linear", *PLAIN, output=output))
    assert str(output) in out.replace("\n", "")


def test_networks_of_one_package_are_not_written_over_each_other(here, tmp_path, workshop):
    (tmp_path / "pack").mkdir()
    for name in ("one", "two"):
        (tmp_path / "pack" / f"{name}.py").write_text(NETWORKS)
        words = ["evaluate", "--model", f"pack.{name}:linear", "--data", workshop.folder / "digits.npz", *PLAIN]
        assert here(*words)[0] == 0
    assert len(list((tmp_path / "evaluations").iterdir())) == 2


def test_a_network_without_a_weights_file_gives_the_same_answer_twice_or_is_refused(own, tmp_path):
    codes = [own(*command("linear", *PLAIN, weights=None, output=tmp_path / name))[0] for name in "ab"]
    assert codes == [2, 2] or outcome(tmp_path / "a") == outcome(tmp_path / "b")


class Bomb:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def plain_pickle(value, file):
    with file.open("wb") as stream:
        pickle.dump(value, stream)


@pytest.mark.parametrize("save", [plain_pickle, torch.save], ids=["pickle", "torch"])
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a state dict"])
def test_a_pickle_that_would_execute_code_is_refused_and_not_executed(own, tmp_path, output, save, nested):
    bomb = Bomb(tmp_path / "executed")
    save({"1.weight": torch.zeros(4, 64), "1.bias": bomb} if nested else bomb, tmp_path / "bomb.pt")
    code, out, err = own(*command(weights=tmp_path / "bomb.pt", output=output))
    assert code == 2 and "give safetensors or a plain state dict" in one_sentence(err) and out == ""
    assert not (tmp_path / "executed").exists() and not output.exists()


# --- bad input: one sentence with the remedy, exit code 2, and what was there stays ----------------------------------

BAD = [
    ("softmax", {}, r"returns probabilities.*return the logits, without the softmax"),
    ("centered_on_the_batch", {}, r"a single image differently than in a batch.*normalize with stored statistics"),
    ("batch_statistics", {}, r"a single image differently than in a batch.*normalize with stored statistics"),
    ("dropout_at_all_times", {}, r"differently each time.*take out what draws random numbers"),
    ("two_thirds", {}, r"labels run from 0 to 3 but the model returns 3 logits: build the model with as many outputs"),
    ("pair", {}, r"must return a tensor of logits, got tuple: return the scores alone"),
    ("wide", {}, r"cannot take images of shape \(1, 8, 8\).*give images of the size"),
    ("linear", {"data": "normalized.npz"}, r"in \[0,1\].*leave normalization to the model's first layer"),
    ("linear", {"data": "nowhere.npz"}, r"there is no dataset, recipe, folder or file 'nowhere.npz'.*`doubly list`"),
    ("nothing", {}, r"has no attribute 'nothing'; run from the folder that holds the module"),
    ("number", {}, r"must return an nn.Module, got int"),
    ("of_a_path", {}, r"missing a required argument: 'path'.*name a function of nothing, or of classes"),
    ("nan", {}, r"the model's logits: 48 of 48 values are NaN or infinite"),
]


@pytest.mark.parametrize(("function", "given", "said"), BAD, ids=[" ".join([row[0], *row[1].values()]) for row in BAD])
def test_bad_input_is_one_sentence_and_what_was_there_stays(own, copy, function, given, said):
    before = contents(copy)
    code, out, err = own(*command(function, *AUTOATTACK, **{"weights": None, **given}, output=copy))
    assert code == 2 and re.search(said, one_sentence(err)) and out == ""
    assert contents(copy) == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"function": "two_thirds"}, r"net.safetensors does not fit the model: '1.weight' is \(4, 64\) in the file"),
        ({"function": "with_batch_norm"}, r"'0.weight' is missing in the file and \(1,\) in the model"),
        ({"weights": "nowhere.pt"}, r"there is no weights file nowhere.pt"),
        ({"weights": "nowhere.safetensors"}, r"there is no weights file nowhere.safetensors"),
        ({"weights": "digits.npz"}, r"cannot be read as weights .*: give safetensors or a plain state dict"),
        ({"weights": "photos"}, r"photos cannot be read as weights"),
    ],
    ids=str,
)
def test_weights_that_cannot_be_used(own, output, given, said):
    code, out, err = own(*command(**given, output=output))
    assert code == 2 and re.search(said, one_sentence(err)) and out == "" and not output.exists()


def test_weights_that_do_not_fit_come_with_a_remedy(own, output):
    _, _, err = own(*command("two_thirds", output=output))
    assert re.search(r"in the model[:;] ", one_sentence(err))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a run directory, or --model package.module:function with --weights FILE and --data NAME"),
        (["--model", f"{NETS}:linear"], "give a run directory, or --model"),
        (["--data", "digits.npz"], "give a run directory, or --model"),
        (["--model", NETS, "--data", "digits.npz"], f"--model is written package.module:function, got '{NETS}'"),
        (["--model", "nowhere:linear", "--data", "digits.npz"], "run from the folder that holds the module"),
        (["nowhere"], "nowhere is no run directory: it has no config.json; give one that `doubly train` wrote"),
        (["nowhere", "--data", "digits.npz"], "a run directory knows its data and weights: leave out --data"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_what_to_evaluate_must_be_said(own, words, said):
    code, out, err = own("evaluate", *words)
    assert code == 2 and said in one_sentence(err) and out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epsilon", 8], "epsilon must lie in (0, 1], got 8: images are in [0,1], so 8 gray levels are 8/255"),
        (["--epsilon", 0], "epsilon must lie in (0, 1]"),
        pytest.param(
            ["--epsilon", "8/0"],
            "'8/0' is not a number: write 0.03 or 8/255",
        ),
        (["--threat", "l2", "--epsilon", -1], "epsilon must be positive and finite, got -1"),
        (["--tail-share", 0], "tail_share is a share of the classes in (0, 1], got 0"),
        (["--images", 0], "images must be at least 1, got 0"),
        (["--autoattack-chunk-size", 0], "autoattack_chunk_size must be at least 1"),
        (["--jobs", 0], "jobs run in at least 1 process, got 0"),
        (["--quick", "--shard", 2, 2], "a shard is k of n with 0 <= k < n, got 2 of 2"),
        (["--quick", "--autoattack"], "give --autoattack or --quick"),
        (["--attacks", "pdg"], "there is no attack 'pdg': did you mean 'pgd'?"),
        (["--device", "cuda:77"], "device 'cuda:77' is not available here"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_number_outside_what_is_allowed(own, output, words, said):
    code, out, err = own(*command("linear", *words, output=output))
    assert code == 2 and said in one_sentence(err) and out == "" and not output.exists()


def test_an_infinite_l2_ball_is_refused_as_such(own, output):
    code, _, err = own(*command("linear", "--threat", "l2", "--epsilon", "inf", output=output))
    assert code == 2 and "epsilon" in one_sentence(err)


def test_batch_statistics_of_vectors_are_called_by_their_name(own, output):
    code, _, err = own(*command("batch_statistics_of_vectors", weights=None, output=output))
    assert code == 2 and "normalize with stored statistics" in one_sentence(err)


def test_a_network_that_raises_anything_is_one_sentence(own, output):
    code, _, err = own(*command("key_error", weights=None, output=output))
    assert code == 2 and "KeyError" in one_sentence(err)


def test_a_function_that_raises_several_lines_is_one_sentence(own, output):
    code, _, err = own(*command("own_weights_do_not_fit", weights=None, output=output))
    assert code == 2 and "Error(s) in loading state_dict" in one_sentence(err)


def test_an_output_that_is_a_file_is_refused_with_the_remedy(own, output):
    output.write_text("precious")
    code, _, err = own(*command("linear", *PLAIN, output=output))
    assert output.read_text() == "precious"
    assert code == 2 and "choose another" in one_sentence(err)


def test_a_shard_of_nothing_is_refused(own, output):
    code, _, err = own(*command("linear", "--shard", 0, 2, output=output))
    assert code == 2 and "--autoattack" in one_sentence(err)


def test_bad_input_is_said_once_whatever_the_number_of_processes(own, output):
    code, _, err = own(*command("softmax", "--quick", "--jobs", 2, weights=None, output=output))
    assert code == 2 and "returns probabilities" in one_sentence(err)


def test_a_class_may_have_any_name(own, output):
    code, out, _ = own(*command("linear", *PLAIN, data="named.npz", output=output))
    assert code == 0 and "[bold]" in out and "[/i]" in out


def test_a_folder_may_have_any_name(own, plain, tmp_path):
    path = shutil.copytree(plain[0], tmp_path / "run[best]")
    code, out, _ = own("compare", path, path, "--resamples", 10)
    assert code == 0 and "run[best]" in out.replace("\n", "").replace(" ", "")


def test_a_network_may_know_more_classes_than_the_data(own, tmp_path, output):
    weights = nearest_mean(*split()[:2])
    more = {
        "1.weight": torch.cat([weights["1.weight"], weights["1.weight"][:3] + 0.5]),
        "1.bias": torch.cat([weights["1.bias"], weights["1.bias"][:3] - 18]),
    }
    torch.save(more, tmp_path / "seven.pt")
    words = ["--epsilon", 0.4, "--quick", "--no-trust", "--attacks"]
    code, _, err = own(*command("seven", *words, weights=tmp_path / "seven.pt", output=output))
    assert code == 0, err


def test_a_network_left_in_training_mode_is_measured_in_evaluation_mode_and_put_back(own, output):
    code, _, err = own(*command("with_batch_norm", "--epsilon", 0.15, *PLAIN, weights=None, output=output))
    assert (code, err) == (0, "")
    network = sys.modules[NETS].with_batch_norm()
    network[1].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    images = doubly.data.Arrays("digits.npz").load().test
    result = doubly.evaluate(network, images, doubly.LinfBall(0.15), ["pgd"], trust=False)
    assert (result.sa, result.ra_pgd) == (found(output)["sa"], found(output)["ra_pgd"])
    assert [part.training for part in network] == [True, False, True, True] and network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# --- AutoAttack: whole, quick, shared out, stopped -------------------------------------------------------------------


def test_autoattack_is_whole_and_the_numbers_are_trusted_or_not(whole):
    path, out, err = whole
    about = found(path)
    assert about["n"] == about["autoattack"]["n"] == 12 and about["autoattack"]["label"] == "RA-AA"
    assert about["autoattack"]["parts"] == ["apgd-ce", "apgd-t", "fab-t", "square"] and about["autoattack"]["complete"]
    assert 0 < about["ra_aa"] <= min(about["ra_pgd"], about["ra_margin"]) < about["sa"]
    assert 0 <= about["ra_aa_tail_30"] <= about["ra_aa"] and len(about["ra_aa_tail_30_classes"]) == 1
    assert about["worst_class_ra_aa"].keys() == {"name", "ra_aa"} and "ra_aa_interval" in about["per_class"]["3"]
    low, high = about["intervals"]["ra_aa"]
    assert low < about["ra_aa"] < high
    panel = about["trust"]
    assert panel["measured"] == panel["of"] == len(panel["lines"]) == 11
    assert f"can it be trusted? {panel['verdict']}" in out and "RA-AA" in out
    assert "3 targets instead of 9, since there are 4 classes" in out
    assert err.count("\n") == 4 * 4 and err.startswith("chunk 1 of 4, apgd-ce: ")


def test_quick_is_not_called_autoattack(own, output):
    code, out, _ = own(*command("linear", *SEVERAL, "--quick", output=output))
    text = (output / "evaluation.json").read_text()
    assert code == 0 and "RA-APGD" in out and '"ra_apgd"' in text
    assert "RA-AA" not in out + text and "ra_aa" not in text


def test_the_label_of_autoattack_is_not_there_without_it(plain):
    assert "RA-AA" not in (plain[0] / "evaluation.json").read_text()


def test_autoattack_on_some_of_the_images_says_on_how_many(own, output):
    code, out, _ = own(*command("linear", *SEVERAL, "--autoattack", "--autoattack-images", 8, output=output))
    about = found(output)
    assert code == 0 and "RA-AA: " in out and "n = 8" in out
    assert (about["n"], about["autoattack"]["n"], about["per_class"]["0"]["n_ra_aa"]) == (12, 8, 2)


def without(copy, *chunks):
    """As if these chunks had not been begun, so that Square, which takes seconds, runs only where it is looked at."""
    (copy / "evaluation.json").unlink()
    for index in chunks:
        (state(copy) / f"chunk-0000{index}.json").unlink()
    return command("linear", *AUTOATTACK, output=copy)


def test_shards_put_together_are_the_whole(own, whole, copy):
    words = without(copy, 0, 1, 2)
    for shard, chunks, done in ((0, "3 of 4", {"chunk 1", "chunk 3"}), (1, "4 of 4", {"chunk 2"})):
        code, out, err = own(*words, "--shard", shard, 2)
        assert code == 0 and f"{chunks} chunks are finished; a call without --shard combines them" in out
        assert {line.partition(" of")[0] for line in err.splitlines()} == done
        assert not (copy / "evaluation.json").exists()
    code, _, err = own(*words)
    assert (code, err) == (0, "")
    assert outcome(copy) == outcome(whole[0])


@pytest.mark.slow  # tests/evaluation/test_driver.py puts shards together
def test_jobs_give_what_one_process_gives(own, whole, copy):
    code, _, err = own(*without(copy, 0, 1), "--jobs", 2)
    assert code == 0 and sorted(line[:12] for line in err.splitlines()) == ["chunk 1 of 4"] * 4 + ["chunk 2 of 4"] * 4
    assert outcome(copy) == outcome(whole[0])


def begun(process, output):
    """Wait until the first attack on the first chunk has ended."""
    deadline = time.monotonic() + 60
    while not any((output / "autoattack").glob("*/chunk-*.json")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)


def stopped(workshop, number):
    """(where, exit code, stdout, stderr) of an evaluation that a signal ended in the middle."""
    output = workshop.folder / number.name
    process = workshop.start(*command("linear", *AUTOATTACK, output=output))
    begun(process, output)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return output, process.returncode, out, err


@pytest.mark.slow  # tests/evaluation/test_driver.py kills it in the middle
def test_an_evaluation_that_was_killed_goes_on_and_gives_the_same(own, workshop, whole):
    output, code, _, _ = stopped(workshop, signal.SIGKILL)
    assert code == -signal.SIGKILL and "ra_aa" not in read_json(output / "evaluation.json")
    code, _, err = own(*command("linear", *AUTOATTACK, output=output))
    assert code == 0 and 0 < err.count("\n") < 4 * 4
    assert outcome(output) == outcome(whole[0])


@pytest.fixture(scope="module")
def interrupted(workshop):
    return stopped(workshop, signal.SIGINT)


def test_an_interrupted_evaluation_keeps_what_it_has(interrupted):
    output, code, out, err = interrupted
    assert (code, out) == (130, "") and "Traceback" not in err
    assert all(read_json(file)["attacks"] for file in state(output).glob("chunk-*.json"))
    assert "ra_aa" not in read_json(output / "evaluation.json")  # what was measured before AutoAttack began


def test_an_interrupted_evaluation_says_how_to_go_on(interrupted):
    lines = [line for line in interrupted[3].splitlines() if line.startswith("doubly: ")]
    assert len(lines) == 1 and "the same command continues" in lines[0]


class Waiting:
    """A process that is interrupted while it is waited for."""

    terminated = 0

    def __init__(self, *words, **settings):
        self.stderr = io.StringIO()

    def wait(self):
        if not Waiting.terminated:
            raise KeyboardInterrupt

    def terminate(self):
        Waiting.terminated += 1


def test_interrupted_jobs_are_ended_and_it_is_said_how_to_go_on(own, output, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Waiting)
    code, _, err = own(*command("linear", *AUTOATTACK, "--jobs", 2, output=output))
    assert (code, Waiting.terminated) == (130, 2)
    assert "the same command continues" in one_sentence(err)


def children(process):
    place = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in place.read_text().split()]


def running(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_sigterm_ends_all_processes(workshop):
    process = workshop.start(*command("linear", *AUTOATTACK, "--jobs", 2, output="terminated"))
    deadline = time.monotonic() + 60
    while len(workers := children(process)) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    process.wait(10)
    deadline = time.monotonic() + 1
    while any(map(running, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = [number for number in workers if running(number)]
    for number in left:
        os.kill(number, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert left == []
    assert process.returncode == 143 and "the same command continues" in err


# --- the state on disk -----------------------------------------------------------------------------------------------


def test_the_state_of_another_network_is_refused(own, whole, output):
    before = contents(whole[0])
    words = command("linear", *AUTOATTACK, "--state", state(whole[0]), weights="other.pt", output=output)
    code, out, err = own(*words)
    assert code == 2 and out == ""
    assert "key.json belongs to another evaluation: its model is " in one_sentence(err)
    assert "choose another folder, or delete that one to start again" in err
    assert contents(whole[0]) == before and not output.exists()


def test_the_state_is_kept_where_it_is_wanted(own, whole, output):
    code, _, err = own(*command("linear", *AUTOATTACK, "--state", state(whole[0]), output=output))
    assert (code, err) == (0, "")  # nothing was left to attack
    assert outcome(output) == outcome(whole[0]) and not (output / "autoattack").exists()


def cut(file):
    file.write_bytes(file.read_bytes()[:-30])


def test_a_cut_chunk_is_refused_and_the_others_stay(own, whole, copy):
    spoilt = state(copy) / "chunk-00001.json"
    cut(spoilt)
    before = contents(copy)
    code, out, err = own(*command("linear", *AUTOATTACK, output=copy))
    assert code == 2 and out == ""
    assert "chunk-00001.json is not valid JSON" in one_sentence(err) and "delete it and redo that part" in err
    assert contents(copy) == before
    spoilt.unlink()
    code, _, err = own(*command("linear", *AUTOATTACK, output=copy))
    assert code == 0 and {line.partition(",")[0] for line in err.splitlines()} == {"chunk 2 of 4"}
    assert outcome(copy) == outcome(whole[0])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chunk-00001.json", '{"schema": 1, "chunk": 2}'),
        pytest.param(
            "chunk-00001.json",
            '{"schema": 1, "chunk": 1}',
        ),
        pytest.param(
            "key.json",
            '{"model": "ab',
        ),
        pytest.param(
            "key.json",
            "[]",
        ),
    ],
    ids=["another chunk", "chunk without fields", "cut key", "key without fields"],
)
def test_a_foreign_or_interrupted_state_is_refused(own, copy, name, text):
    (state(copy) / name).write_text(text)
    before = contents(copy)
    code, _, err = own(*command("linear", *AUTOATTACK, output=copy))
    assert code == 2 and name in one_sentence(err) and "delete" in err
    assert contents(copy) == before


# --- how to measure --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "kind", "radius", "norm"),
    [
        (["--threat", "l2", "--epsilon", 0.5], "threat.l2", 0.5, "L2"),
        (["--threat", "l2"], "threat.l2", 0.5, "L2"),
        (["--epsilon", "8/255"], "threat.linf", 8 / 255, "Linf"),
        ([], "threat.linf", 8 / 255, "Linf"),
    ],
    ids=["l2 0.5", "l2", "8/255", "nothing"],
)
def test_the_threat_is_the_one_that_was_asked_for(own, output, words, kind, radius, norm):
    words = [*words, "--quick", "--autoattack-images", 4, *PLAIN]
    code, out, _ = own(*command("linear", *words, output=output))
    about = found(output)
    assert code == 0 and f"epsilon {radius:.6g}, {norm}" in out
    threat = about["protocol"]["attack"]["threat"]
    assert (threat["kind"], threat["radius"]) == (kind, radius)
    assert (about["autoattack"]["norm"], about["autoattack"]["epsilon"]) == (norm, radius)


def test_images_are_as_many_as_asked_for_and_always_the_same(own, tmp_path):
    for name in "ab":
        assert own(*command("linear", "--images", 8, *PLAIN, output=tmp_path / name))[0] == 0
    about = found(tmp_path / "a")
    assert about["n"] == 8 and [row["n"] for row in about["per_class"].values()] == [2, 2, 2, 2]
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_the_curve_is_one_line(own, output):
    code, out, err = own(*command("linear", "--epsilon", 0.15, "--curve-images", 8, *PLAIN, output=output))
    points = found(output)["curve"]["points"]
    said = ", ".join(f"{100 * point['accuracy']:.1f} at {point['epsilon']:.3g}" for point in points)
    assert (code, err) == (0, "") and f"% under PGD by radius, n = 8: {said}\n" in out
    assert [point["epsilon"] for point in points] == pytest.approx([0, 0.0375, 0.075, 0.15, 0.225, 0.3, 0.45, 0.6])


@pytest.mark.parametrize(
    ("words", "title", "count"),
    [
        (["--tail-share", 0.5], "RA-Tail-50", 2),
        (["--tail-share", 1], "RA-Tail-100", 4),
        (["--tail-rounding", "ceil"], "RA-Tail-30", 2),
        (["--tail-rounding", "floor"], "RA-Tail-30", 1),
    ],
    ids=["half", "all", "ceil", "floor"],
)
def test_the_tail_is_as_large_as_asked_for(own, output, words, title, count):
    code, out, _ = own(*command("linear", "--epsilon", 0.15, *words, *PLAIN, output=output))
    about = found(output)
    assert code == 0 and title in out and len(about["tail"]["pgd"]["classes"]) == count
    weakest = sorted(row["ra_pgd"] for row in about["per_class"].values())[:count]
    assert about["tail"]["pgd"]["value"] == pytest.approx(np.mean(weakest))
    assert ("ra_tail_30" in about) == (title == "RA-Tail-30")


def test_attacked_images_are_saved_exactly(own, workshop, output):
    words = ["--epsilon", 0.15, "--save-examples", "npz", "--max-examples", 8, *PLAIN]
    assert own(*command("linear", *words, output=output))[0] == 0
    clean = np.load(workshop.folder / "digits.npz")["x_test"][:, None] / 255
    with np.load(output / "examples" / "pgd" / "examples.npz") as kept:
        difference = np.abs(kept["x"] - clean[kept["ids"]])
        assert kept["x"].shape == (8, 1, 8, 8) and np.bincount(kept["y"]).tolist() == [2, 2, 2, 2]
    assert 0.14 < difference.max() <= 0.15 + 1e-6
    saved = found(output)["examples"]["saved"]["pgd"]
    assert saved["n"] == 8 and saved["accuracy"] == saved["accuracy_before"]


def test_attacked_images_are_saved_as_pictures(own, workshop, output):
    words = ["--epsilon", "8/255", "--save-examples", "png", "--quick", "--autoattack-chunk-size", 24, *PLAIN]
    assert own(*command("linear", *words, output=output))[0] == 0
    clean = np.load(workshop.folder / "digits.npz")
    pictures = sorted((output / "examples" / "pgd").iterdir())
    assert len(pictures) == 24 and pictures[1].name == "000001-class000.png"
    levels = np.stack([np.asarray(Image.open(picture)) for picture in pictures]).astype(int)
    assert np.abs(levels - clean["x_test"]).max() == 8
    assert found(output)["examples"]["saved"]["pgd"]["format"] == "png"


def test_images_that_autoattack_turned_are_saved_or_said_to_be_missing(own, copy):
    _, out, err = own(*command("linear", *AUTOATTACK, "--save-examples", "npz", output=copy))
    assert (copy / "examples" / "autoattack").is_dir() or "--save-examples" in out + err


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_cut_file_of_attacked_images_is_refused(own, output):
    words = command("linear", *SEVERAL, "--quick", "--save-examples", "npz", output=output)
    assert own(*words)[0] == 0
    file = min(state(output).glob("images-*.npz"))
    file.write_bytes(file.read_bytes()[:100])
    code, _, err = closed(own, *words)
    assert code == 2 and file.name in one_sentence(err)


def test_a_network_whose_numbers_cannot_be_trusted_is_suspicious(own, output):
    code, out, _ = own(*command("loud", "--epsilon", 0.1, weights=None, output=output))
    trust = found(output)["trust"]
    assert code == 0 and "can it be trusted? suspicious" in out and trust["verdict"] == "suspicious"
    lines = {line["name"]: line["verdict"] for line in trust["lines"]}
    assert lines["logit scale"] == "suspicious" and lines["AutoAttack's own warnings"] == "not measured"
    assert trust["measured"] == 8


# --- a run directory -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(workshop):
    """A run that held images out."""
    words = ["train", "digits.at", "--model.width", 2, "--method.attack.steps", 1, "--validation.attack.steps", 1]
    words += ["--epochs", 1, "--threads", 1, "--data.holdout", 0.2, "--output", workshop.folder / "run"]
    code, _, err = quietly(*words)
    assert code == 0, err
    return workshop.folder / "run"


def test_a_run_that_held_images_out_has_its_tail_validated(own, run):
    code, out, err = own("evaluate", run, "--no-trust", "--attacks", "pgd")
    tail = found(run)["tail"]["pgd"]
    assert (code, err) == (0, "") and "RA-Tail-30" in out and found(run)["epoch"] == 1
    assert len(tail["validated"]["classes"]) == 3 and 0 < tail["validated"]["n_validation"] < 300
    rows = found(run)["per_class"]
    assert tail["validated"]["value"] == pytest.approx(
        np.mean([rows[name]["ra_pgd"] for name in tail["validated"]["classes"]])
    )
    assert tail["value"] <= tail["validated"]["value"]


def test_a_run_is_measured_under_another_threat_elsewhere(own, run, output):
    before = contents(run)
    words = ["--threat", "l2", "--epsilon", 0.5, "--images", 20, *PLAIN]
    assert own("evaluate", run, *words, "--output", output)[0] == 0
    threat = found(output)["protocol"]["attack"]["threat"]
    assert threat == {"kind": "threat.l2", "radius": 0.5} and found(output)["n"] == 20
    assert contents(run) == before


# --- compare ---------------------------------------------------------------------------------------------------------


def test_two_evaluations_are_compared(own, plain):
    code, out, err = own("compare", *plain, "--resamples", 50)
    assert (code, err) == (0, "") and all(word in out for word in ("average", "tail", "SA", "RA-PGD", "RA-margin"))
    ours, theirs = (np.load(path / "evaluation.npz") for path in plain)
    right = [kept["pgd"] == kept["y"] for kept in (ours, theirs)]
    cells = next(line for line in out.splitlines() if "RA-PGD" in line).split()
    only = [(right[0] & ~right[1]).sum(), (right[1] & ~right[0]).sum()]
    assert [int(cells[k]) for k in (2, -3, -2)] == [24, *only]
    difference = 100 * (right[0].mean() - right[1].mean())
    assert cells[3] == f"{difference:+.1f}" and difference != 0


def test_the_comparison_is_readable_in_a_narrow_terminal(own, whole):
    _, out, _ = own("compare", whole[0], whole[0], "--resamples", 10)
    assert "…" not in out and "RA-AA" in out


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        (["--images", 8], {}, "of different samples: evaluate both models on the same images"),
        ([], {"data": "mirrored.npz"}, "differ in data_sha256"),
        (["--epsilon", 0.1], {}, "differ in pgd, threat: radius: 0.15 and 0.1: evaluate both with the same settings"),
    ],
    ids=["fewer", "other", "another epsilon"],
)
def test_evaluations_that_differ_are_not_compared(own, plain, output, words, given, said):
    assert own(*command("linear", "--epsilon", 0.15, *PLAIN, *words, **given, output=output))[0] == 0
    code, out, err = own("compare", plain[0], output)
    assert code == 2 and said in one_sentence(err) and out == ""


def test_a_folder_without_an_evaluation_is_not_compared(own, plain, tmp_path):
    for words in ([plain[0], tmp_path], [tmp_path, plain[0]]):
        code, out, err = own("compare", *words)
        assert code == 2 and "evaluation.json does not exist: give a run directory" in one_sentence(err) and out == ""


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "kept",
    [
        None,
        pytest.param(200),
        pytest.param(0),
    ],
    ids=["gone", "cut", "empty"],
)
def test_an_evaluation_whose_arrays_are_cut_is_not_compared(own, plain, tmp_path, kept):
    path = shutil.copytree(plain[1], tmp_path / "cut")
    file = path / "evaluation.npz"
    data = file.read_bytes()
    file.unlink()
    if kept is not None:
        file.write_bytes(data[:kept])
    code, _, err = closed(own, "compare", plain[0], path)
    assert (
        code == 2 and "do not hold a complete evaluation" in one_sentence(err) and "run `doubly evaluate` again" in err
    )


@pytest.mark.parametrize("spoilt", ["evaluation.json", "evaluation.npz"])
def test_an_evaluation_without_its_fields_is_not_compared(own, plain, tmp_path, spoilt):
    path = shutil.copytree(plain[1], tmp_path / "cut")
    (path / "evaluation.json").write_text('{"schema": 2}') if spoilt == "evaluation.json" else np.savez(path / spoilt)
    code, _, err = own("compare", plain[0], path)
    assert code == 2 and spoilt in one_sentence(err) and "run `doubly evaluate` again" in err


@pytest.mark.parametrize(
    "words",
    [
        ["--resamples", 0],
        pytest.param(
            ["--seed", -1],
        ),
    ],
    ids=["resamples", "seed"],
)
def test_numbers_of_the_bootstrap_are_checked(own, plain, words):
    code, out, err = own("compare", *plain, *words)
    assert code == 2 and words[0].removeprefix("--") in one_sentence(err) and out == ""


# --- help ------------------------------------------------------------------------------------------------------------

OPTIONS = ["attacks", "autoattack", "quick", "threat", "epsilon", "jobs", "checkpoint", "device"]
OPTIONS += ["model", "weights", "data", "data-root", "no-trust"]
OPTIONS += [field.name.replace("_", "-") for field in dataclasses.fields(EvalConfig) if field.name != "trust"]


@pytest.mark.parametrize(("verb", "options"), [("evaluate", OPTIONS), ("compare", ["resamples", "seed"])])
def test_help_lists_every_option(own, verb, options):
    code, out, err = own(verb, "--help")
    listed = re.findall(r"│ --([a-z-]+)", out)
    assert (code, err) == (0, "") and sorted(listed) == sorted(options)
    assert "run directory" in out


def test_help_lists_set(own):
    assert "--set" in own("evaluate", "--help")[1]


def test_help_says_what_no_trust_does(own):
    text = " ".join(own("evaluate", "--help")[1].replace("│", " ").split())
    assert "--no-trust ask also whether the numbers can be trusted" not in text
