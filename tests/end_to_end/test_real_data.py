"""Real images through the whole path: train, stop, resume, evaluate, on a few images of each class of each set."""

import json
from pathlib import Path

import pytest

from doubly.checkpoints.load import load_run
from doubly.data import DATASETS
from doubly.errors import Interrupted
from doubly.recipes import recipe
from doubly.rundir import read_json, read_metrics, sha256
from doubly.training.loop import train_run

MODEL = Path("checkpoints/last/model.safetensors")


@pytest.mark.parametrize("dataset", ["cifar10", "svhn", "stl10", "gtsrb"])
def test_a_small_recipe_trains_resumes_and_evaluates(dataset, real_data, tmp_path, cli):
    name = f"{dataset}.imbalanced.small.done_pgd"
    source = recipe(name).data.source
    assert type(source) is DATASETS[dataset]
    train = source.load(real_data).train
    few = {label: train.ids[train.y == k][:4].tolist() for k, label in enumerate(train.classes)}
    (tmp_path / "few.json").write_text(json.dumps({"n": len(train), "kept": few}))
    changes = [
        *("--set", 'data.imbalance={"kind": "imbalance.selected", "file": "few.json"}'),
        *("--data-root", str(real_data), "--data.test-per-class", "2", "--epochs", "2", "--batch-size", "8"),
        *("--method.attack.steps", "1", "--validation.attack.steps", "1", "--model.width", "4"),
        *("--threads", "1", "--device", "cpu", "--channels-last", "no"),
    ]
    result = cli("train", name, *changes, "--output", "whole")
    assert result.code == 0 and f"{dataset} here is not the published set" in result.out
    steps = iter([False] * 3 + [True])
    with pytest.raises(Interrupted):
        train_run(load_run(tmp_path / "whole"), tmp_path / "stopped", stop=lambda: next(steps))
    assert cli("train", "--resume", "--output", "stopped", "--threads", "1").code == 0
    assert sha256(tmp_path / "stopped" / MODEL) == sha256(tmp_path / "whole" / MODEL)
    assert len(read_metrics(tmp_path / "stopped" / "metrics.jsonl")) == 2
    result = cli("evaluate", "stopped", "--device", "cpu", "--trust-images", "10")
    assert result.code == 0 and "RA-Tail-30" in result.out
    evaluation = read_json(tmp_path / "stopped" / "evaluation.json")
    assert evaluation["n"] == 2 * len(train.classes) and list(evaluation["per_class"]) == list(train.classes)
    assert evaluation["protocol"]["note"].startswith(f"{dataset} here is not the published set")
