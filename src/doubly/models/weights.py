"""Weights from files: fill a network from a state dict, with a sentence where it does not fit."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from doubly.errors import UsageError
from doubly.reading import check_zip

# Under which keys training scripts save the state dict: most, kuangliu's, robustness', MAIR's.
CONTAINERS = ("state_dict", "model_state_dict", "model", "net", "rmodel")
# What wrappers of other libraries save beside the network: robustness' attacker (a second copy) and normalizer, and
# MAIR's numbers.
BESIDE = re.compile(r"(module\.)*(attacker\.|normalizer\.|normalize\.|(n_classes|eps|mean|std)$)")
MAX_NAMED = 3  # of the tensors that do not fit, of each kind


class Normalizer(NamedTuple):
    """Mean and std that a wrapper saved beside the network, which were applied before it."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_weights(model: nn.Module, path: Path) -> Normalizer | None:
    """Fill the network from a safetensors file or a state dict saved by torch; nothing in the file is executed.

    Checkpoints of training scripts, robustness, MAIR and RobustBench are unwrapped.

    Returns:
        The normalization that a checkpoint of robustness holds; None in other files.

    Raises:
        UsageError: If the file cannot be read, holds no state dict, or does not fit the network.
    """
    tensors = _unwrapped(_read(path))
    if not isinstance(tensors, dict) or not tensors or not all(isinstance(t, Tensor) for t in tensors.values()):
        held = f" ({', '.join(f'{key!s:.20}' for key in list(tensors)[:5])})" if isinstance(tensors, dict) else ""
        raise UsageError(f"{path} holds no state dict{held}: save model.state_dict(), or a safetensors file")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise UsageError(f"{path} names a tensor {name!r:.40}, and names are text: save model.state_dict()")
        if tensor.is_complex() or tensor.layout != torch.strided:
            kind = "complex numbers" if tensor.is_complex() else f"the layout {tensor.layout}"
            raise UsageError(f"{path} has {kind} in '{name}': save a state dict of plain real tensors")
    fill_model(model, tensors, path)
    return _normalizer(tensors)


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".onnx":
        raise UsageError(
            f"{path} is an ONNX file, which holds a graph and no state dict: give the weights of the PyTorch network, "
            "torch.save(model.state_dict(), file)"
        )
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        if zipfile.is_zipfile(path):
            check_zip(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except FileNotFoundError:
        raise UsageError(f"there is no weights file {path}: check the path") from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"{path} cannot be read as weights ({reason:.120}): give safetensors or a plain state dict"
        ) from None


def _unwrapped(content: Any) -> Any:
    """Return the state dict inside a checkpoint."""
    for _ in range(4):  # as deep as containers are nested
        inner = next((content[key] for key in CONTAINERS if _holds_dict(content, key)), None)
        if inner is None:
            break
        content = inner
    return content


def _holds_dict(content: Any, key: str) -> bool:
    return isinstance(content, dict) and isinstance(content.get(key), dict)


def _normalizer(tensors: Mapping[str, Tensor]) -> Normalizer | None:
    found = {
        what: [t for name, t in tensors.items() if re.fullmatch(rf"(module\.)*normalizer\.new_{what}", name)]
        for what in ("mean", "std")
    }
    if not found["mean"] or not found["std"]:
        return None
    mean, std = (tuple(float(value) for value in found[what][0].flatten()) for what in ("mean", "std"))
    return Normalizer(mean, std)


def fill_model(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load a state dict into the network, also one saved from inside a wrapper such as DataParallel.

    Args:
        model: The network.
        tensors: The state dict.
        path: Where it comes from, for the message.

    Raises:
        UsageError: If names or shapes differ; it names the first ones.
    """
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if set(tensors) != set(expected):
        tensors = _renamed(tensors, expected)
    missing = [name for name in expected if name not in tensors]
    further = [name for name in tensors if name not in expected]
    shaped = [name for name in expected if name in tensors and expected[name] != tuple(tensors[name].shape)]
    first = next((name for name in [*expected, *tensors] if name in {*missing, *further, *shaped}), None)
    if first is not None:
        ours, theirs = expected.get(first), tuple(tensors[first].shape) if first in tensors else None
        raise UsageError(
            f"{path} does not fit the model: '{first}' is {'missing' if theirs is None else theirs} in the file "
            f"and {'missing' if ours is None else ours} in the model{_all(missing, further, shaped)}; give the weights "
            "of this network"
        )
    model.load_state_dict(tensors)


def _all(missing: list[str], further: list[str], shaped: list[str]) -> str:
    """Return how many tensors do not fit, with the names of the first ones; empty if it is one."""
    groups = {"missing in the file": missing, "only in the file": further, "of another shape": shaped}
    if sum(map(len, groups.values())) < 2:
        return ""
    parts = [
        f"{len(names)} {what} ({', '.join(names[:MAX_NAMED])}{', …' * (len(names) > MAX_NAMED)})"
        for what, names in groups.items()
        if names
    ]
    return f"; of all tensors {', '.join(parts)}"


def _renamed(tensors: dict[str, Tensor], expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors under the names of the network: without the prefix of a wrapper, or with that of ours."""
    plain = {re.sub(r"^((module|_orig_mod)\.)+", "", name): t for name, t in tensors.items()}
    best = plain
    for prefix in ("", "model.", "module.", "model.module.", "net.", "model.model.", "backbone."):
        inside = {name.removeprefix(prefix): t for name, t in plain.items() if name.startswith(prefix)}
        outside = {name: t for name, t in plain.items() if not name.startswith(prefix) and not BESIDE.match(name)}
        for candidate in (inside | outside, {f"{prefix}{name}": t for name, t in plain.items()}):
            kept = {name: t for name, t in candidate.items() if name in expected or not BESIDE.match(name)}
            if _misfits(kept, expected) < _misfits(best, expected):
                best = kept
    return best


def _misfits(tensors: Mapping[str, Tensor], expected: Mapping[str, Any]) -> int:
    return len(set(tensors) ^ set(expected))
