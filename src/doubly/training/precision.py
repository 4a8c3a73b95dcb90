"""Half precision: what the network computes in, and the scale of the loss that keeps gradients in fp16 from vanishing.

Only `backward` sees the scale. Losses, weights, u, barrier and implicit terms are made before it, in float32 or better.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from doubly.errors import NonFiniteError, UsageError

Name = Literal["float32", "bf16", "fp16"]
MOST_SKIPPED = 20  # in a row; halving that often makes the scale a millionth, so it is not the scale


class Precision:
    """The precision of one run on one device; in fp16 it remembers the scale and how many steps went by without one."""

    def __init__(self, name: Name, device: torch.device) -> None:
        self.dtype = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        self.device = device
        self.scaled = name == "fp16"
        self.skipped = 0  # steps in a row
        _check(name, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.scaled)

    def autocast(self) -> AbstractContextManager[None]:
        if self.dtype is None:
            return nullcontext()
        # No cache: it would hand a pass with a graph the copies of weights that a pass without one has made.
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)

    def backward(self, scalar: Tensor) -> None:
        self.scaler.scale(scalar).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients as they would be without a scale; after they were reduced, so that all processes see the same."""
        self.scaler.unscale_(optimizer)

    def update(self, finite: bool) -> None:
        """After an overflow half the scale; after a long time without one, twice the scale."""
        self.scaler.update()
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped >= MOST_SKIPPED:
            raise NonFiniteError(
                f"{MOST_SKIPPED} steps in a row were skipped, whatever the scale of the loss (now "
                f"{self.scaler.get_scale():g}): it is not the scale; train in bf16 or float32, or with a smaller lr"
            )

    def snapshot(self) -> dict[str, Any]:
        return {**self.scaler.state_dict(), "skipped": self.skipped} if self.scaled else {}

    def restore(self, kept: Mapping[str, Any]) -> None:
        if self.scaled:
            self.scaler.load_state_dict({key: value for key, value in kept.items() if key != "skipped"})
            self.skipped = kept["skipped"]


def _check(name: Name, device: torch.device) -> None:
    """Refuse what the device cannot do."""
    if name != "float32" and device.type not in ("cpu", "cuda"):
        raise UsageError(f"precision {name} is for CUDA and the CPU, not for {device.type}: use float32")
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError("this GPU does not compute in bf16: use precision fp16 or float32")
