"""A newcomer's images and network: what is said, and what is refused, by each verb. One table per surface."""

import json
import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from doubly.config import Run
from doubly.config.serialize import with_changes
from doubly.errors import UsageError
from doubly.recipes import recipe
from doubly.rundir import read_json, write_json

NETWORKS = """
import torch
from torch import nn

def net(classes):
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))

def ten():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def seeded():
    torch.manual_seed(3)
    return ten()

def softmax():
    return nn.Sequential(ten(), nn.Softmax(1))

class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = seeded()

    def forward(self, x):
        if x.min() >= 0:
            raise ValueError("the images are not normalized")
        return {"logits": self.net(x)}

def normalized():
    return Normalized()
"""
TINY = "--epochs 1 --threads 1 --method.attack.steps 1 --validation.attack.steps 1 --channels-last no"


@pytest.fixture
def call(cli, tmp_path, monkeypatch):
    """Return a function that calls `doubly` in a folder with networks, photos of many sizes, and arrays."""
    module = f"front_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(NETWORKS)
    random = np.random.default_rng(0)
    for k, name in enumerate(("cat", "dog", "ship")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            width, height = random.integers(30, 90, 2)
            pixels = random.integers(0, 80, (height, width, 3)).astype(np.uint8)
            pixels[..., k] += 120
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    x, y = random.random((60, 1, 8, 8)).astype(np.float32), np.arange(60) % 10
    holes = np.where(np.arange(60)[:, None, None, None] % 20 == 3, np.float32(np.nan), x)
    for name, pixels, labels in (("good", x, y), ("from_one", x, y + 1), ("nan", holes, y)):
        np.savez(tmp_path / f"{name}.npz", x_train=pixels, y_train=labels, x_test=pixels[:20], y_test=labels[:20])
    one = {"x_train": x[0], "y_train": np.array(0), "x_test": x[0], "y_test": np.array(0)}
    np.savez(tmp_path / "one.npz", **one)
    (tmp_path / "mk.py").write_text("")
    return lambda words: cli(*words.replace("NETS", module).split())


def test_train(call, tmp_path):
    for words, expected_code, message in [
        (f"digits.at --model NETS:softmax {TINY}", 2, "the model returns probabilities"),
        ("digits.at --method.attack.steps 0", 2, "an attack of 0 steps only adds noise: give at least 1"),
        (f"digits.at --output new --resume {TINY} --model.width 2", 0, "there is no checkpoint in new to resume"),
        (f"digits.at --output new {TINY} --model.width 2", 2, "add --resume to continue it (in Python resume=True)"),
        (f"digits.at --lr 1e30 --output high {TINY} --model.width 2", 2, "lower it (--lr), or bound the gradient"),
        ("photos", 2, "photos is data, not a recipe: doubly train --data photos --method at"),
        ("digits", 2, "digits is data, not a recipe: doubly train --data digits --method at"),
        ("--data photos", 2, "give --data and --method"),
        ("--method at", 2, "give --data and --method"),
        ("--data photos --method cfl", 2, "there is no method 'cfl': did you mean 'cfol'?"),
        ("--data fotos --method at", 2, "there is no dataset, recipe, folder or file 'fotos'"),
        ("digits.at --data photos", 2, "the recipe digits.at has its data and method: leave it out"),
        ("--config mk.py", 2, "mk.py is Python, and --config takes the config.json of a run"),
        ("--data from_one.npz --method at", 2, "labels run from 1 to 10, and no image has label 0: number"),
        ("--data nan.npz --method at", 2, "3 of 60 have NaN pixels: remove or repair them"),
        ("--data one.npz --method at", 2, "of a single image give x[None] and [label]"),
    ]:
        code, out, err = call(f"train {words}")
        assert code == expected_code and message in out + err, (words, out, err)
        assert code == 0 or err.count("\n") == 1, (words, err)
    for change in ({"epochs": 1.5}, {"batch_size": 8.0}, {"seed": "0"}):
        with pytest.raises(UsageError, match="is a whole number"):
            base = recipe("digits.at")
            Run(base.data, base.model, base.method, **change)


def test_train_on_photos_of_many_sizes(call, tmp_path):
    code, out, err = call(f"train --data photos --method cfol --model NETS:net --epsilon 4/255 --lr 0.05 {TINY}")
    assert (code, err) == (0, "") and "photos.cfol, seed 0, 1 epochs, ℓ∞, ε = 4/255 -> runs/photos.cfol-s0" in out
    assert "are resized to 32x32; --data.source.size chooses another size" in out
    config = read_json(tmp_path / "runs" / "photos.cfol-s0" / "config.json")
    assert config["data"]["root"] == str(tmp_path) and config["data"]["source"]["size"] == 32
    assert config["method"]["eta"] == pytest.approx(0.25 / 48) and config["data"]["holdout"] == 0.1
    assert config["optimizer"]["lr"]["peak"] == 0.05 and config["batch_size"] == 32
    for words, expected_code, message in [
        ("watch photos.cfol", 0, "photos.cfol, seed 0"),  # by the name that train gave it
        ("evaluate runs/photos.cfol-s0", 2, "if you trust it, add --model NETS:net or --trust-code"),
        ("check photos.cfol", 2, "if you trust it, add --model NETS:net or --trust-code"),
        ("repair runs/photos.cfol-s0", 2, "if you trust it, add --model NETS:net or --trust-code"),
        ("train --config runs/photos.cfol-s0/config.json --seed 1", 2, "if you trust it, add --model NETS:net or"),
        (
            "evaluate runs/photos.cfol-s0 --model NETS:net --no-trust --epsilon 0.1 --attacks pgd",
            0,
            "ε = 0.1, step ε/4",
        ),
        ("report photos.cfol --output page", 0, "Trained in another ball than measured in: CFOL (ℓ∞, ε = 4/255)"),
        ("compare photos.cfol photos.cfol --resamples 10", 0, "photos.cfol minus photos.cfol"),
    ]:
        code, out, err = call(words)
        message = message.replace("NETS", next(tmp_path.glob("front_*.py")).stem)
        assert code == expected_code and message in " ".join((out + err).split()), (words, out, err)
        if words.startswith("evaluate") and code == 0:
            assert "trained at ℓ∞, ε = 4/255, but measured at ℓ∞, ε = 0.1" in out


def test_evaluate_data_export_and_search(call, tmp_path, inline):
    network = "--no-trust --images 20 --attacks pgd --epsilon 0.1"
    for words, expected_code, message in [
        (f"evaluate --model NETS:ten --data good.npz {network}", 0, "NETS:ten returns a network with RANDOM weights"),
        (f"evaluate --model NETS:ten --data from_one.npz {network}", 2, "number the classes from 0, as in y - 1"),
        (f"evaluate --model NETS:net --data photos {network}", 2, "--set size=32 in other verbs"),
        ("data imbalance photos --ratio 0.5", 2, "--set size=32 in other verbs"),
        ("data inspect nan.npz", 2, "have NaN pixels"),
        ("export runs/x --output x.pth", 2, "must end in .safetensors, .onnx or .pt2"),
        ("evaluate --model NETS:ten --data good.npz --norm l7", 2, "there is no norm 'l7'"),
    ]:
        code, out, err = call(words)
        module = next(tmp_path.glob("front_*.py")).stem
        assert code == expected_code and message.replace("NETS", module) in out + err, (words, out, err)
        if "RANDOM" in message:  # before the evaluation, and with its table
            assert "RANDOM" in err and "RANDOM" in out
    code, out, err = call(f"evaluate --model NETS:seeded --data good.npz {network}")
    assert code == 0 and "RANDOM" not in out + err
    assert "PGD-20, ℓ∞, ε = 0.1, step ε/4, uniform start, 1 restart, n = 20, %" in " ".join(out.split())
    call(f"data imbalance {tmp_path}/photos --ratio 0.5 --set size=32 --output thinned")
    assert [file.name for file in (tmp_path / "thinned").iterdir()] == ["photos-step-0.5-s0.json"]
    space = {"epochs": [1], "model.width": [2], "method.attack.steps": [1], "optimizer.lr.peak": [1e30]}
    write_json(tmp_path / "space.json", space)
    code, out, err = call("search digits.at --space space.json --trials 1 --splits 1 --jobs 1 --output searched")
    assert code == 1 and "every trial failed" in err and "now:" not in out
    assert not (tmp_path / "searched" / "winner.json").exists()


def test_mean_and_std_reach_a_network_that_expects_normalized_images(call, tmp_path):
    few, both = "--images 20 --attacks pgd --epsilon 0.1 --no-trust", "--mean 0.5 --std 0.25"
    for words, expected_code, message in [
        (f"evaluate --model NETS:normalized --data good.npz {few}", 2, "the images are not normalized"),
        (f"evaluate --model NETS:normalized --data good.npz {few} {both}", 0, "wrote evaluations/"),
        (
            f"check NETS:normalized --data good.npz --images 20 {both}",
            0,
            "--model NETS:normalized --mean 0.5 --std 0.25",
        ),
        (f"repair --model NETS:normalized --data digits --rounds 1 {both}", 0, "repair.json"),
        (f"train --data good.npz --method at --model NETS:normalized {both} {TINY} --output run", 0, "trained; now"),
        (f"evaluate run --model NETS:normalized {few}", 0, "wrote run/evaluation.json"),  # the run knows mean and std
        (f"evaluate run --trust-code {few}", 0, "wrote run/evaluation.json"),
        (f"evaluate run --trust-code {few} {both}", 2, "--mean and --std go with --model package.module:function"),
        (f"evaluate run --model NETS:normalized {few} --mean 0.5", 2, "--mean and --std go together"),
        (f"evaluate --model NETS:ten --data good.npz {few} --std 0.5", 2, "takes both mean and std"),
        (f"evaluate --model NETS:ten --data good.npz {few} --mean 0.1 0.2 --std 1 1", 2, "got 2 for 1 channel(s)"),
        (
            f"evaluate --model NETS:ten --data good.npz {few} --mean 128 --std 64",
            2,
            "divide those of gray levels by 255",
        ),
        (
            f"evaluate --model NETS:ten --data good.npz {few} --mean 0.5 --std 0",
            2,
            "standard deviations finite and pos",
        ),
        ("repair --model NETS:ten --data good.npz --mean 0.1 0.2 --std 1 1", 2, "got 2 for 1 channel(s)"),
        (f"train --data good.npz --method at --model NETS:ten {TINY} --mean 128 --std 64", 2, "gray levels by 255"),
        ("train digits.at --mean 0.5 --std 0.5", 2, "--weights, --mean and --std go with --model"),
    ]:
        code, out, err = call(words)
        module = next(tmp_path.glob("front_*.py")).stem
        text = " ".join((out + err).split())
        assert code == expected_code and message.replace("NETS", module) in text, (words, out, err)
    model = read_json(tmp_path / "run" / "config.json")["model"]
    assert (model["mean"], model["std"]) == ([0.5], [0.25])
    about = [read_json(file)["protocol"] for file in (tmp_path / "evaluations").glob("*/evaluation.json")]
    assert [(one["mean"], one["std"]) for one in about] == [([0.5], [0.25])]


def test_check(call, tmp_path):
    module = next(tmp_path.glob("front_*.py")).stem
    torch.manual_seed(0)
    layer = nn.Linear(48, 3)
    save_file({"2.weight": layer.weight.data, "2.bias": layer.bias.data}, tmp_path / "w.safetensors")
    code, out, err = call(
        "check NETS:net --weights w.safetensors --data photos --set size=32 --epsilon 2/255 --images 12"
    )
    assert (code, err) == (0, "") and "RANDOM" not in out and "RA-strong" in out
    network = f"--model {module}:net --weights w.safetensors"
    for line in [
        "are these numbers trustworthy? ",
        "dead classes, ",
        "classes to worry about: ",
        f"doubly repair {network} --data photos --set size=32 --epsilon 2/255",
        f"doubly train --data photos --set data.source.size=32 --method cfol --model {module}:net --epsilon 2/255",
    ]:
        assert line in out, (line, out)
    (page,) = tmp_path.glob("checks/w-*/report/report.html")
    assert "cat" in page.read_text("utf-8") and f">doubly repair {network} --data photos --set" in page.read_text(
        "utf-8"
    )
    assert (page.parent.parent / "gallery.npz").is_file()
    evaluation = json.loads((page.parent.parent / "evaluation.json").read_text("utf-8"))
    assert evaluation["n"] == 12 and evaluation["protocol"]["data"] == "photos"
    for words, message in [
        ("", "'' is neither a run directory nor package.module:function"),
        ("nowhere", "'nowhere' is neither a run directory nor package.module:function"),
        ("NETS:net", "give test images, as in --data my_images"),
        ("NETS:net --data photos", "--set size=32 in other verbs"),
    ]:
        code, _, err = call(f"check {words}")
        assert code == 2 and message in err and err.count("\n") == 1, (words, err)


class Table(list):
    """A dataset of the package datasets, as far as it is used."""

    features: ClassVar = {"image": type("Image", (), {})(), "label": type("ClassLabel", (), {"names": ["a", "b"]})()}


def test_hugging_face_folders(call, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, _, err = call("data inspect saved")
    assert code == 2 and "needs the package datasets: pip install doubly[huggingface]" in err
    rows = Table({"image": np.full((4, 4, 3), 10 * k, np.uint8), "label": k % 2} for k in range(10))
    for loaded, train in ((rows, 8), ({"train": rows, "validation": rows}, 10)):
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path, loaded=loaded: loaded))
        code, out, err = call("data inspect saved")
        assert (code, err) == (0, "") and "3x4x4 bytes" in out and f"{train}" in out
    other = Table(rows)
    other.features = {"image": rows.features["image"]}
    for loaded, message in [({"train": rows}, "has the splits train: it needs"), (other, "one of class labels, got")]:
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path, loaded=loaded: loaded))
        assert message in call("data inspect saved").err
    assert with_changes(recipe("digits.at"), {"data.source": {"kind": "dataset.huggingface", "path": "saved"}})


