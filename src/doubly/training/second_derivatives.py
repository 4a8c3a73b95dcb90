"""Check that a network can be differentiated twice, by its input and its weights.

DONE's implicit term, like those of Fast-BAT and of gradient alignment, is a second derivative. A compiled network has
none, and what torch then does depends on its version: it may silently drop the term. So it is tried before a run
begins.
"""

import torch
from torch import Tensor, nn

from doubly.attacks import frozen_statistics
from doubly.distributed import Communicator
from doubly.errors import UsageError
from doubly.losses import CrossEntropy
from doubly.seeding import global_generators
from doubly.types import Batch

MAX_IMAGES = 8  # that are tried


def check_second_derivatives(model: nn.Module, batch: Batch, communicator: Communicator) -> None:
    """Refuse a network that would train without its second derivatives.

    Raises:
        UsageError: If the network is compiled, or its mixed derivative is missing.
    """
    x, y = batch.x[:MAX_IMAGES], batch.y[:MAX_IMAGES]
    reason = "it is compiled" if is_compiled(model) else _missing_derivative(model, x, y, communicator)
    if reason:
        raise UsageError(
            f"the method differentiates the model twice, by image and weights, and this one does not allow it "
            f"({reason}): pass the network itself, without torch.compile"
        )


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile(model) or model.compile() was applied to the network or a part of it."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())


def _missing_derivative(model: nn.Module, x: Tensor, y: Tensor, communicator: Communicator) -> str:
    """Return what is wrong with d/d weights of <input gradient, v>, or nothing; it leaves no gradients behind."""
    weights = [p for p in model.parameters() if p.requires_grad]
    with global_generators(0), frozen_statistics(model):
        point = x.detach().clone().requires_grad_()
        losses = CrossEntropy()(model(point), y).sum()
        plain = torch.autograd.grad(losses, weights, retain_graph=True, materialize_grads=True)
        (slope,) = torch.autograd.grad(losses, point, create_graph=True, materialize_grads=True)
    depends = bool(slope.any()) and any(bool(gradient.any()) for gradient in plain)
    if not any(communicator.all_gather_text("yes" if depends else "")):  # all alike: the layers may exchange
        return ""  # a network that depends on nothing has nothing to lose
    model.zero_grad()
    try:
        if slope.requires_grad:  # backward and not grad, which would not notice what forbids it
            (slope * slope.detach().sign()).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return (str(error).splitlines() or [type(error).__name__])[0][:120]
    mixed = [p.grad for p in weights if p.grad is not None]
    model.zero_grad()
    return "" if not depends or any(gradient.any() for gradient in mixed) else "the mixed derivative is 0"
