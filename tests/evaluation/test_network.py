import random

import numpy as np
import pytest
import torch
from torch import nn

from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.network import check_network, model_sha256

X = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def network(classes=3, width=2, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
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


def replaced(position, module):
    def change(model):
        model[position] = module

    return change


class Says(nn.Module):
    """Any function of the images as a network."""

    def __init__(self, function):
        super().__init__()
        self.function, self.inner = function, network()

    def forward(self, x):
        return self.function(self.inner(x), x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Says(lambda z, x: z.softmax(1)), ["probabilities", "without the softmax"]),
        (Says(lambda z, x: z + torch.rand_like(z)), ["differently each time", "deterministic"]),
        (Says(lambda z, x: z + torch.rand(len(z), 1)), ["differently each time"]),
        (Says(lambda z, x: z + np.random.rand()), ["differently each time"]),
        (Says(lambda z, x: nn.functional.dropout(z, 0.5, training=True)), ["differently each time"]),
        (Says(lambda z, x: z - z.mean(0)), ["alone", "stored statistics"]),
        (changed(replaced(1, nn.BatchNorm2d(2, track_running_stats=False))), ["alone", "stored statistics"]),
        (
            changed(replaced(4, nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)))),
            ["stored statistics"],
        ),
        (network(classes=2), ["2 logits", "as many outputs"]),
        (Says(lambda z, x: (z, x)), ["tensor of logits", "tuple"]),
        (Says(lambda z, x: z[:, :, None]), ["shape", "flatten"]),
        (Says(lambda z, x: z[:1]), ["shape"]),
        (nn.Sequential(nn.Flatten(), nn.Linear(9, 3)), ["(1, 4, 4)", "size"]),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3)), ["(1, 4, 4)", "channels"]),
        (network().double(), ["(1, 4, 4)", "type"]),
    ],
)
def test_a_network_whose_numbers_mean_nothing_is_refused(model, words):
    with pytest.raises(UsageError) as problem:
        check_network(model, X, Y)
    assert all(word in str(problem.value) for word in words) and "\n" not in str(problem.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused(value):
    with pytest.raises(NonFiniteError, match="36 of 36"):
        check_network(Says(lambda z, x: z + value), X, Y)


@pytest.mark.parametrize(
    "model",
    [
        network(),
        network(classes=7),
        Says(lambda z, x: 0 * z),
        Says(lambda z, x: z.log_softmax(1)),
        Says(lambda z, x: z.softmax(1) - 0.1),
        Says(lambda z, x: z.sigmoid()),
        Says(lambda z, x: 1e6 * z + 1e-3 * torch.rand_like(z)),
    ],
)
def test_other_networks_pass(model):
    found = check_network(model, X, Y)
    assert set(found) == {"repeat", "batch"} and all(0 <= value < 1e-3 for value in found.values())


def test_a_single_image_is_enough():
    assert check_network(network(), X[:1], Y[:1]) == {"repeat": 0, "batch": 0}


@pytest.mark.parametrize(
    ("x", "y"), [(X * 255, Y), (X - 1, Y), ((X * 255).byte(), Y), (X, Y.float()), (X, Y[:3]), (X * torch.nan, Y)]
)
def test_images_and_labels_are_looked_at_as_well(x, y):
    with pytest.raises(UsageError):
        check_network(network(), x, y)


@pytest.mark.parametrize("fit", [True, False])
def test_checking_leaves_generators_modes_and_statistics_alone(fit):
    model = Says(lambda z, x: z + (0 if fit else torch.rand_like(z)))
    model.inner[1].eval()
    modes, state = [m.training for m in model.modules()], {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(9)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state()), torch.is_grad_enabled()
    if fit:
        check_network(model, X, Y)
    else:
        with pytest.raises(UsageError):
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

    def forward(self, x):
        return x + self.by


@pytest.mark.parametrize(
    "other",
    [
        changed(lambda m: m[0].weight[0, 0, 0, 0].mul_(1.0000002)),
        changed(lambda m: m[4].bias.neg_()),
        changed(lambda m: m[1].running_mean.add_(1)),
        changed(lambda m: m[1].num_batches_tracked.add_(1)),
        changed(replaced(2, nn.Dropout(0.4))),
        changed(replaced(2, nn.ReLU())),
        changed(replaced(3, nn.Sequential(nn.Flatten()))),
        changed(lambda m: m.double()),
        changed(lambda m: m.bfloat16()),
        network(classes=4),
        network(width=3),
    ],
    ids=["one bit", "sign", "buffer", "counter", "argument", "layer", "nesting", "double", "bfloat16", "out", "width"],
)
def test_another_network_has_another_hash(other):
    assert model_sha256(other) != model_sha256(network())


@pytest.mark.parametrize(
    "same",
    [
        network(),
        network().eval(),
        network().to(memory_format=torch.channels_last),
        changed(lambda m: m[0].weight.requires_grad_(False)),
        changed(lambda m: setattr(m[4].weight, "grad", torch.ones_like(m[4].weight))),
    ],
    ids=["built again", "mode", "memory format", "frozen", "gradient"],
)
def test_the_same_network_has_the_same_hash(same):
    assert len(model_sha256(same)) == 64 and model_sha256(same) == model_sha256(network())


@pytest.mark.parametrize("other", [torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), torch.zeros(2).double()])
def test_equal_bytes_of_another_type_or_shape_are_another_network(other):
    one, two = nn.Module(), nn.Module()
    one.register_buffer("value", torch.zeros(4))
    two.register_buffer("value", other)
    assert model_sha256(one) != model_sha256(two)


def test_a_tensor_that_lies_otherwise_in_memory_has_the_same_hash():
    model = nn.Linear(4, 4, bias=False)
    other = nn.Linear(4, 4, bias=False)
    other.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    assert not other.weight.is_contiguous() and model_sha256(other) == model_sha256(model)


def test_buffers_that_are_not_saved_count():
    assert model_sha256(Shifted(0.1)) != model_sha256(Shifted(0.2))


class Remembers(nn.Linear):
    """State beside the tensors, as torch allows it."""

    def get_extra_state(self):
        return {"calls": 1}

    def set_extra_state(self, state): ...


def test_a_network_with_extra_state_has_a_hash():
    assert len(model_sha256(Remembers(2, 2))) == 64


class Particular(nn.Module):
    def forward(self, x):
        assert x.shape[2] == 32, "images of 32 x 32, please"
        return x.flatten(1)


def test_a_network_that_asserts_its_image_size_is_refused_with_a_sentence():
    with pytest.raises(UsageError, match=r"\(1, 4, 4\)"):
        check_network(Particular(), X, Y)
