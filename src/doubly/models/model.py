"""The protocol of a network architecture."""

import re
from collections.abc import Sequence
from typing import Self

from torch import nn


class Model:
    """A network architecture; a subclass is a frozen dataclass with a method `build`, listed in `MODELS`.

    To train a network of your own you need none: pass an nn.Module to
    `doubly.train`, or name a function that returns one (`--model package.module:function`).
    """

    @property
    def label(self) -> str:
        """The name of the architecture in tables, made from the name of the class: ResNet-18 for ResNet18."""
        return re.sub(r"(?<=[a-z])(?=\d)", "-", type(self).__name__)

    @property
    def named_code(self) -> str | None:
        """The function of the user that `build` imports, package.module:function; None if it imports none."""
        return None

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and std that a network of the user expects to be applied for it; None if it needs none."""
        return None

    def require_trusted(self) -> None:
        """Refuse a network whose code only a file names.

        Raises:
            UsageError: If it is one; the message says how to allow it.
        """

    def build(self, channels: int, classes: int, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        """Build a network with initial weights, drawn from torch's global generator.

        Args:
            channels: Channels of the images.
            classes: Number of logits.
            mean: Mean of each channel of the training images, for the first layer (`Normalize`).
            std: Standard deviation of each channel.

        Returns:
            A module from images (N, channels, H, W) in [0,1], of any size, to logits (N, classes).
        """
        raise NotImplementedError

    def without_initial_weights(self) -> Self:
        """Return the same architecture without a file of weights to begin from, for a network that is filled anyway."""
        return self
