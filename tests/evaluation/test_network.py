"""Checks of a network before it is attacked, and its checksum."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.network import check_network, model_sha256

X = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def network(classes=3, width=2):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, width, 3),
            nn.BatchNorm2d(width),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )


def changed(change):
    model = network()
    with torch.no_grad():
        change(model)
    return model


def with_layer(position, module):
    return changed(lambda model: model.__setitem__(position, module))


class Wrapped(nn.Module):
    """A network whose output is `function(logits, x)`."""

    def __init__(self, function):
        super().__init__()
        self.function, self.inner = function, network()

    def forward(self, x):
        return self.function(self.inner(x), x)


class FixedSize(nn.Module):
    def forward(self, x):
        assert x.shape[2] == 32, "images of 32 x 32, please"
        return x.flatten(1)


def test_a_network_whose_numbers_mean_nothing_is_refused():
    batch_statistics = nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    for model, words in (
        (Wrapped(lambda z, x: z.softmax(1)), ["probabilities", "without the softmax"]),
        (Wrapped(lambda z, x: z + torch.rand_like(z)), ["differently each time", "deterministic"]),
        (Wrapped(lambda z, x: z + np.random.rand()), ["differently each time"]),
        (Wrapped(lambda z, x: nn.functional.dropout(z, 0.5, training=True)), ["differently each time"]),
        (Wrapped(lambda z, x: z - z.mean(0)), ["a single image differently", "stored statistics"]),
        (with_layer(1, nn.BatchNorm2d(2, track_running_stats=False)), ["a single image", "stored statistics"]),
        (with_layer(4, batch_statistics), ["stored statistics"]),
        (network(classes=2), ["2 logits", "as many outputs"]),
        (Wrapped(lambda z, x: (z, x)), ["tensor of logits", "tuple"]),
        (Wrapped(lambda z, x: z[:, :, None]), ["shape", "flatten"]),
        (Wrapped(lambda z, x: z[:1]), ["shape"]),
        (nn.Sequential(nn.Flatten(), nn.Linear(9, 3)), ["(1, 4, 4)", "size"]),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3)), ["(1, 4, 4)", "channels"]),
        (network().double(), ["(1, 4, 4)", "type"]),
        (FixedSize(), ["(1, 4, 4)", "32 x 32"]),
    ):
        with pytest.raises(UsageError) as error:
            check_network(model, X, Y)
        assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), words
    for value in (torch.nan, torch.inf):
        with pytest.raises(NonFiniteError, match="36 of 36"):
            check_network(Wrapped(lambda z, x: z + value), X, Y)  # noqa: B023


def test_images_and_labels_are_checked_as_well():
    for x, y in ((X * 255, Y), (X - 1, Y), ((X * 255).byte(), Y), (X, Y.float()), (X, Y[:3]), (X * torch.nan, Y)):
        with pytest.raises(UsageError):
            check_network(network(), x, y)


def test_other_networks_pass():
    for model in (
        network(),
        network(classes=7),
        Wrapped(lambda z, x: 0 * z),
        Wrapped(lambda z, x: z.log_softmax(1)),
        Wrapped(lambda z, x: z.softmax(1) - 0.1),
        Wrapped(lambda z, x: z.sigmoid()),
        Wrapped(lambda z, x: 1e6 * z + 1e-3 * torch.rand_like(z)),
    ):
        result = check_network(model, X, Y)
        assert set(result) == {"repeat", "batch"} and all(0 <= value < 1e-3 for value in result.values())
    assert check_network(network(), X[:1], Y[:1]) == {"repeat": 0, "batch": 0}


def test_a_check_leaves_generators_modes_and_statistics_alone():
    for refused in (False, True):
        model = Wrapped(lambda z, x: z + (torch.rand_like(z) if refused else 0))  # noqa: B023
        model.inner[1].eval()
        modes, state = [m.training for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
        torch.manual_seed(9)
        before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state()), torch.is_grad_enabled()
        if refused:
            with pytest.raises(UsageError):
                check_network(model, X, Y)
        else:
            check_network(model, X, Y)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), repr(np.random.get_state()), torch.is_grad_enabled()) == before[1:]
        assert [m.training for m in model.modules()] == modes
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
        assert all(p.grad is None and p.requires_grad for p in model.parameters())


class Shifted(nn.Module):
    """A shift that is not in the state dict."""

    def __init__(self, by):
        super().__init__()
        self.register_buffer("by", torch.tensor(by), persistent=False)


class WithExtraState(nn.Linear):
    """State beside the tensors, as torch allows it."""

    def get_extra_state(self):
        return {"calls": 1}

    def set_extra_state(self, state): ...


def with_buffer(value):
    model = nn.Module()
    model.register_buffer("value", value)
    return model


def test_another_network_has_another_checksum():
    for name, other in {
        "one bit": changed(lambda m: m[0].weight[0, 0, 0, 0].mul_(1.0000002)),
        "sign": changed(lambda m: m[4].bias.neg_()),
        "buffer": changed(lambda m: m[1].running_mean.add_(1)),
        "counter": changed(lambda m: m[1].num_batches_tracked.add_(1)),
        "argument": with_layer(2, nn.Dropout(0.4)),
        "layer": with_layer(2, nn.ReLU()),
        "nesting": with_layer(3, nn.Sequential(nn.Flatten())),
        "double": changed(lambda m: m.double()),
        "bfloat16": changed(lambda m: m.bfloat16()),
        "outputs": network(classes=4),
        "width": network(width=3),
    }.items():
        assert model_sha256(other) != model_sha256(network()), name
    assert model_sha256(Shifted(0.1)) != model_sha256(Shifted(0.2))
    for other in (torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(2).double()):  # equal bytes
        assert model_sha256(with_buffer(other)) != model_sha256(with_buffer(torch.zeros(4)))


def test_the_same_network_has_the_same_checksum():
    for name, same in {
        "built again": network(),
        "mode": network().eval(),
        "memory format": network().to(memory_format=torch.channels_last),
        "frozen": changed(lambda m: m[0].weight.requires_grad_(False)),
        "gradient": changed(lambda m: setattr(m[4].weight, "grad", torch.ones_like(m[4].weight))),
    }.items():
        assert len(model_sha256(same)) == 64 and model_sha256(same) == model_sha256(network()), name
    assert len(model_sha256(WithExtraState(2, 2))) == 64
    model, transposed = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    transposed.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    assert not transposed.weight.is_contiguous() and model_sha256(transposed) == model_sha256(model)
