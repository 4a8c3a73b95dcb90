"""Half precision: what the network computes in, and the loss scale that keeps fp16 gradients from vanishing.

Only `backward` sees the scale. Losses, weights, u, barrier and implicit terms are computed before it, in float32 or
better.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from doubly.errors import NonFiniteError, UsageError

PrecisionName = Literal["float32", "bf16", "fp16"]
MAX_SKIPPED = 20  # steps in a row; halving that often makes the scale a millionth, so the scale is not to blame


class Precision:
    """The precision of one run on one device; in fp16 it keeps the loss scale and the number of skipped steps.

    Raises:
        UsageError: If the device does not support the precision.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.dtype = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        self.device = device
        self.scaled = name == "fp16"
        self.skipped = 0  # steps in a row
        _check_device(name, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.scaled)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context that the network's forward passes run in."""
        if self.dtype is None:
            return nullcontext()
        # No cache: it would hand a pass with a graph the copies of weights that a pass without one has made.
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)

    def backward(self, loss: Tensor) -> None:
        """Differentiate the scaled loss."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, after they were averaged, so that all processes see the same."""
        self.scaler.unscale_(optimizer)

    def update(self, finite: bool) -> None:
        """Halve the scale after an overflow; double it after a long time without one.

        Raises:
            NonFiniteError: If too many steps in a row had to be skipped.
        """
        self.scaler.update()
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped >= MAX_SKIPPED:
            raise NonFiniteError(
                f"{MAX_SKIPPED} steps in a row were skipped, whatever the scale of the loss (now "
                f"{self.scaler.get_scale():g}): it is not the scale; train in bf16 or float32, or with a smaller lr"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {**self.scaler.state_dict(), "skipped": self.skipped} if self.scaled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self.scaled:
            self.scaler.load_state_dict({key: value for key, value in state.items() if key != "skipped"})
            self.skipped = state["skipped"]


def _check_device(name: PrecisionName, device: torch.device) -> None:
    if name != "float32" and device.type not in ("cpu", "cuda"):
        raise UsageError(f"precision {name} is for CUDA and the CPU, not for {device.type}: use float32")
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError("this GPU does not compute in bf16: use precision fp16 or float32")
