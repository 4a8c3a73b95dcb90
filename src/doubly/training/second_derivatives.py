"""DONE's implicit term, like those of Fast-BAT and of gradient alignment, is a second derivative: a model must have it.

A compiled one has none, and what torch then says depends on its version; so it is looked for before a run begins.
"""

import torch
from torch import Tensor, nn

from doubly.attacks import statistics_frozen
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import CrossEntropy
from doubly.seeding import global_generators
from doubly.types import Batch

FEW = 8  # images that it is looked for on


def check_second_derivatives(model: nn.Module, batch: Batch) -> None:
    """For methods that need them: refuse a model that would train without them."""
    reason = "it is compiled" if is_compiled(model) else _lost(model, batch.x[:FEW], batch.y[:FEW])
    if reason:
        raise UsageError(
            f"the method differentiates the model twice, by image and weights, and this one does not allow it "
            f"({reason}): pass the network itself, doubly compiles what it may"
        )


def _lost(model: nn.Module, x: Tensor, y: Tensor) -> str:
    """What becomes of d/d weights of <input gradient, v>, if not what should. Like a step it leaves no gradients."""
    weights = [p for p in model.parameters() if p.requires_grad]
    with global_generators(0), statistics_frozen(model):
        point = x.detach().clone().requires_grad_()
        losses = CrossEntropy()(model(point), y).sum()
        plain = torch.autograd.grad(losses, weights, retain_graph=True, materialize_grads=True)
        (slope,) = torch.autograd.grad(losses, point, create_graph=True, materialize_grads=True)
    something = bool(slope.any()) and any(bool(g.any()) for g in plain)
    if not any(parallel.everybodys("yes" if something else "")):  # alike: the layers of a network may exchange
        return ""  # nothing to lose
    model.zero_grad()
    try:
        if slope.requires_grad:  # backward and not grad, which does not come by what forbids it
            (slope * slope.detach().sign()).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as problem:
        return (str(problem).splitlines() or [type(problem).__name__])[0][:120]
    mixed = [p.grad for p in weights if p.grad is not None]
    model.zero_grad()
    return "" if not something or any(g.any() for g in mixed) else "the mixed derivative is 0"


def is_compiled(model: nn.Module) -> bool:
    """By torch.compile(model) or model.compile(), whole or in part."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
