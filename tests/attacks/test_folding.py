"""Folded batch norm: the same function as the network for every kind of network, or the network itself."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from doubly.attacks import PGD, Strong, attack_context
from doubly.attacks.folding import FoldedForward, find_pairs, in_pieces, rows_at_a_time
from doubly.distributed import SINGLE_PROCESS
from doubly.models import MODELS
from doubly.models.batch_norm import GlobalBatchNorm
from doubly.threat import LinfBall


class Net(nn.Module):
    """A convolution and a batch norm, used as `use(self, x)` says, then a linear head."""

    def __init__(self, use, conv=None, norm=None):
        super().__init__()
        self.conv = conv or nn.Conv2d(2, 4, 3, padding=1)
        self.norm = norm or nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.use = use

    def forward(self, x):
        return self.head(self.use(self, x).relu().mean((2, 3)))


class Twice(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.jit.trace(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)).eval(), torch.rand(2, 2, 6, 6))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class CustomUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def plain(net, x):
    return net.norm(net.conv(x))


def with_hook(net, on):
    getattr(net, on).register_forward_hook(lambda module, inputs, output: None)
    return net


def linear_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def zoo():
    """Return odd networks with the number of pairs that can be folded."""
    norm = nn.BatchNorm2d(4)
    return {
        "plain": (Net(plain), 1),
        "no bias": (Net(plain, nn.Conv2d(2, 4, 3, bias=False)), 1),
        "stride, groups, padding mode": (
            Net(plain, nn.Conv2d(2, 4, 3, stride=2, groups=2, padding=1, padding_mode="circular")),
            1,
        ),
        "norm without parameters": (Net(plain, norm=nn.BatchNorm2d(4, affine=False)), 1),
        "global batch norm": (Net(plain, norm=GlobalBatchNorm(nn.BatchNorm2d(4), SINGLE_PROCESS)), 1),
        "linear": (linear_net(), 1),
        "without batch norm": (Net(lambda net, x: net.conv(x)), 0),
        "group norm": (Net(plain, norm=nn.GroupNorm(2, 4)), 0),
        "no statistics": (Net(plain, norm=nn.BatchNorm2d(4, track_running_stats=False)), 0),
        "after another operation": (Net(lambda net, x: net.norm(net.conv(x).relu())), 0),
        "in place": (Net(lambda net, x: net.norm(net.conv(x).mul_(2))), 0),
        "output used again": (Net(lambda net, x: net.norm(h := net.conv(x)) + h), 0),
        "output used by a function of autograd": (
            Net(lambda net, x: net.norm(h := net.conv(x)) + CustomUse.apply(h)),
            0,
        ),
        "convolution used twice": (Net(lambda net, x: net.norm(net.conv(x)) + net.conv(x)), 0),
        "norm used twice": (Net(lambda net, x: net.norm(net.conv(x)) + net.norm(net.conv(x))), 0),
        "shared norm": (nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Conv2d(4, 4, 1), norm, nn.Flatten()), 0),
        "subclass": (Net(plain, Twice(2, 4, 3)), 0),
        "hook on the layer": (with_hook(Net(plain), "conv"), 0),
        "hook elsewhere": (with_hook(Net(plain), "head"), 0),
        "weight norm": (Net(plain, weight_norm(nn.Conv2d(2, 4, 3))), 0),
        "spectral norm": (Net(plain, parametrizations.spectral_norm(nn.Conv2d(2, 4, 3))), 0),
        "scripted": (Scripted(), 0),
        "transposed": (Net(plain, nn.ConvTranspose2d(2, 4, 3)), 0),
        **{name: (MODELS[name]().build(2, 3, [0.5] * 2, [0.5] * 2), pairs) for name, pairs in BUILT_IN.items()},
    }


BUILT_IN = {"narrow_resnet": 15, "preact_resnet18": 8, "small_cnn": 0}  # of a preactivation block, one of two


def train_statistics(model):
    """Give batch norm statistics and parameters that are far from those of a new layer."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.3, 3)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 2)
                nn.init.normal_(module.bias, 0, 0.3)


def logits_and_gradient(forward, x):
    point = x.clone().requires_grad_()
    logits = forward(point)
    return logits.detach(), torch.autograd.grad((logits * logits.detach().cos()).sum(), point)[0]


@pytest.mark.filterwarnings("error:batch norm is not folded")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_network_has_the_logits_and_gradients_of_its_plain_path():
    torch.manual_seed(0)
    x = torch.rand(40, 2, 6, 6)
    for name, (model, pairs) in zoo().items():
        train_statistics(model)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        model.double().train()
        with attack_context(model, "eval", x.double()) as forward:
            assert isinstance(forward, FoldedForward) and len(forward.forwards) == 2 * pairs, name
            ours, theirs = logits_and_gradient(forward, x.double()), logits_and_gradient(model, x.double())
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, atol=1e-10), name
        assert all("forward" not in vars(m) and m.training for m in model.modules() if m is not model), name
        after = model.float().state_dict()
        assert all(torch.equal(value, after[key]) for key, value in before.items()), name


