"""Networks and data of the user: a function named on the command line, or objects handed in from Python."""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from doubly.data import DataSource, Splits
from doubly.errors import UsageError
from doubly.models import Model, SmallCNN
from doubly.models.adapt import AdaptedModel, normalization
from doubly.models.shifted import ShiftedLogits
from doubly.models.weights import load_weights

MODEL_LIBRARIES = ("hf", "timm", "torchvision", "robustbench")  # --model LIBRARY:NAME, of doubly.bridges.models


@dataclass(frozen=True)
class UserModel(Model):
    """A function that returns an nn.Module for images in [0, 1], or for normalized ones, and weights to begin from."""

    function: str = "package.module:function"
    """where the function is; it is called with classes=… if it takes that; or LIBRARY:NAME, such as hf:ORG/NAME"""
    weights: str | None = None
    """safetensors file, or a state dict saved by torch (read weights-only)"""
    mean: tuple[float, ...] | None = None
    """mean of the channels, of pixels in [0, 1], if the network expects normalized images; none: it gets [0, 1]"""
    std: tuple[float, ...] | None = None
    """standard deviation of the channels"""

    @property
    def label(self) -> str:
        return self.function

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        return _both(self.mean, self.std)

    @property
    def named_code(self) -> str | None:
        return self.function

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        if is_library_model(self.function):
            return self._library_model(channels, classes)
        function = import_function(self.function)
        try:
            signature = inspect.signature(function)
            arguments = {"classes": classes} if "classes" in signature.parameters else {}
            signature.bind(**arguments)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--model {self.function} cannot be called ({error}): name a function of nothing, or of classes"
            ) from None
        try:
            model = function(**arguments)
        except Exception as error:  # whatever the user's function raises
            raise UsageError(
                f"--model {self.function} raised {type(error).__name__}: {_first_line(error)}; fix the function, or "
                "name another"
            ) from None
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"--model {self.function} must return an nn.Module, got {type(model).__name__}: return the network"
            )
        saved = None if self.weights is None else load_weights(model, Path(self.weights))
        statistics = normalization(self.mean, self.std, channels)
        if statistics is None and saved is not None:  # a checkpoint of robustness, whose wrapper normalizes
            statistics = normalization(*saved, channels)
        return model if statistics is None else AdaptedModel(model, *statistics)

    def _library_model(self, channels: int, classes: int) -> nn.Module:
        """Return a model of another library; the bridges are above this package, and only loaded when asked for."""
        statistics = normalization(self.mean, self.std, channels) or (None, None)
        bridge = importlib.import_module("doubly.bridges.models")
        model: nn.Module = bridge.build_model(self.function, channels, classes, *statistics)
        if self.weights is not None:
            load_weights(model, Path(self.weights))
        return model

    def without_initial_weights(self) -> "UserModel":
        return replace(self, weights=None)


@dataclass(frozen=True)
class UntrustedModel(UserModel):
    """A function that a file names, such as a stranger's config.json. It is not imported until a person names it."""

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        raise self._refusal()

    def require_trusted(self) -> None:
        raise self._refusal()

    def _refusal(self) -> UsageError:
        return UsageError(
            f"the configuration names code, {self.function!r:.80}, which is not run because a file asks for it: if you "
            f"trust it, add --model {self.function:.80} or --trust-code (in Python architecture=UserModel(…))"
        )


def is_library_model(name: str | None) -> bool:
    """Return whether --model names a model of another library, such as hf:ORG/NAME."""
    library, colon, rest = (name or "").partition(":")
    return library in MODEL_LIBRARIES and bool(colon and rest)


def import_function(name: str) -> Callable[..., Any]:
    """Import a function written package.module:function, with the working directory on the import path.

    Raises:
        UsageError: If the name is not of that form, or cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise UsageError(f"--model is written package.module:function, got '{name}'")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
        return function
    except Exception as error:  # whatever the user's module raises when it is imported
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise UsageError(f"--model {name}: {reason}; run from the folder that holds the module") from None
    finally:
        sys.path.remove(str(Path.cwd()))


def _both(
    mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    return None if mean is None or std is None else (mean, std)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


@dataclass(frozen=True)
class InMemoryModel(Model):
    """A network handed in from Python; it cannot be rebuilt from the run directory alone."""

    mean: tuple[float, ...] | None = None
    """mean of the channels, if it was trained with one"""
    std: tuple[float, ...] | None = None
    """standard deviation of the channels"""

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        return _both(self.mean, self.std)

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        raise UsageError(
            "this run trained a network that was handed in from Python: name the function that builds it with "
            "--model package.module:function"
        )


@dataclass(frozen=True)
class WithOffsets(Model):
    """A network and one number per class that is added to its logits; `doubly repair` writes it where it must."""

    model: Model = field(default_factory=SmallCNN)
    """the network without the offsets"""

    @property
    def label(self) -> str:
        return self.model.label

    @property
    def named_code(self) -> str | None:
        return self.model.named_code

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        return self.model.normalization

    def require_trusted(self) -> None:
        self.model.require_trusted()

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        return ShiftedLogits(self.model.build(channels, classes, mean, std), torch.zeros(classes))

    def without_initial_weights(self) -> "WithOffsets":
        return replace(self, model=self.model.without_initial_weights())


@dataclass(frozen=True)
class InMemoryData(DataSource):
    """Images handed in from Python."""

    def load(self, root: Path | None = None) -> Splits:
        raise UsageError("this run used images that were handed in from Python: evaluate it from Python as well")
