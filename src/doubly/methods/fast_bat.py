"""Fast-BAT (Zhang et al. 2022): one step of a linearized attack as a bilevel problem, with its implicit gradient.

lower   delta* = argmin over the ball of < grad l'(z), delta > + lambda/2 |delta - z|^2 = project(z - grad l'(z)/lambda)
upper   mean CE(x + delta*), whose gradient has the implicit term - < d/d theta grad l'(z), H q / lambda >

with l' = -CE, q the input gradient of CE at delta*, and H = 1 where delta* is strictly inside the ball, else 0. It is
`cid` with a lower level that is linear in what the network says. The released code steps by 1/lambda = 5000/255, yet
divides the implicit term by lambda = 10: two parameters here, `attack.rule.size` and `curvature`, with those defaults.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, attacked, draws, repeating, statistics_frozen
from doubly.bilevel import Box, Diagonal, GradientStep, RunningMean, Terms, cid, projected_descent
from doubly.checks import check_logits
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.threat import LinfBall
from doubly.types import Batch, Objective, State, TrainStep

INSIDE = 1e-7  # from a face: nearer counts as on it


@dataclass(frozen=True)
class FastBAT:
    """One plain gradient step to z, one more to delta*, and the implicit gradient between them."""

    attack: PGD = field(default_factory=lambda: PGD(steps=1, rule=GradientStep(5000 / 255)))
    """finds z from a random start; its rule takes the last step too; its loss is that of the model as well"""
    curvature: float = 10.0
    """lambda of the implicit term; infinity leaves the term out, which is two-step adversarial training"""

    def __post_init__(self) -> None:
        if not self.curvature > 0:
            raise UsageError(f"the curvature of Fast-BAT must be positive, got {self.curvature:g}")
        if not isinstance(self.attack.threat, LinfBall):
            raise UsageError("the implicit gradient of Fast-BAT is that of a box: use LinfBall")

    @property
    def differentiates_twice(self) -> bool:
        return self.curvature < float("inf")

    def init(self, counts: Tensor | None = None) -> State:
        return {}

    def sampling(self, state: State) -> Tensor | None:
        return None

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        x, y, attack = batch.x, batch.y, self.attack
        box = attack.threat.around(x)
        assert isinstance(box, Box), "checked when the method was made"
        z = attack(model, x, y, step.generator("attack"))
        with attacked(model, attack.attack_mode):
            delta = projected_descent(lambda d: -attack.loss(model(x + d), y), z, box, attack.rule, 1)
        stand = draws()

        def problem(delta: Tensor) -> Terms:
            logits = model(x + delta)
            check_logits(logits, y)
            with statistics_frozen(model), repeating(stand):
                point = z.clone().requires_grad_()
                (slope,) = torch.autograd.grad(-attack.loss(model(x + point), y).sum(), point, create_graph=True)
            return Terms(attack.loss(logits, y), (slope * delta).flatten(1).sum(1), logits.detach())

        inside = (box.lower + INSIDE < delta) & (delta < box.upper - INSIDE)
        solve = Diagonal(inside.to(x.dtype) / self.curvature)
        with torch.autocast(x.device.type, enabled=False):  # the implicit term drowns in half precision
            found = cid(problem, delta, RunningMean(eta=1.0), {}, solve, all_gather=parallel.gather)
        weights = torch.ones_like(found.values)
        return Objective(found.loss, found.values, weights, found.aux, state)
