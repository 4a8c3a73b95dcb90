"""theta as a list of tensors, and what is done to them for a while and undone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def leaves_of(theta: Any) -> list[Tensor]:
    """The tensors of a module (those that require gradients), of a list or dict, or theta itself."""
    if isinstance(theta, nn.Module):
        found: list[Any] = [p for p in theta.parameters() if p.requires_grad]
    elif isinstance(theta, dict):
        found = list(theta.values())
    else:
        found = list(theta) if isinstance(theta, list | tuple) else [theta]
    if not found or not all(isinstance(t, Tensor) and t.is_leaf and t.is_floating_point() for t in found):
        raise TypeError(
            "theta must be a module with parameters to train, a tensor, or a list or dict of tensors, all of them "
            "floating-point and not computed from others: use tensor.detach()"
        )
    return found


@contextmanager
def trained(leaves: list[Tensor]) -> Iterator[None]:
    """They require gradients inside; afterwards flags and gradients are as found."""
    before = [(leaf.requires_grad, leaf.grad) for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.requires_grad_().grad = None
        yield
    finally:
        for leaf, (flag, gradient) in zip(leaves, before, strict=True):
            leaf.requires_grad_(flag).grad = gradient


@contextmanager
def frozen(leaves: list[Tensor]) -> Iterator[None]:
    """They require no gradients inside: the inner problem is differentiated in delta alone."""
    for leaf in leaves:
        leaf.requires_grad_(False)
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.requires_grad_()


@contextmanager
def swapped(leaves: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """They hold other values inside."""
    now = [leaf.detach().clone() for leaf in leaves]
    with torch.no_grad():
        for leaf, value in zip(leaves, values, strict=True):
            leaf.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for leaf, value in zip(leaves, now, strict=True):
                leaf.copy_(value)