def test_hugging_face_folders_of_the_real_package(call, tmp_path):
    """The promises of the stand-in above, where the extra huggingface is installed."""
    datasets = pytest.importorskip("datasets", reason="needs the extra huggingface")
    columns = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    pictures = [Image.fromarray(np.full((4, 4, 3), 10 * k, np.uint8)) for k in range(10)]
    rows = datasets.Dataset.from_dict(
        {"image": pictures, "label": [k % 2 for k in range(10)]}, features=datasets.Features(columns)
    )
    for name, saved, train in [
        ("one", rows, 8),
        ("two", datasets.DatasetDict({"train": rows, "validation": rows}), 10),
    ]:
        saved.save_to_disk(tmp_path / name)
        code, out, _ = call(f"data inspect {name}")
        assert code == 0 and "3x4x4 bytes" in out and f"{train}" in out
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "no_test")
    rows.remove_columns("label").save_to_disk(tmp_path / "no_labels")
    for name, message in [("no_test", "has the splits train: it needs"), ("no_labels", "one of class labels, got")]:
        assert message in call(f"data inspect {name}").err
    tiny = "--epsilon 0.1 --epochs 1 --data.holdout 0 --device cpu --set model=model.small_cnn --output runs/hf"
    code, _, err = call(f"train --data two --method at {tiny}")
    assert code == 0, err
    code, out, err = call("evaluate runs/hf --no-trust --images 10")
    assert code == 0 and "RA-Tail-30" in out, err
