"""Weights from files: fill a network from a state dict, with a sentence where it does not fit."""

import re
import zipfile
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from doubly.errors import UsageError
from doubly.reading import check_zip


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill the network from a safetensors file or a state dict saved by torch; nothing in the file is executed.

    Raises:
        UsageError: If the file cannot be read, holds no state dict, or does not fit the network.
    """
    try:
        if path.suffix == ".safetensors":
            tensors: object = safetensors.torch.load_file(path)
        else:
            if zipfile.is_zipfile(path):
                check_zip(path)
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except FileNotFoundError:
        raise UsageError(f"there is no weights file {path}: check the path") from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"{path} cannot be read as weights ({reason:.120}): give safetensors or a plain state dict"
        ) from None
    if isinstance(tensors, dict) and isinstance(tensors.get("state_dict"), dict):
        tensors = tensors["state_dict"]
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UsageError(f"{path} holds no state dict: save model.state_dict(), or a safetensors file")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise UsageError(f"{path} names a tensor {name!r:.40}, and names are text: save model.state_dict()")
        if tensor.is_complex() or tensor.layout != torch.strided:
            kind = "complex numbers" if tensor.is_complex() else f"the layout {tensor.layout}"
            raise UsageError(f"{path} has {kind} in '{name}': save a state dict of plain real tensors")
    fill_model(model, tensors, path)


def fill_model(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load a state dict into the network, also one saved from inside DataParallel or torch.compile.

    Args:
        model: The network.
        tensors: The state dict.
        path: Where it comes from, for the message.

    Raises:
        UsageError: If names or shapes differ; it names the first difference.
    """
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if set(tensors) != set(expected):
        tensors = {re.sub(r"^((module|_orig_mod)\.)+", "", name): t for name, t in tensors.items()}
    for name in [*expected, *tensors]:
        ours, theirs = expected.get(name), tuple(tensors[name].shape) if name in tensors else None
        if ours != theirs:
            raise UsageError(
                f"{path} does not fit the model: '{name}' is {'missing' if theirs is None else theirs} in the file "
                f"and {'missing' if ours is None else ours} in the model; give the weights of this network"
            )
    model.load_state_dict(tensors)
