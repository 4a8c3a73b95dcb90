"""A network whose logits are shifted by one number per class."""

from typing import cast

from torch import Tensor, nn


class ShiftedLogits(nn.Module):
    """Adds class offsets to the logits of a network; the offsets are a buffer, so that checkpoints contain them."""

    offsets: Tensor

    def __init__(self, network: nn.Module, offsets: Tensor) -> None:
        """Wrap a network.

        Args:
            network: The network, from images to logits (N, classes).
            offsets: What is added to the logit of each class, (classes,).
        """
        super().__init__()
        self.network = network
        self.register_buffer("offsets", offsets.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.network(x)) + self.offsets
