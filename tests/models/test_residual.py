"""Sizes known from the papers, and formulas of blocks against a simple twin."""

import pytest
import torch
import torch.nn.functional as F

from doubly.errors import UsageError
from doubly.models import NarrowResNet, Normalize, PreActResNet18, ResNet18, SmallCNN, WideResNet
from doubly.models.preact_resnet import PreActBlock
from doubly.models.residual import convolution
from doubly.models.resnet import Block

RGB = ((0.5,) * 3, (0.25,) * 3)
SHAPES = ((4, 1), (6, 1), (4, 2))  # output channels and stride of a block with 4 input channels


def test_number_of_parameters():
    for spec, parameters in (
        (ResNet18(), 11_173_962),
        (ResNet18("imagenet"), 11_173_962 + 64 * 3 * (49 - 9)),
        (PreActResNet18(), 11_172_170),
        (PreActResNet18(shortcut="activated"), 11_172_170),
        (WideResNet(28, 10), 36_479_194),
        (WideResNet(34, 10), 46_160_474),
        # ResNet-20's well-known 269,722 with identity shortcuts, plus projections: 16*32 + 2*32 and 32*64 + 2*64.
        (NarrowResNet(16, 3), 269_722 + 576 + 2_176),
    ):
        with torch.device("meta"):
            network = spec.build(3, 10, *RGB)
        assert sum(p.numel() for p in network.parameters()) == parameters, spec


def test_resolution_of_the_last_stage():
    for spec, side in ((ResNet18("3x3"), 4), (ResNet18("7x7"), 2), (ResNet18("imagenet"), 1), (PreActResNet18(), 4)):
        with torch.device("meta"):
            network = spec.build(3, 10, *RGB)
            features = network.stages(network.stem(torch.empty(2, 3, 32, 32)))
        assert features.shape == (2, 512, side, side), spec


def test_he_normal_sets_the_spread_of_convolutions():
    torch.manual_seed(0)
    network = NarrowResNet(64, 1).build(3, 10, *RGB)
    kernel = network.stages[2][0].conv2.weight
    assert kernel.std().item() == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.01)


def batch_norm(layer, x):
    return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)


def with_random_norms(block):
    """Make batch norms differ from the identity, so that a wrong order shows."""
    for layer in block.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            for values in (layer.weight.data, layer.bias.data, layer.running_mean, layer.running_var):
                values.uniform_(0.5, 1.5)
    return block.eval()


def test_post_activation_block():
    torch.manual_seed(0)
    for outputs, stride in SHAPES:
        block, x = with_random_norms(Block(4, outputs, stride)), torch.randn(2, 4, 7, 7)
        hidden = batch_norm(block.norm1, F.conv2d(x, block.conv1.weight, stride=stride, padding=1)).relu()
        hidden = batch_norm(block.norm2, F.conv2d(hidden, block.conv2.weight, padding=1))
        shortcut = x
        if (outputs, stride) != (4, 1):
            shortcut = batch_norm(block.shortcut[1], F.conv2d(x, block.shortcut[0].weight, stride=stride))
        assert torch.allclose(block(x), (hidden + shortcut).relu(), atol=1e-5)


def test_pre_activation_block():
    torch.manual_seed(0)
    for outputs, stride in SHAPES:
        for shortcut in ("raw", "activated"):
            block, x = with_random_norms(PreActBlock(4, outputs, stride, shortcut)), torch.randn(2, 4, 7, 7)
            activated = batch_norm(block.norm1, x).relu()
            hidden = batch_norm(block.norm2, F.conv2d(activated, block.conv1.weight, stride=stride, padding=1)).relu()
            hidden = F.conv2d(hidden, block.conv2.weight, padding=1)
            rest = x
            if (outputs, stride) != (4, 1):
                rest = F.conv2d(x if shortcut == "raw" else activated, block.projection.weight, stride=stride)
            assert torch.allclose(block(x), hidden + rest, atol=1e-5)


def test_a_network_is_the_composition_of_its_named_parts():
    torch.manual_seed(0)
    network, x = NarrowResNet(4, 1).build(3, 5, *RGB).eval(), torch.rand(2, 3, 9, 9)
    features = network.final(network.stages(network.stem((x - 0.5) / 0.25)))
    assert torch.allclose(network(x), network.head(features.mean((2, 3))), atol=1e-6)
    assert next(name for name, _ in network.named_children()) == "normalize"
    assert isinstance(network.normalize, Normalize)


def test_a_convolution_keeps_the_size_and_has_no_bias():
    for size in (1, 3, 7):
        layer = convolution(2, 3, size)
        assert layer.bias is None
        assert layer(torch.rand(1, 2, 9, 9)).shape == (1, 3, 9, 9)


def test_impossible_sizes_are_refused():
    for make in (
        lambda: ResNet18("5x5"),
        lambda: PreActResNet18("both"),
        lambda: WideResNet(depth=30),
        lambda: WideResNet(depth=4),
        lambda: WideResNet(widen=0),
        lambda: NarrowResNet(width=0),
        lambda: NarrowResNet(blocks=0),
        lambda: SmallCNN(width=1),
    ):
        with pytest.raises(UsageError, match="got"):
            make()
