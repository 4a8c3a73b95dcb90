"""Batch norm over the global batch: each process's statistics are put together, so that a network trains as on one.

torch has SyncBatchNorm, which runs on CUDA only. This is a layer's own arithmetic, so that it can be differentiated as
often as DONE likes, with one exchange per pass of a layer, forward and backward, and none in evaluation mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from doubly.distributed import collectives as parallel


def _forward(layer: Any, x: Tensor) -> Any:
    dims, kind = [0, *range(2, x.dim())], x.dtype
    x = x.float() if kind in (torch.float16, torch.bfloat16) else x
    rank, size = parallel.processes()
    shape = [1, -1, *[1] * (x.dim() - 2)]
    means = x.mean(dims)
    spreads = (x - means.view(shape)).square().mean(dims)  # torch's var takes ten times as long on a CPU
    slots = torch.zeros(size, 1, 1, dtype=x.dtype, device=x.device)
    slots[rank] = 1
    means, spreads = parallel.total(slots * torch.stack([means, spreads])).unbind(1)  # of all processes, (size, C)
    mean = means.mean(0)
    # The parts are equally large; no difference of large squares, as mean(x^2) - mean(x)^2 would be.
    spread = spreads.mean(0) + (means - mean).square().mean(0)
    if layer.track_running_stats and layer.running_mean is not None:
        with torch.no_grad():
            layer.num_batches_tracked.add_(1)
            count = size * x.numel() // x.shape[1]
            share = 1 / layer.num_batches_tracked if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(mean.to(layer.running_mean), share)
            layer.running_var.lerp_((spread * (count / (count - 1))).to(layer.running_var), share)
    scale = (spread + layer.eps).rsqrt()
    scale = scale * layer.weight if layer.affine else scale
    shift = layer.bias - mean * scale if layer.affine else -mean * scale
    return torch.addcmul(shift.view(shape), x, scale.view(shape)).to(kind)  # once through x


class _Global:
    def forward(self, x: Tensor) -> Any:
        layer: Any = self
        if layer.training:
            layer._check_input_dim(x)
            return _forward(layer, x)
        return super().forward(x)  # type: ignore[misc]


class _BatchNorm1d(_Global, nn.BatchNorm1d): ...


class _BatchNorm2d(_Global, nn.BatchNorm2d): ...


class _BatchNorm3d(_Global, nn.BatchNorm3d): ...


_TWINS: dict[type, type] = {
    nn.BatchNorm1d: _BatchNorm1d,
    nn.BatchNorm2d: _BatchNorm2d,
    nn.BatchNorm3d: _BatchNorm3d,
}


def is_global(layer: nn.Module) -> bool:
    return isinstance(layer, _Global)


@contextmanager
def normalised_globally(model: nn.Module) -> Iterator[None]:
    """Inside, the model's batch norm layers see the batch of all processes; on one they are left alone.

    Layers change their class and nothing else, so names, parameters, optimizers and copies stay as they are.
    """
    changed = [layer for layer in model.modules() if type(layer) in _TWINS] if parallel.world()[1] > 1 else []
    for layer in changed:
        layer.__class__ = _TWINS[type(layer)]
    try:
        yield
    finally:
        for layer in changed:
            layer.__class__ = type(layer).__mro__[2]
