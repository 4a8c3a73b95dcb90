"""Networks, weights and images as a user brings them, for the tests of evaluate and compare, and their commands."""

from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_digits

from doubly.rundir import read_json, sha256

NETS = "user_networks"
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

class Gray(nn.Sequential):
    def forward(self, x):
        return super().forward(x[:, :1])

def of_color():
    return Gray(*linear())

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
    return nn.Sequential(linear(), Called(lambda x: ([x], x)))

def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))

def key_error():
    return nn.Sequential(linear(), Called(lambda x: {}["logits"]))

def weights_do_not_fit():
    linear().load_state_dict({})

def of_a_path(path):
    return linear()

def number():
    return 3

def loud():
    return nn.Sequential(linear(), Called(lambda x: 1e4 * x))
"""
EPSILON = 0.27  # at which two of twelve images stay robust, both in the last chunk
AUTOATTACK = ["--epsilon", EPSILON, "--autoattack", "--images", 12, "--autoattack-chunk-size", 3]
PLAIN = ["--attacks", "pgd", "--no-trust"]
SEVERAL = ["--epsilon", 0.9, *PLAIN, "--images", 12, "--autoattack-chunk-size", 3]  # none stays robust
LABELS = range(4)


def contents(folder):
    """Return every file below with its checksum."""
    return {str(p.relative_to(folder)): sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def is_one_sentence(err):
    return err.count("\n") == 1 and err.startswith("doubly: ")


def without_times(value):
    """Return JSON without the fields that hold times."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "seconds"}
    return value


def evaluation(folder):
    return read_json(Path(folder) / "evaluation.json")


def results(folder):
    """Return all that an evaluation has written, to be compared with another."""
    with np.load(Path(folder) / "evaluation.npz") as file:
        return without_times(evaluation(folder)), {name: file[name].tolist() for name in file.files}


def state_folder(folder):
    """Return the one folder with the state of AutoAttack."""
    (path,) = (Path(folder) / "autoattack").iterdir()
    return path


def command(function="linear", *words, weights="net.safetensors", data="digits.npz", output="out"):
    flags = [] if weights is None else ["--weights", weights]
    return ["evaluate", "--model", f"{NETS}:{function}", *flags, "--data", data, "--output", output, *words]


def split():
    """Return 36 training and 24 test images of four digits, class by class."""
    source = load_digits()
    x, y = (source.images * 255 / 16).round().astype(np.uint8), source.target.astype(np.int64)
    rows = np.stack([np.flatnonzero(y == label)[:15] for label in LABELS])
    test, train = rows[:, :6].reshape(-1), rows[:, 6:].reshape(-1)
    return x[train], y[train], x[test], y[test]


def nearest_mean(x, y, sharpness=4.0):
    """Return weights of the linear network that predicts the class with the nearest mean, in doubt the last."""
    means = torch.stack([torch.from_numpy(x[y == label] / 255).float().mean(0).flatten() for label in LABELS])
    doubt = torch.tensor([0.0, 0.0, 0.0, 4.0])
    return {"1.weight": sharpness * means, "1.bias": doubt - sharpness * means.square().sum(1) / 2}


def write_inputs(folder):
    """Write networks, weights and images into a folder."""
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
    for name, prefix in (("parallel", "module."), ("compiled", "_orig_mod."), ("both", "_orig_mod.module.")):
        torch.save({f"{prefix}{key}": value for key, value in weights.items()}, folder / f"{name}.pt")
    torch.save({"state_dict": weights, "epoch": 3}, folder / "checkpoint.pt")
    changed = {**weights, "1.weight": weights["1.weight"] + torch.linspace(-1, 1, 256).reshape(4, 64)}
    torch.save(changed, folder / "other.pt")
