"""Batch norm over the batch of all processes, so that a network trains as it would on one.

torch has SyncBatchNorm, which runs on CUDA only and cannot be differentiated twice. These layers use torch's kernels
for one process with exchanged statistics, or, where a method differentiates twice, plain tensor arithmetic. There is
one exchange per pass of a layer, forward and backward, and none in evaluation mode.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from doubly.distributed import Communicator


class GlobalBatchNorm(_BatchNorm):
    """A batch norm layer whose training statistics are those of the batch of all processes."""

    affine_in_eval = True  # so that attacks may fold it

    def __init__(self, layer: _BatchNorm, communicator: Communicator, twice_differentiable: bool = True) -> None:
        """Share the parameters, buffers and settings of a native layer.

        Args:
            layer: The native layer.
            communicator: The processes.
            twice_differentiable: Whether second derivatives are needed, which takes longer.
        """
        nn.Module.__init__(self)
        self.twice_differentiable = twice_differentiable
        self.layer_type = type(layer)
        self.communicator = communicator
        self.num_features, self.eps, self.momentum = layer.num_features, layer.eps, layer.momentum
        self.affine, self.track_running_stats = layer.affine, layer.track_running_stats
        self.training = layer.training
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name in ("weight", "bias"):
            if name not in self._parameters:
                self.register_parameter(name, None)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))

    def _check_input_dim(self, input: Tensor) -> None:
        self.layer_type._check_input_dim(self, input)  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        dtype = input.dtype
        x = input.float() if dtype in (torch.float16, torch.bfloat16) else input
        shape = [1, -1, *[1] * (x.dim() - 2)]
        mean, variance = self._global_statistics(x, shape)
        if self.track_running_stats and self.running_mean is not None:
            self._update_running_statistics(mean, variance, x.numel() // x.shape[1])
        if not self.twice_differentiable:
            weight = self.weight if self.affine else torch.ones_like(mean)
            bias = self.bias if self.affine else torch.zeros_like(mean)
            return _NativeBatchNorm.apply(x, weight, bias, mean, variance, self.eps, self.communicator).to(dtype)  # type: ignore[no-untyped-call,no-any-return]
        scale = (variance + self.eps).rsqrt()
        scale = scale * self.weight if self.affine else scale
        shift = self.bias - mean * scale if self.affine else -mean * scale
        return torch.addcmul(shift.view(shape), x, scale.view(shape)).to(dtype)  # one pass through x

    def _global_statistics(self, x: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance of each channel over all processes, which have equally large parts."""
        dims, rank, world_size = [0, *range(2, x.dim())], self.communicator.rank, self.communicator.world_size
        if self.twice_differentiable:
            means = x.mean(dims)
            variances = (x - means.view(shape)).square().mean(dims)  # torch's var takes ten times as long on a CPU
        else:
            means, variances = torch.batch_norm_update_stats(x.detach(), None, None, 0.0)
        slots = torch.zeros(world_size, 1, 1, dtype=x.dtype, device=x.device)
        slots[rank] = 1
        means, variances = self.communicator.sum(slots * torch.stack([means, variances])).unbind(1)
        mean = means.mean(0)
        # No difference of large squares, as mean(x^2) - mean(x)^2 would be.
        return mean, variances.mean(0) + (means - mean).square().mean(0)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor, count: int) -> None:
        total = self.communicator.world_size * count
        batches, running_mean, running_var = self.num_batches_tracked, self.running_mean, self.running_var
        assert batches is not None and running_mean is not None and running_var is not None, "checked by the caller"
        batches.add_(1)
        share = 1 / batches if self.momentum is None else self.momentum
        running_mean.lerp_(mean.to(running_mean), share)
        running_var.lerp_((variance * (total / (total - 1))).to(running_var), share)


class _NativeBatchNorm(torch.autograd.Function):
    """Normalize by statistics of all processes, with the kernels that torch has for given statistics.

    With xhat = (x - mean) / sigma, the statistics depend on x, so dL/dx is weight / sigma * (g - mean(g) - xhat *
    mean(g * xhat)), where the means are over all processes. The kernel for given statistics returns the first term, and
    the sums of g and g * xhat as gradients of bias and weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        communicator: Communicator,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.communicator = eps, communicator
        return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        with torch.no_grad():
            to_x, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
                gradient, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
            total = ctx.communicator.world_size * (x.numel() // x.shape[1])
            sums = ctx.communicator.sum(torch.stack([to_bias, to_weight]))
            inverse = (variance + ctx.eps).rsqrt()
            mean_gradient, mean_product = weight * inverse * sums / total
            slope = mean_product * inverse
            shape = [1, -1, *[1] * (x.dim() - 2)]
            to_x -= torch.addcmul((mean_gradient - slope * mean).view(shape), x, slope.view(shape))
        return to_x, to_weight, to_bias, None, None, None, None


NATIVE_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextmanager
def global_batch_norm(
    model: nn.Module, communicator: Communicator, twice_differentiable: bool = True
) -> Iterator[None]:
    """Replace the model's batch norm layers by global ones inside; on a single process they are left alone.

    The new layers share parameters and buffers with the old ones, so names, optimizers and checkpoints stay as they
    are. Layers of other classes are not replaced.

    Args:
        model: The network.
        communicator: The processes.
        twice_differentiable: Whether second derivatives are needed, which takes longer.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    new_layers: dict[nn.Module, GlobalBatchNorm] = {}  # a layer may be used in several places
    if communicator.world_size > 1:
        for path, layer in list(model.named_modules(remove_duplicate=False)):
            if type(layer) in NATIVE_LAYERS:
                if layer not in new_layers:
                    new_layers[layer] = GlobalBatchNorm(layer, communicator, twice_differentiable)
                parent_path, _, name = path.rpartition(".")
                parent = model.get_submodule(parent_path)
                replaced.append((parent, name, layer))
                setattr(parent, name, new_layers[layer])
    try:
        yield
    finally:
        for parent, name, layer in replaced:
            layer.training = new_layers[layer].training
            setattr(parent, name, layer)
