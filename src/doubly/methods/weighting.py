"""Weights of samples and of classes that methods share."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from doubly.distributed.collectives import Communicator
from doubly.errors import UsageError


def mean_one_weights(log_weights: Tensor, communicator: Communicator) -> Tensor:
    """Return exp(log_weights) scaled to a mean of 1 over the batch of all processes.

    The largest is subtracted before the exponential, so that weights that would all underflow still work.
    """
    all_log_weights = communicator.all_gather(log_weights)
    largest = all_log_weights.max()
    return (log_weights - largest).exp() / (all_log_weights - largest).exp().mean()


def class_prior(counts: Tensor, prior: Literal["uniform", "data"], prior_weights: Sequence[float] = ()) -> Tensor:
    """Return a distribution over the classes, (classes,), in float64; 0 for classes without images.

    Args:
        counts: Number of training images per class.
        prior: All classes alike, or by their share of the images.
        prior_weights: One number per class, which replace `prior` if there are any.

    Raises:
        UsageError: If these do not fit the classes.
    """
    if not prior_weights:
        weights = counts.double() if prior == "data" else (counts > 0).double()
    elif len(prior_weights) != len(counts):
        raise UsageError(
            f"prior_weights has {len(prior_weights)} numbers for {len(counts)} classes: give one per class"
        )
    else:
        weights = torch.tensor(prior_weights, dtype=torch.float64, device=counts.device)
        if ((weights > 0) & (counts == 0)).any():
            raise UsageError("prior_weights must be 0 for a class without training images: set it to 0")
    return weights / weights.sum()
