"""FRL, fair robust learning (Xu, Liu, Li, Jain and Tang 2021), by reweighting classes.

    weighted mean of CE(x), weights a_y   +   beta * weighted mean of KL(p(x) || p(x + delta)), weights b_y

    a_c = 1/C + lambda_c - mean lambda, and b_c likewise with multipliers of its own; each mean is over its weights
    lambda_c += rate (e_c - mean e - tolerance), then cut at 0 and shrunk to sum to `limit` at most; once per epoch

e_c is the class's clean error for a, and for b, at twice the rate, its boundary error: the share that is classified
correctly until it is attacked. delta maximizes the KL. While all multipliers are 0 this is TRADES. With `remargin` the
radius and step size of a class are multiplied by a factor as well (ReMargin), as its boundary error asks for:

    log factor_c += remargin (boundary error_c - its mean - tolerance), cut to factors in [0.98, 3]; once per epoch

What differs:

- released code measures e on 300 held-out images per class before each epoch. A method sees training batches alone, so
  here e is counted over those of the epoch before, in training mode; it is lower than on held-out images.
- its boundary error is accuracy minus accuracy under PGD-20 on the cross-entropy, and its mean is over samples:
  here it counts samples that are right and then wrong, under the attack of training (K steps on the KL), and the mean
  is over classes. A sample that the attack sets right lowers the released error and not ours.
- its class weight 0.1 + 0.9 lambda_c - 0.1 (sum of the others) is for ten classes: 1/C here. `limit` is for each kind.
- its rate halves every 40 epochs, and it runs 40 from a robust checkpoint: the rate stays, the start is the recipe's.
- its steps in ReMargin are a quarter of the largest class radius for every class: here they scale with the class's.
"""

from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_logits, frozen_statistics
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, kl_divergence
from doubly.methods.method import Method
from doubly.types import Batch, Objective, Perturbation, State, TrainStep

FACTORS = (0.98, 3.0)  # smallest and largest factor of a class radius in ReMargin


