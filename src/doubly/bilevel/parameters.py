"""theta as a list of tensors, and context managers that change these tensors for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def parameters_of(theta: Any) -> list[Tensor]:
    """List the tensors of theta.

    Args:
        theta: A module, of which the parameters that require gradients count; a list, tuple or dict of tensors; or a
            tensor.

    Returns:
        The tensors themselves, not copies.

    Raises:
        TypeError: If there is no tensor, or one is expanded or not a floating-point leaf of the graph.
    """
    if isinstance(theta, nn.Module):
        tensors: list[Any] = [p for p in theta.parameters() if p.requires_grad]
    elif isinstance(theta, dict):
        tensors = list(theta.values())
    else:
        tensors = list(theta) if isinstance(theta, list | tuple) else [theta]
    if not tensors or not all(isinstance(t, Tensor) and t.is_leaf and t.is_floating_point() for t in tensors):
        raise TypeError(
            "theta must be a module with parameters to train, a tensor, or a list or dict of tensors, all of them "
            "floating-point and not computed from others: use tensor.detach()"
        )
    if any(t.layout is torch.strided and _shares_memory(t) for t in tensors):
        raise TypeError("theta holds an expanded tensor, whose entries are one and the same number: use tensor.clone()")
    return tensors


def _shares_memory(tensor: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


@contextmanager
def trainable(parameters: list[Tensor]) -> Iterator[None]:
    """Make the tensors require gradients, and restore their flags and gradients afterwards."""
    before = [(parameter.requires_grad, parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_().grad = None
        yield
    finally:
        for parameter, (flag, gradient) in zip(parameters, before, strict=True):
            parameter.requires_grad_(flag).grad = gradient


@contextmanager
def frozen(parameters: list[Tensor]) -> Iterator[None]:
    """Make the tensors require no gradients, so that the inner problem is differentiated in delta alone."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_()


@contextmanager
def with_values(parameters: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Give the tensors other values, and restore their own afterwards."""
    original_values = [parameter.detach().clone() for parameter in parameters]
    _copy(values, parameters)
    try:
        yield
    finally:
        _copy(original_values, parameters)


@torch.no_grad()
def _copy(values: list[Tensor], parameters: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
