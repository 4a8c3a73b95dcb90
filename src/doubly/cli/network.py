"""The network that a user names on the command line, and whether anything gave it weights."""

from typing import Any

from torch import nn

from doubly.cli.options import NetworkOptions
from doubly.config.user_code import UserModel
from doubly.evaluation.network import RANDOM_WEIGHTS, model_sha256
from doubly.seeding import global_generators


def describe_network(options: NetworkOptions, data: str) -> dict[str, Any]:
    """Return what a result about a network of the user says of it."""
    about: dict[str, Any] = {"model": options.model, "weights": options.weights, "data": data}
    return about | ({"mean": list(options.mean), "std": list(options.std)} if options.mean else {})


def build_network(options: NetworkOptions, channels: int, classes: int) -> tuple[nn.Module, str]:
    """Build the network of --model, --weights, --mean and --std.

    Args:
        options: What was given; --model is.
        channels: Channels of the images.
        classes: Number of classes.

    Returns:
        The network, and a warning if its weights are random; empty if they are not.

    Raises:
        UsageError: If the function or the weights cannot be used, or mean and std do not fit.
    """
    function, weights = options.model, options.weights
    assert function is not None
    architecture = UserModel(function, weights, options.mean or None, options.std or None)

    def build(seed: int) -> nn.Module:
        with global_generators(seed):  # a function that loads no weights returns the same network each time
            return architecture.build(channels, classes, [0.0], [1.0])

    model = build(0)
    if weights is not None or model_sha256(model) == model_sha256(build(1)):
        return model, ""
    return model, (
        f"WARNING: {function} returns a network with {RANDOM_WEIGHTS}, other ones with another seed, so these are the "
        "numbers of an untrained network: give --weights FILE, or let the function load them"
    )
