"""The network that a user names on the command line, and whether anything gave it weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from doubly.cli.options import NetworkOptions
from doubly.config.user_code import UserModel, is_library_model
from doubly.evaluation.network import RANDOM_WEIGHTS, model_sha256
from doubly.models.adapt import AdaptedModel, normalization
from doubly.models.weights import load_weights
from doubly.seeding import global_generators


def describe_network(options: NetworkOptions, data: str) -> dict[str, Any]:
    """Return what a result about a network of the user says of it."""
    about: dict[str, Any] = {"model": options.model, "weights": options.weights, "data": data}
    return about | ({"mean": list(options.mean), "std": list(options.std)} if options.mean else {})


def build_network(
    options: NetworkOptions,
    channels: int,
    classes: int,
    names: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> tuple[nn.Module, str]:
    """Build the network of --model, --weights, --mean and --std.

    Args:
        options: What was given; --model is.
        channels: Channels of the images.
        classes: Number of classes.
        names: Names of the classes, which are compared with the labels of a model of another library.
        say: Called with what was found in a model or checkpoint of another library.

    Returns:
        The network, and a warning if its weights are random; empty if they are not.

    Raises:
        UsageError: If the function or the weights cannot be used, or mean and std do not fit.
    """
    function, weights = options.model, options.weights
    assert function is not None
    if is_library_model(function):
        return _library_network(options, function, channels, classes, names, say), ""
    architecture = UserModel(function, weights, options.mean or None, options.std or None)

    def build(seed: int) -> nn.Module:
        with global_generators(seed):  # a function that loads no weights returns the same network each time
            return architecture.build(channels, classes, [0.0], [1.0])

    model = build(0)
    if weights is not None and isinstance(model, AdaptedModel) and not options.mean and say is not None:
        say(f"{weights} holds a normalizer, which is applied before the network: {model.normalize}")
    if weights is not None or model_sha256(model) == model_sha256(build(1)):
        return model, ""
    return model, (
        f"WARNING: {function} returns a network with {RANDOM_WEIGHTS}, other ones with another seed, so these are the "
        "numbers of an untrained network: give --weights FILE, or let the function load them"
    )


def _library_network(
    options: NetworkOptions,
    title: str,
    channels: int,
    classes: int,
    names: Sequence[str],
    say: Callable[[str], None] | None,
) -> nn.Module:
    from doubly.bridges.models import find_model

    found = find_model(title)
    if say is not None:
        say(found.sentence)
    found.check_data(channels, classes, names)
    model = found.network(*(normalization(options.mean or None, options.std or None, channels) or ()))
    if options.weights is not None:
        load_weights(model, Path(options.weights))
    return model
