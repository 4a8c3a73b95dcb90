"""Tar files as WebDataset writes them, and corruptions as CIFAR-10-C has them, both made of digits."""

import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from doubly import LinfBall, evaluate
from doubly.data import TarShards


def write_shard(path: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write KEY.png and KEY.cls of each image."""
    with tarfile.open(path, "w") as shard:
        for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            picture = io.BytesIO()
            Image.fromarray(image).save(picture, "png")
            for name, content in ((f"{number:05d}.png", picture.getvalue()), (f"{number:05d}.cls", b"%d" % label)):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def write_corruptions(folder: Path, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write five severities of noise and of low contrast, one below the other, and the labels."""
    noise = np.random.default_rng(0).normal(size=pixels.shape)
    files = {
        "noise": [pixels + 25 * severity * noise for severity in range(1, 6)],
        "contrast": [128 + (pixels - 128.0) * (1 - 0.17 * severity) for severity in range(1, 6)],
    }
    for name, severities in files.items():
        np.save(folder / f"{name}.npy", np.concatenate(severities).clip(0, 255).astype(np.uint8))
    np.save(folder / "labels.npy", np.tile(labels, 5))


digits = load_digits()
pixels, labels = (digits.images * 255 / 16).round().astype(np.uint8), digits.target
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_shard(folder / "train-000.tar", pixels[:720], labels[:720])
    write_shard(folder / "train-001.tar", pixels[720:1440], labels[720:1440])
    write_shard(folder / "test-000.tar", pixels[1440:], labels[1440:])
    splits = TarShards(".").load(folder)  # on the command line: --data FOLDER, or 'FOLDER/train-{000..001}.tar'
    x, y = splits.train.pixels(slice(None)), splits.train.y
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    rgb = np.repeat(pixels[1440:, :, :, None], 3, axis=3)
    write_corruptions(folder, rgb, labels[1440:])
    result = evaluate(model, splits.test, LinfBall(0.05), ["pgd"], corruptions=folder, trust=False)
print(result)
for corruption, found in result.corruptions["corruptions"].items():
    severities = ", ".join(f"{accuracy:.1%}" for accuracy in found["severities"])
    print(f"{corruption}: {severities} at severities 1 to 5, weakest classes {found['tail']:.1%}")
print(f"all: {result.corruptions['accuracy']:.1%}, weakest classes {result.corruptions['tail']:.1%}")
