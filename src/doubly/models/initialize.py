"""The weights that a network starts from; drawn from torch's global generator (see `seeding.global_generators`)."""

from torch import nn


def he_normal(network: nn.Sequential) -> nn.Sequential:
    """Convolutions get N(0, 2 / fan_out), so gradients keep their size through ReLU; the rest stays as torch has it."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network
