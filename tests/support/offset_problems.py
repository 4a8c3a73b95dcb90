"""Small problems of known answer: two classes on a line, and images whose brightest row is their class."""

import torch
from torch import Tensor, nn

from doubly.data import Images

RADIUS = 0.05


class Line(nn.Module):
    """Logits (0, slope * (pixel - threshold)): class 1 above the threshold."""

    def __init__(self, threshold: float, slope: float = 10.0) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[0.0], [slope]]))
            self.head.bias.copy_(torch.tensor([0.0, -slope * threshold]))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


def two_classes(n: int = 400, share: float = 0.5) -> Images:
    """Return pixels of two Gaussians around 0.35 and 0.65 with deviation 0.1, as quantiles, so that nothing is random.

    Args:
        n: Number of images.
        share: Share of class 1.
    """
    ones = round(share * n)
    parts = []
    for center, count in ((0.35, n - ones), (0.65, ones)):
        quantiles = (torch.arange(count) + 0.5) / count
        parts.append((center + 0.1 * torch.special.ndtri(quantiles.double())).clamp(0.0, 1.0).float())
    y = torch.cat([torch.zeros(n - ones), torch.ones(ones)]).long()
    return Images.of(torch.cat(parts).view(-1, 1, 1, 1), y)


def bright_rows(n: int, classes: int = 4, seed: int = 0) -> Images:
    """Return n images of noise with one brighter row, which is the class."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    x = 0.6 * torch.rand(n, 1, classes, classes, generator=draw)
    x[torch.arange(n), 0, y] += 0.3
    return Images.of(x, y)


class Rows(nn.Module):
    """Logits are the mean brightness of each row, with a bias that makes the first classes weak."""

    def __init__(self, classes: int = 4, bias: bool = True, divided_by: float = 1.0) -> None:
        super().__init__()
        self.divided_by = divided_by
        self.head = nn.Linear(classes * classes, classes, bias=bias)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(classes).repeat_interleave(classes, 1) * 10 / classes)
            if bias:
                self.head.bias.copy_(torch.linspace(-1.0, 1.0, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1)) / self.divided_by
        return logits
