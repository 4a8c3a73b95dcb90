"""Networks as they are: outputs that contain the logits, and normalization that happens outside of the network."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from doubly.attacks import eval_mode, model_device
from doubly.bilevel.arguments import fits, show
from doubly.errors import UsageError
from doubly.models.normalize import Normalize
from doubly.seeding import forked

Statistics = float | Sequence[float]  # one number for all channels, or one per channel


class AdaptedModel(nn.Module):
    """A network that returns more than logits, or expects normalized images, as one from images in [0, 1] to logits.

    Its state dict is that of the network inside, so that checkpoints fit the network of the user.
    """

    def __init__(
        self, model: nn.Module, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        """Wrap a network.

        Args:
            model: The network.
            mean: Mean of each channel that it expects to be subtracted, of pixels in [0, 1].
            std: Standard deviation of each channel.

        Raises:
            UsageError: If the numbers do not fit.
        """
        super().__init__()
        self.model = model
        self.normalize = nn.Identity() if mean is None else Normalize(mean, std or ())

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.model(self.normalize(x)))

    def state_dict(self, *arguments: Any, **settings: Any) -> Any:
        return self.model.state_dict(*arguments, **settings)

    def load_state_dict(self, *arguments: Any, **settings: Any) -> Any:
        return self.model.load_state_dict(*arguments, **settings)


def adapt_model(
    model: nn.Module, x: Tensor, mean: Statistics | None = None, std: Statistics | None = None
) -> nn.Module:
    """Return a network from images in [0, 1] to logits, whatever the given one returns and expects.

    Args:
        model: The network. It may return a tensor of logits, an object with `.logits`, a dict with "logits", or a
            tuple whose first entry is the logits.
        x: One or more images in [0, 1], (N, C, H, W), to call it with.
        mean: Mean of the channels, if the network expects normalized images.
        std: Standard deviation of the channels.

    Returns:
        The network itself if it needs no adapter, else an `AdaptedModel`.

    Raises:
        UsageError: If there are no logits in its output, or mean and std do not fit.
    """
    statistics = normalization(mean, std, x.shape[1])
    adapted = AdaptedModel(model, *statistics).to(model_device(model)) if statistics is not None else None
    try:
        with eval_mode(model), torch.no_grad(), forked():
            output = model(x[:2].to(model_device(model)))
    except NotImplementedError:
        raise UsageError(
            f"{type(model).__name__} has no forward: define it, or pass the network inside, such as module.net of a "
            "Lightning module"
        ) from None
    except Exception:  # the checks that follow say what does not fit
        return adapted or model
    if adapted is None and not isinstance(output, Tensor):
        adapted = AdaptedModel(model)
    logits_of(output)
    return adapted or model


def normalization(
    mean: Statistics | None, std: Statistics | None, channels: int
) -> tuple[list[float], list[float]] | None:
    """Return mean and std of each channel; None if neither is given.

    Args:
        mean: One number for all channels, or one per channel, of pixels in [0, 1].
        std: The same of the standard deviation.
        channels: Channels of the images.

    Raises:
        UsageError: If only one is given, there are not as many numbers as channels, or they are of gray levels.
    """
    means, stds = _per_channel("mean", mean, channels), _per_channel("std", std, channels)
    if means is None and stds is None:
        return None
    if means is None or stds is None:
        raise UsageError("normalization takes both mean and std of the channels: give the two, or neither")
    return means, stds


def original_model(model: nn.Module) -> nn.Module:
    """Return the network inside an adapter; a network without one as it is."""
    return model.model if isinstance(model, AdaptedModel) else model


def logits_of(output: Any) -> Tensor:
    """Return the logits in the output of a network.

    Raises:
        UsageError: If it is no tensor and has no logits; the message says what it has.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        logits = output.get("logits", next(iter(output.values())) if len(output) == 1 else None)
    elif isinstance(output, tuple | list):
        logits = getattr(output, "logits", output[0] if output else None)  # torchvision returns named tuples
    else:
        logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        inside = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise UsageError(
            f"the model returns {type(output).__name__}{inside}, in which there are no logits: return a tensor, an "
            'object with .logits, a dict with "logits", or a tuple whose first entry is the logits'
        )
    return logits


def _floats(name: str, values: Any) -> list[float]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{name} is a number, or one per channel, got {show(values)}: write {name}=(0.5, 0.5, 0.5)")
    numbers = [value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in values]
    if not numbers or not all(fits(number, float) for number in numbers):
        raise UsageError(f"{name} has one number per channel, got {show(values)}: write {name}=(0.5, 0.5, 0.5)")
    return [float(number) for number in numbers]


def _per_channel(name: str, values: Statistics | None, channels: int) -> list[float] | None:
    if values is None:
        return None
    numbers = _floats(name, [values] if fits(values, float) else values)
    numbers = numbers * channels if len(numbers) == 1 else numbers
    if len(numbers) != channels:
        raise UsageError(
            f"{name} has one number per channel, or one for all, got {len(numbers)} for {channels} channel(s): give "
            f"{channels} number(s)"
        )
    if max(numbers) > 1:
        raise UsageError(f"{name} is of pixels in [0, 1], got {numbers}: divide those of gray levels by 255")
    return numbers
