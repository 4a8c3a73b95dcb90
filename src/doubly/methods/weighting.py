"""Weights that several methods share."""

from torch import Tensor

from doubly.distributed.collectives import Communicator


def mean_one_weights(log_weights: Tensor, communicator: Communicator) -> Tensor:
    """Return exp(log_weights) scaled to a mean of 1 over the batch of all processes.

    The largest is subtracted before the exponential, so that weights that would all underflow still work.
    """
    all_log_weights = communicator.all_gather(log_weights)
    largest = all_log_weights.max()
    return (log_weights - largest).exp() / (all_log_weights - largest).exp().mean()
