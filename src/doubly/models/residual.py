"""What the residual networks share: convolutions without bias (batch norm has one), stages, and the frame."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from doubly.models.initialize import he_normal
from doubly.models.normalize import Normalize


def convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def residual_network(
    normalize: Normalize,
    stem: nn.Module,
    block: Callable[[int, int, int], nn.Module],
    widths: Sequence[int],
    depth: int,
    final: nn.Module,
    classes: int,
) -> nn.Sequential:
    """Stem, `depth` blocks(inputs, outputs, stride) per stage, average over the image, linear head.

    `widths` are the channels of the stem and of each stage; each stage but the first opens by halving the image.
    """
    stages = nn.Sequential()
    for stage, (inputs, outputs) in enumerate(pairwise(widths)):
        opening = block(inputs, outputs, 1 if stage == 0 else 2)
        stages.append(nn.Sequential(opening, *(block(outputs, outputs, 1) for _ in range(depth - 1))))
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Linear(widths[-1], classes)
    parts = OrderedDict(normalize=normalize, stem=stem, stages=stages, final=final, pool=pool, head=head)
    return he_normal(nn.Sequential(parts))