@dataclass(frozen=True)
class FRL(Method):
    """TRADES with both of its terms weighted toward the classes that err most in them.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: PGD = field(default_factory=lambda: PGD(start="gaussian"))
    """how delta is found, by steps up the KL; not from the image itself, where the KL has no gradient"""
    beta: float = 1.5
    """weight of the boundary term"""
    rate: float = 0.05
    """step of the clean multipliers per epoch; the boundary's are twice as fast; 0 gives equal class weights"""
    tolerance: float = 0.1
    """how far a class's error may exceed the mean error (0.1; with ReMargin 0.07)"""
    limit: float = 0.5
    """largest sum of the multipliers of one kind; no class weighs less than (1 - limit) / C"""
    remargin: float = 0.0
    """how fast the radius of a class follows its boundary error, by epoch; 0: one radius; released: 0.4"""

    def __post_init__(self) -> None:
        settings = {name: getattr(self, name) for name in ("beta", "rate", "tolerance", "remargin")}
        if not all(0 <= value < float("inf") for value in settings.values()):
            values = ", ".join(f"{name}={value:g}" for name, value in settings.items())
            raise UsageError(f"beta, rate, tolerance and remargin are numbers from 0 on, got {values}")
        if not 0 <= self.limit < 1:
            raise UsageError(f"limit must lie in [0, 1), got {self.limit:g}: from 1 on a class may weigh nothing")
        self.attack.check_divergence()

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        attack = self.attack
        if self.remargin and state:  # before the first batch all factors are 1
            log_factors = self.state_at(state, state["tally"], step.epoch)["log_factors"]
            attack = attack.with_class_factors(log_factors.exp())
        return Perturbation(attack.maximize_divergence(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor:
        with torch.no_grad(), frozen_statistics(model):
            logits, clean = model(batch.x + perturbation.delta), model(batch.x)
        return self._sample_values(self.state_at(state, logits, step.epoch), logits, clean, batch.y)

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        x, y = batch.x, batch.y
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(x + delta)
        check_logits(logits, y)
        clean = clean_logits(model, x)
        state = self.state_at(state, logits, step.epoch)
        values = self._sample_values(state, logits, clean, y)
        all_values = step.communicator.all_gather(values)
        tally = torch.zeros_like(state["tally"]).index_add(1, all_values[:, 5].long(), all_values[:, 2:5].T)
        state = {**state, "tally": state["tally"] + tally}

        losses = CrossEntropy()(clean, y), kl_divergence(clean, logits)
        means = all_values[:, :2].contiguous().mean(0)
        weights = [(values[:, kind] / means[kind]).to(losses[0]) for kind in (0, 1)]
        loss = (weights[0] * losses[0] + self.beta * weights[1] * losses[1]).mean()
        sample_losses = (losses[0] + self.beta * losses[1]).detach()
        mean_weights = (weights[0] + self.beta * weights[1]) / (1 + self.beta)  # of a sample's two weights
        return Objective(loss, sample_losses, mean_weights, logits.detach(), state)

    @staticmethod
    def _sample_values(state: State, logits: Tensor, clean: Tensor, y: Tensor) -> Tensor:
        """Return a_y, b_y, 1, clean error, boundary error and label of each sample, (B, 6)."""
        weights = [row[y] for row in class_weights(state["multipliers"])]
        right = clean.argmax(1) == y
        counted = torch.stack([torch.ones_like(right), ~right, right & (logits.argmax(1) != y)]).double()
        return torch.stack([*weights, *counted, y.double()], 1)

    def state_at(self, state: State, logits: Tensor, epoch: int) -> State:
        """Return the state at a batch of this epoch; at its first batch the multipliers follow the epoch before."""
        now = torch.full((), epoch, device=logits.device)
        if not state:  # the first logits tell the number of classes
            zeros = logits.new_zeros(3, logits.shape[1], dtype=torch.float64)
            initial = {"multipliers": zeros[:2].clone(), "tally": zeros, "epoch": now}
            return initial | ({"log_factors": zeros[0].clone()} if self.remargin else {})
        old, tally = state["multipliers"], state["tally"]
        same_epoch = now == state["epoch"]
        multipliers = torch.where(same_epoch, old, self.updated_multipliers(old, tally))
        new_state = {"multipliers": multipliers, "tally": torch.where(same_epoch, tally, 0.0), "epoch": now}
        if self.remargin:
            log_factors = state["log_factors"]
            updated = (log_factors + self.remargin * self.gaps(tally)[1]).clamp(log(FACTORS[0]), log(FACTORS[1]))
            new_state["log_factors"] = torch.where(same_epoch, log_factors, updated)
        return new_state

    def updated_multipliers(self, multipliers: Tensor, tally: Tensor) -> Tensor:
        """Return lambda, (2, classes), clean and boundary, from (images, clean errors, boundary errors) per class."""
        gaps = self.gaps(tally)
        rates = self.rate * torch.tensor([[1.0], [2.0]]).to(gaps)
        moved = (multipliers + rates * gaps).clamp_min(0)
        return moved * (self.limit / moved.sum(1, keepdim=True).clamp_min(1e-300)).clamp_max(1)

    def gaps(self, tally: Tensor) -> Tensor:
        """Return by how much each error exceeds mean and tolerance, (2, classes); 0 for classes without images."""
        present = tally[0] > 0
        errors = tally[1:] / tally[0].clamp_min(1)
        gaps = errors - errors.sum(1, keepdim=True) / present.sum().clamp_min(1) - self.tolerance
        return torch.where(present, gaps, 0.0)


def class_weights(multipliers: Tensor) -> Tensor:
    """Return a and b, (2, classes)."""
    return 1 / multipliers.shape[1] + multipliers - multipliers.mean(1, keepdim=True)
