"""Real images through the whole path: train, stop, resume, evaluate, on a few images of each class of each set."""

import json
from pathlib import Path

import pytest

from doubly.checkpoints.load import load_run
from doubly.cli import main
from doubly.data import DATASETS
from doubly.errors import Interrupted
from doubly.recipes import recipe
from doubly.rundir import read_json, read_metrics, sha256
from doubly.training.loop import train_run

MODEL = Path("checkpoints/last/model.safetensors")


@pytest.mark.parametrize("dataset", ["cifar10", "svhn", "stl10", "gtsrb"])
def test_a_small_recipe_trains_resumes_and_evaluates(dataset, real_data, tmp_path, capfd):
    name = f"{dataset}.imbalanced.small.done_pgd"
    source = recipe(name).data.source
    assert type(source) is DATASETS[dataset]
    train = source.load(real_data).train
    few = {label: train.ids[train.y == k][:4].tolist() for k, label in enumerate(train.classes)}
    kept, whole, cut = tmp_path / "few.json", tmp_path / "whole", tmp_path / "cut"
    kept.write_text(json.dumps({"n": len(train), "kept": few}))
    changes = [
        *("--set", f'data.imbalance={{"kind": "imbalance.selected", "file": "{kept}"}}'),
        *("--data-root", str(real_data), "--data.test-per-class", "2", "--epochs", "2", "--batch", "8"),
        *("--method.attack.steps", "1", "--validation.attack.steps", "1", "--model.width", "4"),
        *("--threads", "1", "--device", "cpu", "--channels-last", "no"),
    ]
    assert main(["train", name, *changes, "--output", str(whole)]) == 0
    assert f"{dataset} here is not the published set" in capfd.readouterr().out
    steps = iter([False] * 3 + [True])
    with pytest.raises(Interrupted):
        train_run(load_run(whole), cut, stop=lambda: next(steps))
    assert main(["train", "--resume", "--output", str(cut), "--threads", "1"]) == 0
    assert sha256(cut / MODEL) == sha256(whole / MODEL)
    assert len(read_metrics(cut / "metrics.jsonl")) == 2
    capfd.readouterr()
    assert main(["evaluate", str(cut), "--device", "cpu"]) == 0
    assert "RA-Tail-30" in capfd.readouterr().out
    found = read_json(cut / "evaluation.json")
    assert found["n"] == 2 * len(train.classes) and list(found["per_class"]) == list(train.classes)
    assert found["protocol"]["note"].startswith(f"{dataset} here is not the published set")