def test_weights_are_folded_as_they_are_and_modules_that_changed_are_seen():
    torch.manual_seed(0)
    model, x = Net(plain).eval(), torch.rand(5, 2, 6, 6)
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: model.conv.weight.mul_(3),
            lambda: model.norm.running_var.mul_(2),
            lambda: setattr(model, "norm", nn.BatchNorm2d(4, eps=0.5).eval()),
            lambda: model.norm.register_forward_hook(lambda module, inputs, output: output + 1),
        ):
            change()
            assert torch.allclose(FoldedForward(model, x)(x), model(x), atol=1e-6)
        assert FoldedForward(model, x).forwards == []  # the hook
    assert FoldedForward(Net(plain).train(), x).forwards == []  # batch statistics are no affine map


def test_a_network_that_takes_another_way_than_when_it_was_traced_is_called_as_it_is():
    torch.manual_seed(0)
    x = torch.rand(5, 2, 6, 6)

    def either(net, x):  # one batch norm for clean and one for attacked images, or none
        x = net.conv(x)
        return x if net.way == "none" else (net.norm if net.way == "clean" else net.other)(x)

    def by_brightness(net, x):
        return (net.norm if x.mean() < 1 else net.other)(net.conv(x))

    for use in (either, by_brightness):
        model = Net(use)
        model.other, model.way = nn.BatchNorm2d(4), "clean"
        train_statistics(model)
        nn.init.normal_(model.other.running_mean)
        model.eval()
        forward = FoldedForward(model, x)
        assert len(forward.forwards) == 2
        for way, images in (("attacked", x), ("none", x), ("clean", x + 1), ("clean", x)):
            model.way = way
            with torch.no_grad():
                assert torch.allclose(forward(images), model(images), atol=1e-6), (use, way)
                assert torch.allclose(FoldedForward(model, x)(images), model(images), atol=1e-6), (use, way)
        assert all("forward" not in vars(module) for module in model.modules())


def test_a_folded_network_that_differs_is_not_used_and_says_so(monkeypatch):
    torch.manual_seed(0)
    x = torch.rand(5, 2, 6, 6)
    calls = iter(range(100))
    model = Net(lambda net, x: net.norm(net.conv(x)) * (1 + next(calls))).eval()  # another function in every call
    with pytest.warns(UserWarning, match="batch norm is not folded for attacks.*differ by"):
        assert FoldedForward(model, x).forwards == []
    assert FoldedForward(model, x).forwards == []  # said once
    recomputing = Net(lambda net, x: checkpoint(plain, net, x.relu(), use_reentrant=False)).eval()
    train_statistics(recomputing)  # its backward pass computes again, with the unfolded layers
    with pytest.warns(UserWarning, match="batch norm is not folded for attacks"):
        assert FoldedForward(recomputing, x).forwards == []


def test_images_pass_a_few_at_a_time_and_passes_are_counted_by_rows():
    for shape, rows in (((200, 3, 32, 32), 64), ((9, 1, 8, 8), 1024), ((9, 3, 224, 224), 16), ((0, 3, 8, 8), 1)):
        x = torch.zeros(shape)
        assert rows_at_a_time(x) == rows
        sizes = []
        logits = in_pieces(lambda part, sizes=sizes: sizes.append(len(part)) or part.flatten(1), x)
        assert logits.shape == x.flatten(1).shape and sum(sizes) == len(x) and max(sizes) < rows + 16
    assert rows_at_a_time(torch.zeros(200, 3, 32, 32, device="meta")) == 200


def test_attacks_on_the_folded_network_end_where_those_on_the_network_end(monkeypatch):
    torch.manual_seed(0)
    model, x, y = (
        MODELS["narrow_resnet"](width=4).build(3, 4, [0.5] * 3, [0.5] * 3),
        torch.rand(8, 3, 8, 8),
        torch.arange(8) % 4,
    )
    train_statistics(model)
    model = model.double().eval()
    assert len(find_pairs(model, x.double())) == 15
    for attack in (PGD(LinfBall(0.1), steps=3), Strong(LinfBall(0.1), steps=2, targets=1, target_steps=2, rounds=1)):
        folded = attack(model, x.double(), y, 0)
        with monkeypatch.context() as patch:
            patch.setattr("doubly.attacks.folding._pairs_of", lambda model, x: [])
            assert torch.allclose(attack(model, x.double(), y, 0), folded, atol=1e-8)
