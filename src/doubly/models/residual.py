"""Common parts of the residual networks: convolutions, their initialization, and the frame of stem, stages, head."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from doubly.models.normalize import Normalize


def convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the image size (at stride 1), without bias, since batch norm follows."""
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def he_normal(network: nn.Sequential) -> nn.Sequential:
    """Initialize all convolutions from N(0, 2 / fan_out) (He et al., 2015), in place, and return the network.

    Other layers keep torch's initialization. The numbers come from torch's global generator.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network


def residual_network(
    normalize: Normalize,
    stem: nn.Module,
    block: Callable[[int, int, int], nn.Module],
    widths: Sequence[int],
    depth: int,
    final: nn.Module,
    classes: int,
) -> nn.Sequential:
    """Build a residual network: stem, stages of blocks, average over the image, linear head.

    Args:
        normalize: First layer.
        stem: Layers before the first stage.
        block: Makes a block from its input channels, output channels and stride.
        widths: Channels of the stem and of each stage. Every stage but the first begins by halving the image.
        depth: Blocks per stage.
        final: Layers after the last stage.
        classes: Number of logits.

    Returns:
        The network, with initialized weights; its parts have the names of the arguments, `pool` and `head`.
    """
    stages = nn.Sequential()
    for stage, (inputs, outputs) in enumerate(pairwise(widths)):
        opening = block(inputs, outputs, 1 if stage == 0 else 2)
        stages.append(nn.Sequential(opening, *(block(outputs, outputs, 1) for _ in range(depth - 1))))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Linear(widths[-1], classes)
    parts = OrderedDict(normalize=normalize, stem=stem, stages=stages, final=final, pool=pool, head=head)
    return he_normal(nn.Sequential(parts))
