"""FRL, fair robust learning (Xu, Liu, Li, Jain and Tang 2021), by reweighting classes.

    weighted mean of CE(x), weights a_y   +   beta * weighted mean of KL(p(x) || p(x + delta)), weights b_y

    a_c = 1/C + lambda_c - mean lambda, and b_c likewise with multipliers of its own; each mean is over its weights
    lambda_c += rate (e_c - mean e - tolerance), then cut at 0 and shrunk to sum to `limit` at most; once per epoch

e_c is the class's clean error for a, and for b, at twice the rate, its boundary error: the share that is classified
correctly until it is attacked. delta maximizes the KL. While all multipliers are 0 this is TRADES. What differs:
- released code measures e on 300 held-out images per class before each epoch. A method sees training batches alone, so
  here e is counted over those of the epoch before, in training mode; it is lower than on held-out images.
- its class weight 0.1 + 0.9 lambda_c - 0.1 (sum of the others) is for ten classes: 1/C here. `limit` is for each kind.
- its rate halves every 40 epochs, and it runs 40 from a robust checkpoint: the rate stays, the start is the recipe's.
- ReMargin, which widens epsilon class by class, is left out: a threat has one radius.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_pass
from doubly.checks import check_logits
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, kl_divergence
from doubly.types import Batch, Objective, State, TrainStep


@dataclass(frozen=True)
class FRL:
    """CE(x) + beta KL(x, x + delta), each weighted towards the classes that err most in it."""

    attack: PGD = field(default_factory=lambda: PGD(start="gaussian"))
    """how delta is found, by steps up the KL; not from the image itself, where the KL has no slope"""
    beta: float = 1.5
    """weight of the boundary term"""
    rate: float = 0.05
    """step of the clean multipliers per epoch; the boundary's are twice as fast; 0 weighs all classes alike"""
    tolerance: float = 0.1
    """how far a class's error may exceed the mean error (0.1; with ReMargin 0.07)"""
    limit: float = 0.5
    """largest sum of the multipliers of one kind; no class weighs less than (1 - limit) / C"""

    def __post_init__(self) -> None:
        if not all(0 <= value < float("inf") for value in (self.beta, self.rate, self.tolerance)):
            raise UsageError(
                "beta, rate and tolerance are numbers from 0 on, got "
                f"beta={self.beta:g}, rate={self.rate:g}, tolerance={self.tolerance:g}"
            )
        if not 0 <= self.limit < 1:
            raise UsageError(f"limit must lie in [0, 1), got {self.limit:g}: from 1 on a class may weigh nothing")
        self.attack.check_diverge()

    def init(self, counts: Tensor | None = None) -> State:
        return {}  # the first logits tell the number of classes

    def sampling(self, state: State) -> Tensor | None:
        return None

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        x, y = batch.x, batch.y
        delta = self.attack.diverge(model, x, y, step.generator("attack"))
        logits = model(x + delta)
        check_logits(logits, y)
        clean = clean_pass(model, x)
        state = self.begun(state, logits, step.epoch)
        right = clean.argmax(1) == y
        seen = torch.stack([torch.ones_like(right), ~right, right & (logits.argmax(1) != y)]).double()
        tally = torch.zeros_like(state["tally"]).index_add(1, y, seen)
        state = {**state, "tally": state["tally"] + parallel.gather(tally[None]).sum(0)}

        errors = CrossEntropy()(clean, y), kl_divergence(clean, logits)
        weights = [row[y] for row in class_weights(state["multipliers"])]
        means = parallel.gather(torch.stack(weights, 1)).mean(0)
        weights = [(weight / mean).to(errors[0]) for weight, mean in zip(weights, means, strict=True)]
        scalar = (weights[0] * errors[0] + self.beta * weights[1] * errors[1]).mean()
        losses = (errors[0] + self.beta * errors[1]).detach()
        shown = (weights[0] + self.beta * weights[1]) / (1 + self.beta)  # of a sample's two weights, the mean
        return Objective(scalar, losses, shown, logits.detach(), state)

    def begun(self, state: State, logits: Tensor, epoch: int) -> State:
        """The state at a batch of this epoch: where it is the first, the multipliers follow the epoch before."""
        now = torch.full((), epoch, device=logits.device)
        if not state:
            zeros = logits.new_zeros(3, logits.shape[1], dtype=torch.float64)
            return {"multipliers": zeros[:2].clone(), "tally": zeros, "epoch": now}
        old, tally = state["multipliers"], state["tally"]
        same = now == state["epoch"]
        multipliers = torch.where(same, old, self.updated(old, tally))
        return {"multipliers": multipliers, "tally": torch.where(same, tally, 0.0), "epoch": now}

    def updated(self, multipliers: Tensor, tally: Tensor) -> Tensor:
        """lambda, (2, classes), clean and boundary, from (images, clean errors, boundary errors) per class."""
        seen = tally[0] > 0
        errors = tally[1:] / tally[0].clamp_min(1)
        gaps = errors - errors.sum(1, keepdim=True) / seen.sum().clamp_min(1) - self.tolerance
        rates = self.rate * torch.tensor([[1.0], [2.0]]).to(errors)
        moved = torch.where(seen, multipliers + rates * gaps, multipliers).clamp_min(0)
        return moved * (self.limit / moved.sum(1, keepdim=True).clamp_min(1e-300)).clamp_max(1)


def class_weights(multipliers: Tensor) -> Tensor:
    """a and b, (2, classes)."""
    return 1 / multipliers.shape[1] + multipliers - multipliers.mean(1, keepdim=True)
