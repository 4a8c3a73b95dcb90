"""Checks of input from outside; each message says what to do."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from doubly.bilevel.arguments import is_out_of_memory as is_out_of_memory
from doubly.bilevel.arguments import show
from doubly.errors import Interrupted, NonFiniteError, ProcessLost, UsageError

_TORCH = str(Path(torch.__file__).parent)


@contextmanager
def checked_call(model: Any, x: Tensor, y: Tensor) -> Iterator[None]:
    """Check the arguments of an attack before it runs, and explain an error that comes from the network.

    Raises:
        UsageError: If network, images and labels come in another order, `check_images` refuses the images or labels,
            or the network cannot take them.
    """
    check_call(model, x, y)
    with explained_network(model, x, y):
        yield


@contextmanager
def explained_network(model: nn.Module, x: Tensor, y: Tensor) -> Iterator[None]:
    """Answer an error inside by a sentence about the network, if the network alone fails on the images as well.

    Only after an error is the network called again, so that what works costs nothing.

    Raises:
        UsageError: If the network cannot take the images, or returns no logits for these labels.
    """
    try:
        yield
    except (UsageError, ArithmeticError, Interrupted, ProcessLost):
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            _check_network(model, x, y)
        raise


def _check_network(model: nn.Module, x: Tensor, y: Tensor) -> None:
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.enable_grad():
            logits: Tensor = model.eval()(x.detach().requires_grad_())
    except Exception as error:
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_TORCH):
            return  # raised by the network's own code, which says what it means
        raise network_refusal(error, x) from None
    finally:
        for module, training in modes.items():
            module.training = training
    check_logits(logits, y)
    if not logits.requires_grad:
        raise UsageError(
            "the model's logits have no gradient with respect to the images: leave out detach(), no_grad() and argmax"
        )


def network_refusal(error: Exception, x: Tensor) -> UsageError:
    """Return the sentence for a network that fails on images."""
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.160}"
    return UsageError(
        f"the model cannot take images of shape {tuple(x.shape[1:])} ({reason}): give images of the size, channels "
        "and type that it was built for"
    )


def check_call(model: Any, x: Tensor, y: Tensor) -> None:
    """Check the arguments of an attack: a network, then images, then labels.

    Raises:
        UsageError: If they come in another order, or images and labels are refused by `check_images`.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"an attack is called as attack(model, x, y), the network first, got ({type(model).__name__}, "
            f"{type(x).__name__}, {type(y).__name__}): it holds no model of its own"
        )
    check_images(x, y)


def check_images(x: Tensor, y: Tensor) -> None:
    """Check that images are floats in [0, 1] and labels whole numbers, one per image.

    Raises:
        UsageError: If they are not.
    """
    check_batch(x, y)
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    if not (low >= 0 and high <= 1):
        if bad := count_nan_images(x):
            raise UsageError(f"images must lie in [0,1], and {bad} of {len(x)} have NaN pixels: remove or repair them")
        raise UsageError(
            f"images must lie in [0,1], got values from {low:.4g} to {high:.4g}: leave normalization to the model's "
            "first layer (doubly.models.Normalize)"
        )


def check_batch(x: Tensor, y: Tensor) -> None:
    """Check kind, shape and type of images and labels, which needs no look at their values.

    Raises:
        UsageError: If they do not fit.
    """
    for name, values in (("images", x), ("labels", y)):
        if not isinstance(values, Tensor):
            raise UsageError(
                f"{name} must be a tensor, got {type(values).__name__}: convert them by torch.as_tensor(…)"
            )
        if values.is_meta or values.layout is not torch.strided:
            raise UsageError(
                f"{name} must be a dense tensor with values, got {show(values)}: load them, or .to_dense()"
            )
    if x.dim() == 3 and y.dim() == 0:
        raise UsageError(
            f"images come in batches (N, C, H, W), got a single one of shape {tuple(x.shape)}: pass x[None] and y[None]"
        )
    if not x.is_floating_point():
        raise UsageError(f"images must be floating point in [0,1], got {x.dtype}: divide uint8 images by 255")
    if x.dim() < 2 or (len(x) and x.numel() == 0):
        raise UsageError(f"images come in batches (N, C, H, W), got shape {tuple(x.shape)}: pass images with pixels")
    if y.dtype is not torch.int64 or y.shape != x.shape[:1]:
        raise UsageError(
            f"labels must be {x.shape[0]} whole numbers, got {y.dtype} of shape {tuple(y.shape)}: pass class numbers, "
            "as int64"
        )
    if x.device != y.device:
        raise UsageError(f"images are on {x.device} and labels on {y.device}: move both to the device of the model")


def count_nan_images(x: Tensor) -> int:
    """Return how many of the images have a pixel that is NaN."""
    return int(x.flatten(1).isnan().any(1).sum())


def check_logits(logits: Tensor, y: Tensor) -> None:
    """Check that a model returned finite logits, one row per image and a column for every label.

    Raises:
        UsageError: If type, shape or labels do not fit.
        NonFiniteError: If a logit is NaN or infinite.
    """
    check_scores(logits, y)
    check_finite(logits, "the model's logits")


def check_scores(logits: Tensor, y: Tensor) -> None:
    """Check type and shape of logits as `check_logits` does, but not whether they are finite.

    Raises:
        UsageError: If type, shape or labels do not fit.
    """
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"the model must return a tensor of logits, got {type(logits).__name__}: return the scores alone, or wrap "
            "it: doubly.models.adapt_model(model, x)"
        )
    if not logits.is_floating_point() or logits.device != y.device or logits.layout is not torch.strided:
        raise UsageError(
            f"the model must return floating-point logits on {y.device}, got {show(logits)}: return the raw scores, "
            "and put the model on the device of the images"
        )
    if logits.dim() != 2 or logits.shape[0] != y.shape[0] or not logits.shape[1]:
        raise UsageError(
            f"the model must return logits of shape ({y.shape[0]}, classes), got {tuple(logits.shape)}: "
            "flatten its output and return the raw scores"
        )
    if y.numel() and not (y.min() >= 0 and y.max() < logits.shape[1]):
        if y.min() >= 1 and y.max() == logits.shape[1]:
            raise UsageError(
                f"labels run from {int(y.min())} to {int(y.max())}, but the {logits.shape[1]} logits of the model are "
                f"numbered from 0 to {logits.shape[1] - 1}: subtract 1 from the labels"
            )
        raise UsageError(
            f"labels run from {int(y.min())} to {int(y.max())} but the model returns {logits.shape[1]} logits: "
            "build the model with as many outputs as there are classes, and number the classes from 0"
        )


def check_finite(values: Tensor, name: str) -> None:
    """Check that no value is NaN or infinite.

    Args:
        values: Any tensor.
        name: What the values are, for the message.

    Raises:
        NonFiniteError: If some are; it says how many.
    """
    if not torch.isfinite(values).all():
        bad = int((~torch.isfinite(values)).sum())
        raise NonFiniteError(f"{name}: {bad} of {values.numel()} values are NaN or infinite")
