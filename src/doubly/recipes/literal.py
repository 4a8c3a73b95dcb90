"""The literal variant of the recipes of DONE: the paper's text at every place where our recipes differ from it.

    weights   exp(l / r) / u without cap and without a limit of their mean
    term      exact, with the barrier's curvature alone (the ReLU remark), undamped
    attack    line 6 of Algorithm 1: explicit steps on inner + barrier, also inside the sign and Adam steps
    SVHN      peak 0.2 of the learning rate and no warm-up, as on the other datasets

What the paper leaves open, such as eta, c, K and the step sizes, stays as it is (docs/paper-map.md); r is the paper's
in all recipes. Expect these runs to train worse, or not at all: on digits, seed 0, done_pgd and done_gd predict one
class after 6 epochs. docs/numerics.md says what each departure is for.
"""

from dataclasses import replace

from doubly.bilevel import BarrierStep, FirstThen, StepRule, WithBarrier
from doubly.config import SGD, Run
from doubly.errors import UsageError
from doubly.methods import DONE
from doubly.schedules import Cyclic

METHODS = ("done_pgd", "done_gd", "done_adam", "done_fast")
PEAK = 0.2


def literal(run: Run) -> Run:
    """Return the run with the paper's literal values; its name ends in `_literal`.

    Raises:
        UsageError: If the recipe is not one of the paper's DONE, whose literal values these are.
    """
    scope, _, method_name = run.name.rpartition(".")
    method = run.method
    if method_name not in METHODS or not isinstance(method, DONE):
        raise UsageError(
            f"{run.name} has no literal variant: only the recipes of the paper's DONE have one, {', '.join(METHODS)}"
        )
    changed = replace(
        method,
        attack=replace(method.attack, rule=_with_explicit_barrier(method.attack.rule)),
        cap=None,
        mean_weight_limit=None,
        damping=0.0,
        implicit="exact",
        curvature="barrier",
    )
    run = replace(run, name=f"{run.name}_literal", label="", method=changed)
    if scope.endswith("small") or scope.startswith("digits") or not isinstance(run.optimizer, SGD):
        return run  # not the paper's scale: learning rate and warm-up are those that train at this one
    return replace(run, optimizer=replace(run.optimizer, lr=Cyclic(PEAK)), warm_up=0.0)


def _with_explicit_barrier(rule: StepRule) -> StepRule:
    match rule:
        case FirstThen():  # the first step only makes the start
            return replace(rule, then=_with_explicit_barrier(rule.then))
        case BarrierStep():
            return replace(rule, preconditioned=False)
        case _:
            return WithBarrier(rule)
