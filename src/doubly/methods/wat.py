"""WAT, worst-class adversarial training (Li and Liu 2023): TRADES, with classes weighted by their held-out losses.

    mean of (C w_y + w_0) l_i ,   l_i = CE(x) + beta KL(p(x) || p(x + delta)) ,   delta increases the KL
    w     = softmax of eta * (sum over the epochs so far of L_c), over the C classes and one arm more, w_0
    L_c   the mean l of class c on held-out images after an epoch; the L of w_0 is the mean of the L_c

As published: beta 6, eta 0.1. eta = 0 is TRADES, since all weights are then 1. What differs:

- the held-out images are a part of the hold-out that validation does not use; the network is in evaluation mode.
- a class without held-out images is given the mean of the others, and one without training images no weight.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_logits
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.methods.class_tally import add_to_tally, class_means
from doubly.methods.method import Method, require_counts
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class WAT(Method):
    """TRADES with class weights that grow exponentially with the losses of the classes on held-out images.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: PGD = field(default_factory=lambda: PGD(start="gaussian"))
    """how delta is found, by steps up the KL; not from the image itself, where the KL has no gradient"""
    beta: float = 6.0
    """weight of the KL"""
    eta: float = 0.1
    """how fast the weights follow the held-out losses; 0 is TRADES"""

    def __post_init__(self) -> None:
        TradesLoss(self.beta)
        if not 0 <= self.eta < float("inf"):
            raise UsageError(f"eta must be a number from 0 on, got {self.eta:g}")
        self.attack.check_divergence()

    @property
    def validation_interval(self) -> Literal["epoch"]:
        return "epoch"

    def init(self, counts: Tensor | None = None) -> State:
        counts = require_counts(counts, "WAT")
        tally = counts.new_zeros(2, len(counts), dtype=torch.float64)
        epoch = torch.zeros_like(counts[0])
        return {"counts": counts.clone(), "totals": torch.zeros_like(tally[0]), "tally": tally, "epoch": epoch}

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack.maximize_divergence(model, batch.x, batch.y, step.generator("attack")))

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = TradesLoss(self.beta)(logits, batch.y, clean_logits(model, batch.x))
        state = self.state_at(state, step.epoch)
        weights = self.class_weights(state).to(losses)[batch.y]
        return Objective((weights * losses).mean(), losses.detach(), weights, logits.detach(), state)

    def on_validation(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> State:
        delta = self.attack.maximize_divergence(model, batch.x, batch.y, step.generator("validation"))
        with torch.no_grad():
            losses = TradesLoss(self.beta)(model(batch.x + delta), batch.y, model(batch.x)).double()
        rows = step.communicator.all_gather(torch.stack([losses, batch.y.to(losses)], 1))
        return add_to_tally(state, rows[:, :1], rows[:, 1].long())

    def state_at(self, state: State, epoch: int) -> State:
        """Return the state at a batch of this epoch; its first batch adds the held-out losses of the epoch before."""
        now = torch.full_like(state["epoch"], epoch)
        same_epoch = now == state["epoch"]
        images, (means,) = state["tally"][-1], class_means(state["tally"])
        means = torch.where(images > 0, means, means.sum() / (images > 0).sum().clamp_min(1))
        totals = torch.where(same_epoch, state["totals"], state["totals"] + means)
        tally = torch.where(same_epoch, state["tally"], 0.0)
        return {"counts": state["counts"], "totals": totals, "tally": tally, "epoch": now}

    def class_weights(self, state: State) -> Tensor:
        """Return the weight C w_c + w_0 of each class, (classes,)."""
        totals, present = state["totals"], state["counts"] > 0
        scores = self.eta * torch.cat([totals.masked_fill(~present, -torch.inf), totals[present].mean()[None]])
        w = scores.nan_to_num(-torch.inf).softmax(0)
        return present.sum() * w[:-1] + w[-1]
