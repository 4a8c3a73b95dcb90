"""Checks of a network before it is attacked, and a checksum that identifies it."""

import hashlib
import re

import torch
from torch import Tensor, nn

from doubly.attacks import eval_mode
from doubly.checks import check_images, check_logits, is_out_of_memory, network_refusal
from doubly.errors import UsageError

ROUNDING = 1e-3  # relative to the spread of the logits: a larger difference is not rounding
CLOSE = 1e-4  # likewise: a smaller lead of the largest logit may be lost in another batch or on another machine
SEEDS = (1, 2)
RANDOM_WEIGHTS = "RANDOM weights"  # in the note of an evaluation of a network that nothing gave weights to


def check_network(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Check that the network returns logits that depend on nothing but the image.

    Args:
        model: The network; it is left as it was found.
        x: Some images in [0, 1].
        y: Their labels.

    Returns:
        The largest differences of the logits, relative to their spread: "repeat" between two passes of the same
        images, "batch" between images one by one and in a batch.

    Raises:
        UsageError: If the network returns probabilities, is random, depends on the batch, or cannot take the images.
    """
    check_images(x, y)
    with eval_mode(model), torch.no_grad():
        logits, repeated = (_seeded_logits(model, x, y, seed) for seed in SEEDS)
        check_not_probabilities(logits)
        spread = float(logits.std()) or 1.0
        repeat = float((logits - repeated).abs().max()) / spread
        if repeat > ROUNDING:
            raise UsageError(
                f"the model predicts the same images differently each time (by {repeat:.2g} of the spread of its "
                "logits): attacks need a deterministic network; take out what draws random numbers in evaluation mode"
            )
        batch = _difference_one_by_one(model, x[:8], y[:8], logits[:8]) / spread
        if batch > ROUNDING:
            raise UsageError(
                f"the model predicts a single image differently than in a batch (by {batch:.2g} of the spread of its "
                "logits): normalize with stored statistics, as batch norm does in evaluation mode"
            )
    return {"repeat": repeat, "batch": batch}


def _difference_one_by_one(model: nn.Module, x: Tensor, y: Tensor, logits: Tensor) -> float:
    """Return the largest difference to the logits of the images one by one; infinite if a single image fails."""
    try:
        single = torch.cat([_seeded_logits(model, x[i : i + 1], y[i : i + 1], SEEDS[0]) for i in range(len(x))])
    except UsageError:
        return float("inf")
    return float((logits - single).abs().max())


def _seeded_logits(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> Tensor:
    try:
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(seed)
            logits: Tensor = model(x)
    except Exception as error:  # whatever the user's network raises
        if is_out_of_memory(error):
            raise
        raise network_refusal(error, x) from None
    check_logits(logits, y)
    return logits


def check_not_probabilities(logits: Tensor) -> None:
    """Refuse outputs of which each row is a distribution.

    Raises:
        UsageError: If all are non-negative and each row adds up to 1.
    """
    rows = logits.double()
    if bool((rows >= 0).all()) and bool(((rows.sum(1) - 1).abs() < 1e-4).all()):
        raise UsageError(
            "the model returns probabilities, each row adds up to 1: return the logits, without the softmax, since "
            "attacks on probabilities find no gradient"
        )


def is_decided(logits: Tensor) -> Tensor:
    """Return whether the largest logit of each sample leads by more than rounding, (B,)."""
    largest = logits.topk(min(2, logits.shape[1]), 1)[0]
    return (largest[:, 0] - largest[:, -1]) > CLOSE * logits.std()


def model_sha256(model: nn.Module) -> str:
    """Return a checksum of the weights, buffers and printed structure; code of the forward pass does not count."""
    structure = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # an address is another in each process
    digest = hashlib.sha256(structure.encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
