"""Somebody's own network or data: named on the command line as package.module:function, or handed in from Python."""

import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from doubly.data import AnyImages as AnyImages
from doubly.data import Splits
from doubly.data import as_images as as_images
from doubly.errors import UsageError
from doubly.models import Model


@dataclass(frozen=True)
class OwnModel:
    """A function that returns an nn.Module taking images in [0,1] (normalize inside it), and weights to begin from."""

    function: str = "package.module:function"
    """where the function is; called with classes=… if it takes that"""
    weights: str | None = None
    """safetensors file, or a state dict saved by torch (read weights-only)"""

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        module_name, _, function_name = self.function.partition(":")
        if not function_name:
            raise UsageError(f"--model is written package.module:function, got '{self.function}'")
        sys.path.insert(0, str(Path.cwd()))
        try:
            function = getattr(importlib.import_module(module_name), function_name)
        except Exception as problem:  # whatever somebody's module raises when it is imported
            reason = f"{type(problem).__name__}: {_first_line(problem)}"
            raise UsageError(f"--model {self.function}: {reason}; run from the folder that holds the module") from None
        finally:
            sys.path.remove(str(Path.cwd()))
        try:
            signature = inspect.signature(function)
            arguments = {"classes": classes} if "classes" in signature.parameters else {}
            signature.bind(**arguments)
        except (TypeError, ValueError) as problem:
            raise UsageError(
                f"--model {self.function} cannot be called ({problem}): name a function of nothing, or of classes"
            ) from None
        try:
            model = function(**arguments)
        except Exception as problem:  # whatever somebody's function raises
            reason = f"{type(problem).__name__}: {_first_line(problem)}"
            raise UsageError(f"--model {self.function} raised {reason}; mend the function, or name another") from None
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {self.function} must return an nn.Module, got {type(model).__name__}")
        if self.weights is not None:
            load_weights(model, Path(self.weights))
        return model


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [""])[0]


def without_initial_weights(model: Model) -> Model:
    """For a network that a checkpoint fills: the file that it began from may be gone."""
    return replace(model, weights=None) if isinstance(model, OwnModel) else model


@dataclass(frozen=True)
class GivenModel:
    """A network that was handed in from Python; it cannot be rebuilt from the run directory alone."""

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        raise UsageError(
            "this run trained a network that was handed in from Python: name the function that builds it with "
            "--model package.module:function"
        )


@dataclass(frozen=True)
class GivenData:
    """Images that were handed in from Python."""

    def load(self, root: Path | None) -> Splits:
        raise UsageError("this run used images that were handed in from Python: evaluate it from Python as well")


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill the model from a safetensors file or a state dict; nothing in the file is executed."""
    try:
        if path.suffix == ".safetensors":
            tensors: object = safetensors.torch.load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"there is no weights file {path}: check the path") from None
    except Exception as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise UsageError(
            f"{path} cannot be read as weights ({reason:.120}): give safetensors or a plain state dict"
        ) from None
    if isinstance(tensors, dict) and isinstance(tensors.get("state_dict"), dict):
        tensors = tensors["state_dict"]
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UsageError(f"{path} holds no state dict: save model.state_dict(), or a safetensors file")
    fill(model, tensors, path)


def fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """load_state_dict with a sentence instead of a page."""
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    found = tensors
    if set(tensors) != set(expected):  # perhaps saved from inside DataParallel or torch.compile
        found = {re.sub(r"^((module|_orig_mod)\.)+", "", name): t for name, t in tensors.items()}
    for name in [*expected, *found]:
        ours, theirs = expected.get(name), tuple(found[name].shape) if name in found else None
        if ours != theirs:
            raise UsageError(
                f"{path} does not fit the model: '{name}' is {'missing' if theirs is None else theirs} in the file "
                f"and {'missing' if ours is None else ours} in the model; give the weights of this network"
            )
    model.load_state_dict(found)
