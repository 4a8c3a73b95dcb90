"""CFOL, class-focused online learning (Pethick, Chrysos and Cevher 2023): an adversary learns which classes to draw.

    p       gamma / C + (1 - gamma) softmax(w), over the C classes with images
    model   the mean loss at x + delta of classes drawn by p; in reweighting, of images or classes drawn uniformly,
            times C p_y
    w_c     += eta * sum over the batch's misclassified x + delta of class c of 1 / q_c, once per batch, as released

q_c is the probability with which the class was drawn, so that the sum estimates the class's error: p in sampling, the
class's share of the images in reweighting, or 1 / C with draw classes. Released code draws classes there, and ours
images by default, as other methods do; it matters only if the classes differ in size: C p_y then weights a class by
its share of the images too. The loader draws a whole epoch by the p at its beginning. Of the three
eta in released code (1e-7 in the readme, 1e-5 in the configuration) the default is that of the commands for its
experiments: in an epoch of 50,000 images w_c grows by a quarter of the class's error. For n images the same pace takes
eta = 0.25 / n. gamma = 1 is AT on uniformly drawn classes; in reweighting it is AT.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, Attack, frozen_statistics
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.methods.method import DRAWS_CLASSES, Method, require_counts
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class CFOL(Method):
    """Adversarial training on classes that an adversary chooses.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: Attack = field(default_factory=PGD)
    """how delta is found"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized"""
    mode: Literal["sampling", "reweighting"] = "sampling"
    """sampling: the adversary draws the classes of the next epoch; reweighting: it multiplies their losses"""
    draw: Literal["images", "classes"] = "images"
    """what reweighting draws uniformly. images: each once per epoch; classes: and then an image of it, as released"""
    gamma: float = 0.5
    """share of p that is uniform; 1 leaves the adversary no choice"""
    eta: float = 5e-6
    """how fast the adversary learns; 0.25 / (number of training images) is the published pace"""

    def __post_init__(self) -> None:
        check_plain(self.loss, "CFOL")
        if self.draw == "classes" and self.mode == "sampling":
            raise UsageError("draw classes is for mode reweighting: in sampling the adversary draws them, leave it out")
        if not 0 < self.gamma <= 1:
            raise UsageError(
                f"gamma must lie in (0, 1], got {self.gamma:g}: without a uniform share a class can be lost for good"
            )
        if not 0 <= self.eta < float("inf"):
            raise UsageError(f"eta must be a number from 0 on, got {self.eta:g}")

    @property
    def class_balance(self) -> str | None:
        draws = self.mode == "sampling" or self.draw == "classes"
        return DRAWS_CLASSES if draws else "weights classes of images that are drawn uniformly"

    def init(self, counts: Tensor | None = None) -> State:
        counts = require_counts(counts, "CFOL")
        scores, epoch = torch.zeros_like(counts, dtype=torch.float64), torch.zeros_like(counts[0])
        drawn = self.probabilities(scores, counts)
        return {"scores": scores, "counts": counts.clone(), "drawn": drawn, "epoch": epoch}

    def sampling(self, state: State, progress: float = 0.0) -> Tensor | None:
        if self.mode == "sampling":
            return self.probabilities(state["scores"], state["counts"])
        return self._uniform(state["counts"]) if self.draw == "classes" else None

    @staticmethod
    def _uniform(counts: Tensor) -> Tensor:
        present = (counts > 0).double()
        return present / present.sum()

    def probabilities(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Return p, (classes,); 0 for classes without images."""
        present = (counts > 0).double()
        chosen = scores.masked_fill(present == 0, -torch.inf).softmax(0)
        return self.gamma * present / present.sum() + (1 - self.gamma) * chosen

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor:
        with torch.no_grad(), frozen_statistics(model):
            return self._class_errors(model(batch.x + perturbation.delta), batch.y, self._drawn_by(state, step))

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        weights = torch.ones_like(losses)
        p = self.probabilities(state["scores"], state["counts"])
        if self.mode == "reweighting":
            weights = ((state["counts"] > 0).sum() * p).to(losses)[batch.y]
        errors = self._class_errors(logits, batch.y, self._drawn_by(state, step))
        new_state = {
            "scores": state["scores"] + self.eta * step.communicator.all_gather(errors).sum(0),
            "counts": state["counts"],
            "drawn": self._epoch_probabilities(state, step),
            "epoch": torch.full_like(state["epoch"], step.epoch),
        }
        record = {"largest_class_probability": p.max()}
        return Objective((weights * losses).mean(), losses.detach(), weights, logits.detach(), new_state, record)

    def _epoch_probabilities(self, state: State, step: TrainStep) -> Tensor:
        """Return the p that this epoch was drawn by: the one at its beginning."""
        same_epoch = torch.full_like(state["epoch"], step.epoch) == state["epoch"]
        return torch.where(same_epoch, state["drawn"], self.probabilities(state["scores"], state["counts"]))

    def _drawn_by(self, state: State, step: TrainStep) -> Tensor:
        """Return q, the probability with which each class was drawn."""
        if self.mode == "sampling":
            return self._epoch_probabilities(state, step)
        counts = state["counts"].double()
        return self._uniform(counts) if self.draw == "classes" else counts / counts.sum()

    @staticmethod
    def _class_errors(logits: Tensor, y: Tensor, drawn_by: Tensor) -> Tensor:
        """Return the sum over the misclassified samples of each class of 1 / q, as one row, (1, classes)."""
        wrong = (logits.argmax(1) != y).double()
        return torch.zeros_like(drawn_by).index_add(0, y, wrong / drawn_by[y])[None]
