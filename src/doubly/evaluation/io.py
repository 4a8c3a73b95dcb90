"""The files of an evaluation: evaluation.json, evaluation.npz, gallery.npz, and attacked images."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.errors import UsageError
from doubly.evaluation.metrics import ROUNDINGS
from doubly.evaluation.result import EvalResult
from doubly.evaluation.summary import SCHEMA
from doubly.files import json_bytes, make_folder, remove_leftovers, replacing, write_arrays
from doubly.metric_names import is_number, is_share
from doubly.reading import load_npz, read_json
from doubly.rundir import RunDir


def check_folder(path: Path) -> None:
    """Refuse a folder that results cannot be written into, before hours of work.

    Raises:
        UsageError: If the folder, or the one that it would be created in, cannot be written.
    """
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(
            f"{path} cannot hold the results: {existing} is not a folder that may be written; choose another output"
        )


def write_result(result: EvalResult, folder: Path, extra: Mapping[str, Any]) -> None:
    """Write evaluation.json and evaluation.npz.

    Args:
        result: The result.
        folder: Where to write; it is created if needed.
        extra: Further fields of evaluation.json.
    """
    make_folder(folder)
    remove_leftovers(folder)
    arrays: dict[str, Any] = {"y": result.y, "ids": np.arange(result.n) if result.ids is None else result.ids}
    arrays |= result.predictions
    arrays |= {f"{name}_losses": values for name, values in result.losses.items()}
    arrays |= {f"{name}_margins": values for name, values in result.margins.items()}
    arrays |= {f"{name}_radii": values for name, values in result.radii.items()}
    arrays |= {f"after_{name}": values for name, values in result.robust_after.items()}
    if "pgd" in result.losses and result.weights_r:
        arrays["weights"] = np.stack([result.weights(r, result.weights_normalize).weights for r in result.weights_r])
    with replacing(RunDir(folder).evaluation) as unfinished:  # both are complete before one is replaced
        unfinished.write_bytes(json_bytes({**extra, **result.summary()}, indent=2))
        write_arrays(RunDir(folder).predictions, arrays)


def write_gallery(folder: Path, arrays: Mapping[str, Any] | None) -> None:
    """Write gallery.npz, or remove that of an earlier evaluation if there is none."""
    if arrays is None:
        RunDir(folder).gallery.unlink(missing_ok=True)
        return
    make_folder(folder)
    write_arrays(RunDir(folder).gallery, arrays)


def read_result(folder: Path) -> EvalResult:
    """Read what `write_result` wrote; the part `validation` is not saved.

    Raises:
        UsageError: If a file is missing, damaged, or of another version.
    """
    summary = read_json(RunDir(folder).evaluation)
    if not isinstance(summary, dict) or summary.get("schema") not in (1, SCHEMA):
        raise UsageError(f"{RunDir(folder).evaluation} is of another version: run `doubly evaluate` again")
    try:
        return _assembled(summary, load_npz(RunDir(folder).predictions))
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder}: evaluation.json and evaluation.npz do not hold a complete evaluation ({type(error).__name__}: "
            f"{error!s:.60}): run `doubly evaluate` again"
        ) from None


def _check_arrays(arrays: Mapping[str, Any], classes: int) -> None:
    """Refuse arrays that are not labels, predictions and numbers of the same samples."""
    n = len(arrays["y"])
    for name, values in arrays.items():
        is_label = name in ("y", "ids", "clean") or not name.endswith(("_losses", "_margins", "_radii"))
        kinds = "b" if name.startswith("after_") else "iu" if is_label and name != "weights" else "f"
        if values.dtype.kind not in kinds or values.shape[-1:] != (n,) or values.ndim != 1 + (name == "weights"):
            raise ValueError(f"{name} is of {values.dtype} and shape {values.shape}")
    if n == 0 or arrays["y"].min() < 0 or arrays["y"].max() >= classes:
        raise ValueError("y holds other labels than the classes")


def _check_summary(summary: Mapping[str, Any]) -> None:
    """Refuse fields of another type than `summarize` writes."""
    tail, weights = summary.get("tail", {}), summary.get("weights", [])
    for name in ("per_class", "protocol", "tail", "autoattack", "examples", "trust", "curve", "corruptions"):
        if not isinstance(summary.get(name, {}), dict):
            raise ValueError(f"{name} is {summary[name]!r:.40}")
    if not is_share(tail.get("share", 0.3)) or tail.get("rounding", "round") not in ROUNDINGS:
        raise ValueError(f"tail is {tail!r:.40}")
    for part in weights if isinstance(weights, list) else [weights]:
        if not isinstance(part, dict) or not is_number(part.get("r")) or not isinstance(part.get("normalize"), str):
            raise ValueError(f"weights hold {part!r:.40}")
    if not isinstance(summary["protocol"].get("attacks", {}), dict):
        raise ValueError("protocol.attacks are not named")


def _assembled(summary: Mapping[str, Any], arrays: dict[str, Any]) -> EvalResult:
    _check_summary(summary)
    _check_arrays(arrays, len(summary["per_class"]))
    losses, margins = _pop_suffix(arrays, "_losses"), _pop_suffix(arrays, "_margins")
    radii = _pop_suffix(arrays, "_radii")
    arrays.pop("weights", None)
    after = {name.removeprefix("after_"): arrays.pop(name) for name in list(arrays) if name.startswith("after_")}
    tail, weights = summary.get("tail", {}), summary.get("weights", [])
    return EvalResult(
        y=arrays.pop("y"),
        classes=tuple(summary["per_class"]),
        predictions={"clean": arrays.pop("clean"), **{name: value for name, value in arrays.items() if name != "ids"}},
        protocol=summary["protocol"],
        ids=arrays["ids"],
        losses=losses,
        robust_after=after,
        autoattack=summary.get("autoattack", {}),
        examples=summary.get("examples", {}),
        trust=summary.get("trust", {}),
        tail_share=tail.get("share", 0.3),
        tail_rounding=tail.get("rounding", "round"),
        weights_r=tuple(part["r"] for part in weights),
        weights_normalize=weights[0]["normalize"] if weights else "batch",
        margins=margins,
        curve=summary.get("curve", {}),
        radii=radii,
        corruptions=summary.get("corruptions", {}),
    )


def _pop_suffix(arrays: dict[str, Any], suffix: str) -> dict[str, Any]:
    """Remove the arrays whose names end with the suffix, and return them by the name of the attack."""
    return {name.removesuffix(suffix): arrays.pop(name) for name in list(arrays) if name.endswith(suffix)}


def write_example_arrays(folder: Path, attacked: Tensor, y: Tensor, ids: Tensor) -> Tensor:
    """Write attacked images exactly, into examples.npz, and return the images as read back."""
    _clear_examples(folder)
    arrays = {"x": attacked.cpu().numpy(), "y": y.cpu().numpy(), "ids": ids.cpu().numpy()}
    write_arrays(folder / "examples.npz", arrays)
    with np.load(folder / "examples.npz", allow_pickle=False) as file:
        return torch.from_numpy(file["x"])


def write_example_pictures(folder: Path, levels: NDArray[np.uint8], y: Tensor, ids: Tensor) -> Tensor:
    """Write attacked images in gray levels (B, H, W, C) as PNG files, and return the images as read back, in [0, 1]."""
    from PIL import Image

    _clear_examples(folder)
    images = []
    for pixels, image_id, label in zip(levels, ids.tolist(), y.tolist(), strict=True):
        file = folder / f"{image_id:06d}-class{label:03d}.png"
        with replacing(file) as unfinished:
            Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(unfinished)
        with Image.open(file) as picture:
            array = np.asarray(picture)
        images.append(torch.from_numpy(array.reshape(pixels.shape).copy()).permute(2, 0, 1))
    return torch.stack(images).float().div(255)


def _clear_examples(folder: Path) -> None:
    """Create the folder, and remove the examples of an earlier evaluation."""
    make_folder(folder)
    remove_leftovers(folder)
    for old in (*folder.glob("[0-9]*-class[0-9]*.png"), *folder.glob("examples.npz")):
        old.unlink()
