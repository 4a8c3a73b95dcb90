"""CFOL, class focused online learning (Pethick, Chrysos and Cevher 2023): an adversary learns which classes to draw.

p       gamma / C + (1 - gamma) softmax(w), over the C classes with images
model   the mean loss at x + delta, of classes drawn by p; or, in reweighting, of images drawn alike, times C p_y
w_c     += eta * sum over the batch's misclassified x + delta of class c of 1 / q_c, once per batch, as released

q_c is the probability with which the class was drawn, so that the sum estimates the class's error: p in sampling, the
class's share of the images in reweighting. The loader draws a whole epoch by the p at its beginning. Of the three
eta in released code (1e-7 in the readme, 1e-5 in the configuration) the default is that of the commands for its
experiments: in an epoch of 50,000 images w_c grows by a quarter of the class's error. For n images the same pace takes
eta = 0.25 / n. gamma = 1 is AT on classes drawn alike; in reweighting it is AT.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD
from doubly.checks import check_logits
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.types import Attack, Batch, Objective, State, TrainStep


@dataclass(frozen=True)
class CFOL:
    """mean loss(x + delta) over classes that an adversary chooses."""

    attack: Attack = field(default_factory=PGD)
    """how delta is found"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized"""
    mode: Literal["sampling", "reweighting"] = "sampling"
    """sampling: the adversary draws the classes of the next epoch; reweighting: it multiplies their losses"""
    gamma: float = 0.5
    """share of p that is uniform; 1 leaves the adversary no choice"""
    eta: float = 5e-6
    """how fast the adversary learns; 0.25 / (number of training images) is the published pace"""

    def __post_init__(self) -> None:
        check_plain(self.loss, "CFOL")
        if not 0 < self.gamma <= 1:
            raise UsageError(
                f"gamma must lie in (0, 1], got {self.gamma:g}: without a uniform share a class can be lost for good"
            )
        if not 0 <= self.eta < float("inf"):
            raise UsageError(f"eta must be a number from 0 on, got {self.eta:g}")

    def init(self, counts: Tensor | None = None) -> State:
        if counts is None:
            raise UsageError("CFOL needs the training images per class: init(images.counts())")
        scores, epoch = torch.zeros_like(counts, dtype=torch.float64), torch.zeros_like(counts[0])
        drawn = self.probabilities(scores, counts)
        return {"scores": scores, "counts": counts.clone(), "drawn": drawn, "epoch": epoch}

    def sampling(self, state: State) -> Tensor | None:
        return self.probabilities(state["scores"], state["counts"]) if self.mode == "sampling" else None

    def probabilities(self, scores: Tensor, counts: Tensor) -> Tensor:
        """p, (classes,); 0 where there are no images."""
        present = (counts > 0).double()
        chosen = scores.masked_fill(present == 0, -torch.inf).softmax(0)
        return self.gamma * present / present.sum() + (1 - self.gamma) * chosen

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        delta = self.attack(model, batch.x, batch.y, step.generator("attack"))
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        weights = torch.ones_like(losses)
        p = self.probabilities(state["scores"], state["counts"])
        counts = state["counts"].double()
        if self.mode == "reweighting":
            weights = ((counts > 0).sum() * p).to(losses)[batch.y]
        epoch = torch.full_like(state["epoch"], step.epoch)
        drawn = torch.where(epoch == state["epoch"], state["drawn"], p)
        chance = drawn if self.mode == "sampling" else counts / counts.sum()
        wrong = (logits.argmax(1) != batch.y).double()
        found = torch.zeros_like(p).index_add(0, batch.y, wrong / chance[batch.y])
        scores = state["scores"] + self.eta * parallel.gather(found[None]).sum(0)
        kept = {"scores": scores, "counts": state["counts"], "drawn": drawn, "epoch": epoch}
        record = {"largest_class_probability": p.max()}
        return Objective((weights * losses).mean(), losses.detach(), weights, logits.detach(), kept, record)
