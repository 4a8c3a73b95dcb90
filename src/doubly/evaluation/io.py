"""evaluation.json and evaluation.npz: how an EvalResult is written, and how it is read back."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from doubly.errors import UsageError
from doubly.evaluation.result import EvalResult
from doubly.evaluation.summary import SCHEMA
from doubly.rundir import read_json, write_json


def write(result: EvalResult, folder: Path, more: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"y": result.y, "ids": np.arange(result.n) if result.ids is None else result.ids}
    arrays |= result.answers
    arrays |= {f"{name}_losses": values for name, values in result.losses.items()}
    arrays |= {f"{name}_margins": values for name, values in result.margins.items()}
    arrays |= {f"after_{name}": values for name, values in result.after.items()}
    if "pgd" in result.losses and result.weights_r:
        arrays["weights"] = np.stack([result.weights(r, result.weights_normalize).weights for r in result.weights_r])
    write_arrays(folder / "evaluation.npz", arrays)
    write_json(folder / "evaluation.json", {**more, **result.summary()})


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """All of them or none: under another name first."""
    unfinished = path.with_name(f".{path.stem}-{os.getpid()}.npz")
    np.savez(unfinished, **arrays)
    unfinished.replace(path)


def read(folder: Path) -> EvalResult:
    """What `write` wrote; the validation part is not kept."""
    about = read_json(folder / "evaluation.json")
    if not isinstance(about, dict) or about.get("schema") not in (1, SCHEMA):
        raise UsageError(f"{folder / 'evaluation.json'} is of another version: run `doubly evaluate` again")
    try:
        with (folder / "evaluation.npz").open("rb") as raw, np.load(raw, allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in kept.files}
        return _assembled(about, arrays)
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, BadZipFile) as problem:
        raise UsageError(
            f"{folder}: evaluation.json and evaluation.npz hold no whole evaluation ({type(problem).__name__}: "
            f"{problem!s:.60}): run `doubly evaluate` again"
        ) from None


def _assembled(about: Mapping[str, Any], arrays: dict[str, Any]) -> EvalResult:
    losses, margins = _taken(arrays, "_losses"), _taken(arrays, "_margins")
    arrays.pop("weights", None)
    after = {name.removeprefix("after_"): arrays.pop(name) for name in list(arrays) if name.startswith("after_")}
    tail, weights = about.get("tail", {}), about.get("weights", [])
    return EvalResult(
        arrays.pop("y"),
        tuple(about["per_class"]),
        {"clean": arrays.pop("clean"), **{name: value for name, value in arrays.items() if name != "ids"}},
        about["protocol"],
        arrays["ids"],
        losses,
        after,
        about.get("autoattack", {}),
        None,
        about.get("examples", {}),
        about.get("trust", {}),
        tail.get("share", 0.3),
        tail.get("rounding", "round"),
        tuple(part["r"] for part in weights),
        weights[0]["normalize"] if weights else "batch",
        margins,
        about.get("curve", {}),
    )


def _taken(arrays: dict[str, Any], suffix: str) -> dict[str, Any]:
    """The arrays whose names end so, which are no answers, by the name of the attack."""
    return {name.removesuffix(suffix): arrays.pop(name) for name in list(arrays) if name.endswith(suffix)}
