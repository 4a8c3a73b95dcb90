"""FAAL, fairness-aware adversarial learning (Zhang, Zhang, Mu, Zeng, Chang, Ge, Ruan 2024): the worst class mixture.

    mean C p_y loss(x + delta)

    p = argmax sum_c p_c a_c   over probabilities p of the C classes with KL(uniform || p) <= rho
    a_c = sum over the batch's samples of class c of max_{k != y} q_k - q_y,   q the softmax at x + delta

The solution is p_c proportional to 1 / (nu - a_c), with nu > max a such that the constraint holds with equality; nu is
found by bisection. Where all a are equal, with rho = 0 and before `start`, p is uniform: AT.

The authors fine-tune a trained network for two epochs. Here the same happens after `start` of training, so that base
training counts as training; their way is start = 0 with a run that begins from weights. Their AWP is `awp` around it.
Classes without images in the batch take no part, and C is the number of the others: with their a = 0 they would get
more of p than the classes that are learned well.
"""

from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, Attack, clean_logits, frozen_statistics
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, probability_margin, sample_losses
from doubly.methods.method import Method
from doubly.types import Batch, Objective, Perturbation, State, TrainStep

BISECTIONS = 64  # from an interval of some thousands, in the logarithm of nu - max a, to the precision of float64


@dataclass(frozen=True)
class FAAL(Method):
    """Adversarial training at the worst mixture of classes near the uniform one, found for each batch.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: Attack = field(default_factory=PGD)
    """how delta is found"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized; one that compares with the clean logits (TRADES, MART) costs a pass more"""
    rho: float = 0.5
    """how far p may be from uniform, in KL divergence; 0 is AT"""
    start: float = 0.75
    """share of training before which all classes weigh the same; 0 for fine-tuning of a trained network"""

    def __post_init__(self) -> None:
        if not 0 <= self.rho < float("inf"):
            raise UsageError(f"rho bounds a KL divergence, a number from 0 on, got {self.rho:g}: published is 0.5")
        if not 0 <= self.start < 1:
            raise UsageError(f"start is a share of training in [0, 1), got {self.start:g}: 0.75 is the last quarter")

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor | None:
        if step.progress < self.start:
            return None
        with torch.no_grad(), frozen_statistics(model):
            return _sample_values(model(batch.x + perturbation.delta), batch.y)

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = sample_losses(self.loss, logits, batch.y, lambda: clean_logits(model, batch.x))
        weights, record = torch.ones_like(losses), {}
        if step.progress >= self.start:
            values = step.communicator.all_gather(_sample_values(logits, batch.y))
            class_weights = self.class_weights(values[:, 1].contiguous(), values[:, 0].long(), logits.shape[1])
            weights = class_weights.to(losses)[batch.y]
            record = {"largest_class_weight": class_weights.max()}
        return Objective((weights * losses).mean(), losses.detach(), weights, logits.detach(), state, record)

    def class_weights(self, margins: Tensor, y: Tensor, classes: int) -> Tensor:
        """Return C p_c, (classes,); 0 for classes without samples.

        Args:
            margins: max_{k != y} q_k - q_y of each sample of the whole batch.
            y: Their labels.
            classes: Number of classes.
        """
        zeros = margins.new_zeros(classes)
        present = y.bincount(minlength=classes) > 0
        p = worst_probabilities(zeros.index_add(0, y, margins)[present], self.rho)
        return zeros.masked_scatter(present, (len(p) * p).to(zeros))


def worst_probabilities(gains: Tensor, rho: float) -> Tensor:
    """Return the probabilities p with KL(uniform || p) <= rho at which sum p_c gains_c is largest.

    With s = nu - max gains and d = max gains - gains, p is proportional to 1 / (s + d), and the divergence is
    mean log(s + d) + log mean 1 / (s + d), which falls from infinity to 0 as s grows. All in logarithms of s, since
    s becomes tiny where most classes are tied at the largest gain.

    Args:
        gains: What each class adds, (classes,).
        rho: Largest divergence, from 0 on.
    """
    gains = gains.double().cpu()  # a few numbers, which each bisection reads
    shortfalls = gains.max() - gains
    spread = shortfalls.max().item()
    if rho == 0 or spread == 0:
        return torch.full_like(shortfalls, 1 / len(gains))
    log_shortfalls = (shortfalls / spread).log()
    low, high = -800.0 - 2 * len(gains) * (1 + rho), 3 - min(0.0, log(rho))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        log_sums = torch.logaddexp(log_shortfalls.new_tensor(middle), log_shortfalls)
        divergence = log_sums.mean() + (-log_sums).logsumexp(0) - log(len(gains))
        low, high = (middle, high) if divergence > rho else (low, middle)
    return (-torch.logaddexp(log_shortfalls.new_tensor(high), log_shortfalls)).softmax(0)


def _sample_values(logits: Tensor, y: Tensor) -> Tensor:
    """Return label and max_{k != y} q_k - q_y of each sample, (B, 2)."""
    return torch.stack([y.double(), -probability_margin(logits.detach(), y).double()], 1)
