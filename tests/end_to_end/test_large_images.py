"""Photos through the command line: shards on disk, ImageNet's stem and crops, recomputed blocks."""

import numpy as np
import pytest
from PIL import Image

from doubly.rundir import read_json, read_metrics


@pytest.fixture
def photos(tmp_path):
    """Two classes of eight photos of different sizes to train on, two each to test on."""
    random = np.random.default_rng(0)
    for part, count in (("train", 8), ("test", 2)):
        for label, name in enumerate(("day", "night")):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = random.integers(64, 100, 2)
                pixels = random.integers(0, 120, (height, width, 3)) + (120 if label == 0 else 0)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


def test_photos_are_trained_on_through_shards(cli, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "cache"))
    code, out, err = cli(
        *("train", "cifar10.small.at", "--set", "data.source=dataset.folder", "--data-root", photos),
        *("--data.source.size", 64, "--data.source.memory", 0, "--set", "data.augment=augment.resized_crop_flip"),
        *("--set", 'model={"kind": "model.resnet18", "stem": "imagenet"}', "--epochs", 1, "--batch-size", 8),
        *("--data.holdout", 0, "--method.attack.steps", 1, "--validation.attack.steps", 1),
        *("--recompute-activations", "--channels-last", "no", "--device", "cpu", "--threads", 1, "--output", "run"),
    )
    assert (code, err) == (0, ""), out + err
    assert {path.name for path in (tmp_path / "cache" / "shards").glob("*/*")} == {"00000.bin", "shape"}
    config = read_json(tmp_path / "run" / "config.json")
    assert config["model"]["stem"] == "imagenet" and config["recompute_activations"]
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1
