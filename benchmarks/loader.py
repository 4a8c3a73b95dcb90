"""Time of an epoch of batches: our loader against torch's DataLoader with two workers and per-sample transforms.

All read the same arrays: pad 4, random crop, flip, batch 128, floats in [0,1]. The loaders alternate within one run, so
that other load on the machine affects them alike. A line is a ratio of medians, with the smallest and the largest ratio
of one round. The workers live through all rounds, so that their start is not counted.

    python benchmarks/loader.py [--data-root DIR] [--rounds 5] [--images 20000]
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from doubly import AT, PGD, Images, TrainStep
from doubly.bilevel import SignStep
from doubly.data import CIFAR10, PadCropFlip
from doubly.data.loader import batches
from doubly.models import NarrowResNet

BATCH_SIZE, PAD = 128, 4


class PerSample(Dataset[tuple[Tensor, int]]):
    """Transforms one image at a time: with Pillow, as vision libraries do, or with tensors, which is faster."""

    def __init__(self, images: Images, pillow: bool) -> None:
        self.x, self.y = images.x[:], images.y.tolist()
        self.arrays = np.ascontiguousarray(self.x.permute(0, 2, 3, 1).numpy())
        self.pillow = pillow

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left, flip = random.randrange(2 * PAD + 1), random.randrange(2 * PAD + 1), random.random() < 0.5
        if not self.pillow:
            padded = torch.nn.functional.pad(self.x[index], [PAD] * 4)
            crop = padded[:, top : top + 32, left : left + 32]
            return (crop.flip(2) if flip else crop).float() / 255, self.y[index]
        image = ImageOps.expand(Image.fromarray(self.arrays[index]), PAD)
        image = image.crop((left, top, left + 32, top + 32))
        image = ImageOps.mirror(image) if flip else image
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float() / 255, self.y[index]


def seconds_of(epoch: Callable[[], int]) -> float:
    start = time.perf_counter()
    assert epoch() > 0
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder with CIFAR-10; without it, random images of its shape")
    parser.add_argument("--images", type=int, default=20_000, help="number of random images")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.data_root:
        images = CIFAR10(batches=2).load(options.data_root).train
    else:
        pixels = torch.randint(0, 256, (options.images, 3, 32, 32), generator=torch.Generator().manual_seed(0))
        images = Images.of(pixels.to(torch.uint8), torch.arange(options.images) % 10)

    def workers(pillow: bool) -> Callable[[], int]:
        loader = DataLoader(PerSample(images, pillow), BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True)
        return lambda: sum(len(y) for _, y in loader)

    loaders = {
        "doubly": lambda: sum(len(batch.y) for batch in batches(images, BATCH_SIZE, 0, 0, augment=PadCropFlip())),
        "DataLoader, 2 workers, Pillow": workers(True),
        "DataLoader, 2 workers, tensors": workers(False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(options.rounds + 1):
        for name, epoch in loaders.items():
            duration = seconds_of(epoch)
            if number:  # the first round is a warm-up
                seconds[name].append(duration)
    ours = seconds["doubly"]
    print(f"{len(images):,} images, batch {BATCH_SIZE}, {options.rounds} rounds, {torch.get_num_threads()} threads")
    print(f"doubly: {statistics.median(ours):.3f} s per epoch ({min(ours):.3f} to {max(ours):.3f})")
    for name, theirs in list(seconds.items())[1:]:
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        ratio = statistics.median(theirs) / statistics.median(ours)
        print(f"{name} / doubly: {ratio:.1f} ({min(ratios):.1f} to {max(ratios):.1f})")

    method = AT(PGD(steps=10, rule=SignStep(2 / 255)))
    model = NarrowResNet().build(3, 10, (0.5,) * 3, (0.25,) * 3).to(memory_format=torch.channels_last)
    batch = next(iter(batches(images, BATCH_SIZE, 0, 0, augment=PadCropFlip(), channels_last=True)))

    def step() -> int:
        method.objective(model, batch, {}, TrainStep(0, 0, 0.0, 0)).loss.backward()
        return 1

    step()
    epoch = statistics.median(seconds_of(step) for _ in range(options.rounds)) * len(images) / BATCH_SIZE
    print(f"share of an AT epoch (narrow ResNet, K = 10): {100 * statistics.median(ours) / epoch:.2f} %")


if __name__ == "__main__":
    main()
