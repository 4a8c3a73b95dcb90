"""Attacked images for others to look at and to score: as arrays, exactly, or as PNG, in whole gray levels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.errors import UsageError
from doubly.threat import LinfBall, NormBall, holds

Format = Literal["png", "npz"]


def check_format(kind: str, channels: int) -> None:
    if kind not in get_args(Format):
        raise UsageError(f"attacked images are saved as {' or '.join(get_args(Format))}, got '{kind}'")
    if kind == "png" and channels not in (1, 3):
        raise UsageError(f"a PNG has 1 or 3 channels, these images have {channels}: save them as npz")


def quantized(attacked: Tensor, clean: Tensor, threat: NormBall | None) -> Tensor:
    """In whole gray levels, rounded, and not further from the clean image than the threat allows; l-infinity only."""
    levels = (attacked * 255).round()
    if isinstance(threat, LinfBall):
        slack = 1e-4  # of a gray level: 8/255 is eight levels in float32 as well
        low, high = (clean - threat.radius) * 255, (clean + threat.radius) * 255
        levels = torch.minimum(torch.maximum(levels, (low - slack).ceil()), (high + slack).floor())
    return levels.clamp(0, 255) / 255


def gray_levels(images: Tensor) -> NDArray[np.uint8]:
    """(B, C, H, W) in [0,1], rounded: (B, H, W, C)."""
    levels: NDArray[np.uint8] = (images * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return levels


def save_examples(
    folder: Path,
    kind: Format,
    attacked: Tensor,
    clean: Tensor,
    y: Tensor,
    ids: Tensor,
    threat: NormBall | None,
    answer: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """Write the images, read them back, and score what was read: the share that the network still gets right."""
    check_format(kind, attacked.shape[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("[0-9]*-class[0-9]*.png"), *folder.glob("examples.npz")):
        old.unlink()
    if kind == "npz":
        np.savez(folder / "examples.npz", x=attacked.cpu().numpy(), y=y.cpu().numpy(), ids=ids.cpu().numpy())
        with np.load(folder / "examples.npz", allow_pickle=False) as kept:
            again = torch.from_numpy(kept["x"])
    else:
        names = [f"{int(i):06d}-class{int(label):03d}.png" for i, label in zip(ids, y, strict=True)]
        again = _pictures(folder, names, quantized(attacked, clean, threat))
    answers = answer(again.to(attacked.device)).cpu()
    return {
        "format": kind,
        "n": len(y),
        "outside": 0 if threat is None else int((~holds(threat, again.to(clean.device) - clean)).sum()),
        "accuracy": float((answers == y.cpu()).float().mean()),
        "accuracy_before": float((answer(attacked).cpu() == y.cpu()).float().mean()),
    }


def _pictures(folder: Path, names: list[str], images: Tensor) -> Tensor:
    from PIL import Image

    read = []
    for name, pixels in zip(names, gray_levels(images), strict=True):
        Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(folder / name)
        with Image.open(folder / name) as picture:
            array = np.asarray(picture)
        read.append(torch.from_numpy(array.reshape(pixels.shape).copy()).permute(2, 0, 1))
    return torch.stack(read).float().div(255)
