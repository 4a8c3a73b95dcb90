"""Put class offsets into a network: into the bias of the linear layer that returns the logits, or behind it."""

from contextlib import ExitStack
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from doubly.attacks import eval_mode, model_device
from doubly.models.shifted import ShiftedLogits

ROUNDING = 1e-5  # relative to the largest logit: a larger difference is not rounding


class FoldedNetwork(NamedTuple):
    """A network with class offsets.

    Attributes:
        model: A copy of the network with the offsets in it.
        layer: Name of the layer whose bias holds them; None if the network was wrapped instead.
    """

    model: nn.Module
    layer: str | None


def fold_offsets(model: nn.Module, offsets: Tensor, x: Tensor) -> FoldedNetwork:
    """Return a copy of the network whose logits are shifted.

    The offsets go into the bias of an nn.Linear if that shifts the logits of the images `x` as it should. Otherwise (no
    such layer, no bias, something behind it) the copy is wrapped in `ShiftedLogits`.

    Args:
        model: The network; it is not changed.
        offsets: What to add to the logit of each class, (classes,).
        x: Some images, to check the result on.
    """
    x = x.to(model_device(model))
    with eval_mode(model), torch.no_grad():
        shifted = model(x) + offsets.to(x.device)
        for name in reversed(_candidates(model, x, len(offsets))):
            copy = deepcopy(model)
            layer = copy.get_submodule(name)
            assert isinstance(layer.bias, Tensor)  # as _candidates checks
            layer.bias += offsets.to(layer.bias)
            with eval_mode(copy):
                difference = (copy(x) - shifted).abs().max()
            if bool(difference <= ROUNDING * (1 + shifted.abs().max())):
                return FoldedNetwork(copy, name)
    copy = deepcopy(model)
    return FoldedNetwork(ShiftedLogits(copy, offsets.to(x.device, shifted.dtype)), None)


def _candidates(model: nn.Module, x: Tensor, classes: int) -> list[str]:
    """Return the linear layers with a bias and one output per class that a pass goes through, in that order."""
    passed: list[str] = []

    def record(name: str) -> Any:
        def hook(*_: Any) -> None:
            passed.append(name)

        return hook

    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and layer.bias is not None and layer.out_features == classes:
                handle = layer.register_forward_hook(record(name))
                stack.callback(handle.remove)
        model(x)
    return list(dict.fromkeys(passed))
