"""Fast-BAT (Zhang et al. 2022): one step of a linearized attack as a bilevel problem, with its implicit gradient.

    lower   delta* = argmin over the ball of < grad l'(z), delta > + lambda/2 |delta - z|^2
                   = project(z - grad l'(z) / lambda)
    upper   mean CE(x + delta*), whose gradient has the implicit term - < d/d theta grad l'(z), H q / lambda >

with l' = -CE, q the input gradient of CE at `delta*`, and H = 1 where `delta*` is inside the ball, else 0. It is
`cid` with a lower level that is linear in delta. The released code steps by 1/lambda = 5000/255, yet divides the
implicit term by lambda = 10: two parameters here, `attack.rule.size` and `curvature`, with those defaults.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, attack_context, frozen_statistics, replay_rng, rng_state
from doubly.bilevel import Diagonal, GradientStep, RunningMean, Terms, cid, projected_descent
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.methods.method import Method
from doubly.types import Batch, Objective, Perturbation, State, TrainStep

FACE_DISTANCE = 1e-7  # a coordinate nearer to a face counts as on it


@dataclass(frozen=True)
class FastBAT(Method):
    """One plain gradient step to z, one more to delta*, and the implicit gradient between them.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: PGD = field(default_factory=lambda: PGD(steps=1, rule=GradientStep(5000 / 255)))
    """finds z from a random start; its rule takes the last step too; its loss is that of the model as well"""
    curvature: float = 10.0
    """lambda of the implicit term; infinity leaves the term out, which is two-step adversarial training"""

    def __post_init__(self) -> None:
        if not self.curvature > 0:
            raise UsageError(f"the curvature of Fast-BAT must be positive, got {self.curvature:g}")
        if not self.attack.threat.has_barrier:
            raise UsageError("the implicit gradient of Fast-BAT is that of a box: use LinfBall")

    @property
    def needs_second_derivatives(self) -> bool:
        return self.curvature < float("inf")

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        x, y, attack = batch.x, batch.y, self.attack
        z = attack(model, x, y, step.generator("attack"))
        with attack_context(model, attack.attack_mode, x) as forward:
            box = attack.box(x, y)
            delta = projected_descent(lambda d: -attack.loss(forward(x + d), y), z, box, attack.rule, 1)
        return Perturbation(delta, {"z": z})

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        x, y, loss = batch.x, batch.y, self.attack.loss
        delta, values = perturbation or self.perturb(model, batch, state, step)
        z, dropout = values["z"], rng_state()

        def linearized(delta: Tensor) -> Tensor | None:
            if not self.needs_second_derivatives:
                return None
            with frozen_statistics(model), replay_rng(dropout):
                point = z.clone().requires_grad_()
                (slope,) = torch.autograd.grad(-loss(model(x + point), y).sum(), point, create_graph=True)
            return (slope * delta).flatten(1).sum(1)

        def problem(delta: Tensor) -> Terms:
            logits = model(x + delta)
            check_logits(logits, y)
            return Terms(loss(logits, y), linearized(delta), logits.detach())

        box = self.attack.box(x, y)
        inside = (box.lower + FACE_DISTANCE < delta) & (delta < box.upper - FACE_DISTANCE)
        solve = Diagonal(inside.to(x.dtype) / self.curvature) if self.needs_second_derivatives else None
        with torch.autocast(x.device.type, enabled=False):  # the implicit term drowns in half precision
            # The mean of the losses is composed with nothing, so no sample depends on the others.
            direction = cid(problem, delta, RunningMean(eta=1.0), {}, solve)
        weights = torch.ones_like(direction.values)
        return Objective(direction.loss, direction.values, weights, direction.aux, state)
