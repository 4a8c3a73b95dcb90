"""Perturbations that were found elsewhere, as an attack: checked against the threat, and scored."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from doubly.attacks import Attack
from doubly.errors import UsageError
from doubly.reading import load_npz
from doubly.seeding import AnyGenerator
from doubly.threat import Threat


@dataclass(frozen=True, eq=False)
class Perturbations(Attack):
    """Attacked images or perturbations from a file; those outside the threat count as failures."""

    threat: Threat
    """what the attacker may do"""
    path: Path
    """the file they come from"""
    arrays: dict[str, Any]
    """`x` or `delta`, `ids` and perhaps `y`, by the rows of the file"""
    rows: tuple[int | None, ...] | None = None
    """row of each image that is attacked now; None of an image that the file has not"""

    may_leave: ClassVar[bool] = True
    for_any_images: ClassVar[bool] = False

    @property
    def short_name(self) -> str:
        return "perturbations"

    def describe(self) -> dict[str, Any]:
        return {"kind": "perturbations", "file": str(self.path), "n": len(self.arrays["ids"])}

    def covers(self, ids: Tensor) -> Tensor:
        covered = torch.isin(ids.cpu(), torch.from_numpy(self.arrays["ids"].astype(np.int64)))
        if not covered.any():
            raise UsageError(
                f"{self.path} has perturbations of none of the {len(ids)} evaluated images: `ids` are their positions "
                "in the test set, as in evaluation.npz; evaluate those images"
            )
        return covered

    def for_images(self, ids: Tensor, y: Tensor) -> "Perturbations":
        positions = {int(image): row for row, image in enumerate(self.arrays["ids"])}
        rows = tuple(positions.get(image) for image in ids.tolist())
        for row, label in zip(rows, y.tolist(), strict=True):
            if row is not None and "y" in self.arrays and self.arrays["y"][row] != label:
                raise UsageError(
                    f"{self.path} has other labels `y` than the test images of the same `ids`: it was made for other "
                    "images or in another order; use the `ids` of evaluation.npz"
                )
        return replace(self, rows=rows)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        name = "x" if "x" in self.arrays else "delta"
        values = self.arrays[name]
        if values.shape[1:] != x.shape[1:]:
            raise UsageError(
                f"`{name}` in {self.path} has images of shape {values.shape[1:]}, the test images "
                f"{tuple(x.shape[1:])}: save channels first, of the same size"
            )
        delta = torch.zeros_like(x)
        for position, row in enumerate(range(len(x)) if self.rows is None else self.rows):
            if row is not None:
                found = torch.from_numpy(values[row]).to(x)
                found = found / 255 if values.dtype == np.uint8 else found
                delta[position] = found - x[position] if name == "x" else found
        return delta


def read_perturbations(path: Path, threat: Threat) -> Perturbations:
    """Read perturbations from an .npz file, such as examples.npz of `--save-examples npz`.

    Args:
        path: The file: attacked images `x` or perturbations `delta`, (N, C, H, W); `ids`, the positions of the images
            in the test set (by default 0, 1, …); and their labels `y`, which are compared if they are there.
        threat: What the attacker may do.

    Returns:
        The attack.

    Raises:
        UsageError: If the file cannot be read, or lacks something.
    """
    try:
        arrays = load_npz(path, ("x", "delta", "ids", "y"))
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}: give an .npz file with `x` or `delta`") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as an .npz file ({error!s:.80}): save it with numpy.savez") from None
    values = arrays.get("x", arrays.get("delta"))
    if values is None or ("x" in arrays and "delta" in arrays):
        raise UsageError(f"{path} needs attacked images `x` or perturbations `delta`, one of them, (N, C, H, W)")
    if values.ndim != 4 or not (values.dtype.kind == "f" or (values.dtype == np.uint8 and "x" in arrays)):
        raise UsageError(
            f"{path} holds {values.dtype} of shape {values.shape}: save floats in [0, 1], or `x` as uint8, (N, C, H, W)"
        )
    arrays.setdefault("ids", np.arange(len(values)))
    for name in ("ids", "y"):
        if name in arrays and not _is_list(arrays[name], len(values)):
            raise UsageError(f"`{name}` in {path} must hold one whole number for each of the {len(values)} images")
    if len(np.unique(arrays["ids"])) < len(values):
        raise UsageError(f"`ids` in {path} has an image twice: give each image one perturbation")
    return Perturbations(threat, path, arrays)


def _is_list(values: NDArray[Any], n: int) -> bool:
    return values.shape == (n,) and values.dtype.kind in "iu"
