"""Is this a network whose numbers can mean anything? Checked once, before the first attack; and what identifies it."""

import hashlib
import re

import torch
from torch import Tensor, nn

from doubly.attacks import eval_mode
from doubly.checks import check_images, check_logits, is_out_of_memory
from doubly.errors import UsageError

ROUNDING = 1e-3  # relative to the spread of the logits: more is not rounding but another answer
CLOSE = 1e-4  # likewise: answers nearer than this to another may turn with the batch or the machine
SEEDS = (1, 2)


def check_network(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Refuses probabilities, chance and answers that depend on the batch; returns by how much answers differ."""
    check_images(x, y)
    with eval_mode(model), torch.no_grad():
        first, again = (_answered(model, x, y, seed) for seed in SEEDS)
        check_logits(first, y)
        _check_range(first)
        spread = float(first.std()) or 1.0
        chance = float((first - again).abs().max()) / spread
        if chance > ROUNDING:
            raise UsageError(
                f"the model answers the same images differently each time (by {chance:.2g} of the spread of its "
                "logits): attacks need a deterministic network; take out what draws random numbers in evaluation mode"
            )
        company = _alone(model, x[:8], y[:8], first[:8]) / spread
        if company > ROUNDING:
            raise UsageError(
                f"the model answers an image alone otherwise than in a batch (by {company:.2g} of the spread of its "
                "logits): normalize with stored statistics, as batch norm does in evaluation mode"
            )
    return {"repeat": chance, "batch": company}


def _alone(model: nn.Module, x: Tensor, y: Tensor, together: Tensor) -> float:
    """The largest difference between the answers to images one by one and together; infinite where one alone fails."""
    try:
        alone = torch.cat([_answered(model, x[i : i + 1], y[i : i + 1], SEEDS[0]) for i in range(len(x))])
    except UsageError:
        return float("inf")
    return float((together - alone).abs().max())


def _answered(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> Tensor:
    try:
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(seed)
            logits: Tensor = model(x)
    except Exception as problem:  # whatever somebody's network raises
        if is_out_of_memory(problem):
            raise
        reason = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]:.160}"
        raise UsageError(
            f"the model cannot take images of shape {tuple(x.shape[1:])} ({reason}): give images of the size, channels "
            "and type that it was built for"
        ) from None
    check_logits(logits, y)
    return logits


def _check_range(logits: Tensor) -> None:
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
    """Of the weights, buffers and structure. A forward that does something else is found by its answers."""
    structure = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # an address is another in each process
    digest = hashlib.sha256(structure.encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
