"""Batch norm over several processes, with the other process's share put in by hand; real processes are tested in
training/test_world_sizes.py."""

import copy

import pytest
import torch
from torch import nn

from doubly.distributed import SINGLE_PROCESS, Communicator
from doubly.models.batch_norm import GlobalBatchNorm, global_batch_norm


class FirstOfTwo(Communicator):
    """The first of two processes. What the other one brings is computed from its images."""

    world_size = 2

    def __init__(self, other):
        self.other = other

    def sum(self, values):
        dims = [0, *range(2, self.other.dim())]
        statistics = torch.stack([self.other.mean(dims), self.other.var(dims, unbiased=False)])
        return values + torch.stack([torch.zeros_like(statistics), statistics]).to(values)


def halves(shape):
    x = torch.randn(8, 3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[4:] = 2 * x[4:] + 1  # so that the halves have other statistics
    return x[:4], x[4:]


def test_a_layer_normalizes_by_the_batch_of_all_processes_and_tracks_its_statistics():
    for native, shape in [
        (nn.BatchNorm1d(3), ()),
        (nn.BatchNorm2d(3, momentum=None), (2, 2)),
        (nn.BatchNorm2d(3, affine=False), (2, 2)),
        (nn.BatchNorm3d(3, track_running_stats=False), (2, 2, 2)),
    ]:
        native.double()
        ours, theirs = halves(shape)
        slow, layer = (GlobalBatchNorm(copy.deepcopy(native), FirstOfTwo(theirs), twice) for twice in (True, False))
        for _ in range(2):
            expected = native(torch.cat([ours, theirs]))
            assert torch.allclose(layer(ours), expected[:4], atol=1e-12)
            assert torch.allclose(slow(ours), expected[:4], atol=1e-12)
        assert layer.state_dict().keys() == native.state_dict().keys()
        for name, value in native.state_dict().items():
            assert torch.allclose(layer.state_dict()[name], value, atol=1e-12), name
            assert torch.allclose(slow.state_dict()[name], value, atol=1e-12), name
        assert torch.allclose(layer.eval()(ours), native.eval()(ours), atol=1e-12)
        with pytest.raises(ValueError, match="expected"):
            layer.train()(torch.zeros(4))


def test_gradients_of_the_fast_layer_are_those_of_the_native_one():
    for native, shape in [
        (nn.BatchNorm1d(3), ()),
        (nn.BatchNorm2d(3), (2, 2)),
        (nn.BatchNorm2d(3, affine=False), (3, 3)),
    ]:
        native.double()
        if native.affine:
            nn.init.uniform_(native.weight, 0.5, 2)
        x = torch.cat(halves(shape))
        layer, gradients = GlobalBatchNorm(copy.deepcopy(native), SINGLE_PROCESS, twice_differentiable=False), []
        for module in (native, layer):
            point = x.clone().requires_grad_()
            module(point).pow(3).sum().backward()
            gradients.append([point.grad, *(p.grad for p in module.parameters())])
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*gradients, strict=True))


def test_half_precision_is_normalized_in_float32():
    ours, theirs = (part.float() for part in halves((2, 2)))
    native = nn.BatchNorm2d(3)
    layer = GlobalBatchNorm(copy.deepcopy(native), FirstOfTwo(theirs))
    result = layer(ours.bfloat16())
    assert result.dtype is torch.bfloat16
    assert torch.allclose(result.float(), native(torch.cat([ours, theirs]))[:4], atol=0.05)


class Shared(nn.Module):
    """Uses one layer under two names, and one of the user's own class."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), self.first)
        self.own = type("OwnNorm", (nn.BatchNorm1d,), {})(3)


def test_layers_are_replaced_inside_and_restored_with_their_mode():
    model = Shared()
    layers, names = dict(model.named_modules(remove_duplicate=False)), list(model.state_dict())
    parameters = [p.data_ptr() for p in model.parameters()]
    with global_batch_norm(model, FirstOfTwo(torch.zeros(1, 3))):
        assert model.first is model.second is model.inner[2] and type(model.first) is GlobalBatchNorm
        assert type(model.inner[1]) is GlobalBatchNorm and type(model.own) is not GlobalBatchNorm
        assert list(model.state_dict()) == names and [p.data_ptr() for p in model.parameters()] == parameters
        model.eval()
    assert dict(model.named_modules(remove_duplicate=False)) == layers
    assert not any(module.training for module in model.modules())
    with global_batch_norm(model, SINGLE_PROCESS):
        assert dict(model.named_modules(remove_duplicate=False)) == layers
