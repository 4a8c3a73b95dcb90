"""DAFA, distance-aware fair adversarial training (Lee, Kim, Moon, Hwang and Lee 2024): class radii and class weights.

    mean W_y CE(x) + beta KL(p(x) || p(x + delta)),   delta increases the KL within W_y epsilon, by steps W_y alpha

    W_i = 1 + sum over classes j != i of    lambda q_ij q_jj   where q_ii < q_jj
                                           -lambda q_ji q_ii   where q_ii > q_jj

q_ij is the mean probability of class j on attacked images of class i. So a class gains from each stronger class that it
is confused with, and loses to each weaker one. As published, W follows from one epoch and stays: here the last complete
one when `start` of training is done (their epoch 70 of 110). Until then, and with lambda = 0, this is TRADES.

What differs: q is that of the training passes of the epoch, with batch statistics. With many classes W_i can become
negative, so `floor` bounds it. A class without images has weight 1 and no influence. Where `start` lies in the first
epoch, W begins with the second. Released code for AT repeats the last step with equal radii, which undoes W: not here.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_logits, frozen_statistics
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.methods.class_tally import add_to_tally, class_means, empty_tally, tally_at
from doubly.methods.method import Method, require_counts
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class DAFA(Method):
    """TRADES with wider radii and larger clean losses for classes that are confused with stronger ones.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: PGD = field(default_factory=lambda: PGD(start="gaussian"))
    """how delta is found, by steps up the KL; not from the image itself, where the KL has no gradient"""
    beta: float = 6.0
    """weight of the KL"""
    strength: float = 1.0
    """lambda, how far W departs from 1; published: 1, and 1.5 on CIFAR-100 and STL-10; 0 is TRADES"""
    start: float = 0.64
    """share of training after which W acts"""
    floor: float = 0.1
    """smallest W of a class"""

    def __post_init__(self) -> None:
        TradesLoss(self.beta)
        self.attack.check_divergence()
        if not 0 <= self.strength < float("inf"):
            raise UsageError(f"strength is a number from 0 on, got {self.strength:g}: published is 1")
        if not 0 <= self.start < 1:
            raise UsageError(f"start is a share of training in [0, 1), got {self.start:g}: published is 0.64")
        if not 0 < self.floor <= 1:
            raise UsageError(f"floor is the smallest class weight and lies in (0, 1], got {self.floor:g}: try 0.1")

    def init(self, counts: Tensor | None = None) -> State:
        counts = require_counts(counts, "DAFA")
        weights = torch.ones_like(counts, dtype=torch.float64)
        return {**empty_tally(len(counts) + 1, counts), "weights": weights, "fixed": torch.zeros_like(counts[0])}

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        attack = self.attack.with_class_factors(self.state_at(state, step)["weights"])
        return Perturbation(attack.maximize_divergence(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor | None:
        if self.state_at(state, step)["fixed"]:
            return None
        with torch.no_grad(), frozen_statistics(model):
            return _sample_values(model(batch.x + perturbation.delta), batch.y)

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        state = self.state_at(state, step)
        if not state["fixed"]:
            values = step.communicator.all_gather(_sample_values(logits, batch.y))
            state = add_to_tally(state, values[:, 1:], values[:, 0].long())
        divergence, clean_loss = TradesLoss(self.beta).parts(logits, batch.y, clean_logits(model, batch.x))
        weights = state["weights"].to(clean_loss)[batch.y]
        loss = (weights * clean_loss + divergence).mean()
        record = {"largest_class_weight": state["weights"].max(), "smallest_class_weight": state["weights"].min()}
        return Objective(loss, (clean_loss + divergence).detach(), weights, logits.detach(), state, record)

    def state_at(self, state: State, step: TrainStep) -> State:
        """Return the state at this step; at the first one after `start` the weights follow the epoch before."""
        state = tally_at(state, step.epoch)
        if step.progress < self.start or state["fixed"] or not state["previous"][-1].any():
            return state
        weights = self.class_weights(class_means(state["previous"]).T, state["previous"][-1] > 0)
        return {**state, "weights": weights, "fixed": torch.ones_like(state["fixed"])}

    def class_weights(self, confusion: Tensor, seen: Tensor) -> Tensor:
        """Return W, (classes,).

        Args:
            confusion: q, (classes, classes): the mean probability of each class on the images of class i in row i.
            seen: Which classes had images, (classes,).
        """
        own = confusion.diagonal()
        weaker = (own[:, None] < own[None, :]).double()  # i than j
        gain = weaker * confusion * own[None, :] - weaker.T * confusion.T * own[:, None]
        both = seen[:, None] & seen[None, :]
        return (1 + self.strength * (gain * both).sum(1)).clamp_min(self.floor)


def _sample_values(logits: Tensor, y: Tensor) -> Tensor:
    """Return label and probabilities of each sample, (B, 1 + classes)."""
    return torch.cat([y[:, None].double(), logits.detach().double().softmax(1)], 1)
