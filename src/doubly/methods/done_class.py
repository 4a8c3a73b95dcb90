"""DONE over classes and samples: an adversary chooses the classes, and inside a class the samples. It is ours.

    weight of sample i   p_y (M / M_y) q_i ,   M_c of the M training images are of class c
    q_i                  exp(l_i / r) / u_y, the paper's weights inside a class, within [floor, cap]; 1 for large r

The two modes differ in how the class adversary chooses p:

- gradient: by the same losses as the model. p_c is proportional to prior_c exp(G_c / R), G_c = r log mean exp(l_i / r)
  over class c, and the update is the CID gradient of one function, F = R log sum_c prior_c exp(G_c / R); with implicit
  none that of F at fixed perturbations. Theorem 1 of the paper covers it as far as it covers DONE (docs/numerics.md).
- best_response: by an objective of its own, p = argmax sum_c p_c e_c - R KL(p || prior), with e_c the class's error
  under attack. That is a game: each side answers the other, no F has this gradient, and no theorem covers it. The error
  has no useful gradient, but says better than the cross-entropy which class is weak.

p acts as these weights, or in best_response in another way, with weights q_i:

- sampling: an epoch is drawn by the p at its beginning, as in CFOL. The loss has the same expectation as with weights.
- offsets: the loss is CE(z + b, y), b_c = -log(p_c M / M_c); for prior data that is -log(p_c / prior_c). At its minimum
  over all functions softmax(z + b) are the class probabilities of the data at x, so that softmax(z) are those of
  classes drawn by p, as at the minimum of the weighted loss. A constant in b cancels, so b is not centered.

In either mode p_c <= class_cap / C. Errors are decayed counts of the attacked training images, or (driver holdout) of
held-out, unaugmented images, which the method attacks every `interval` steps. A class counts one image more, with the
mean error of all, so that few images do not decide alone.

Limits, without caps and floor: R, r -> inf with a uniform prior is AT with balanced loss (action sampling: with
balanced sampling; offsets: AT-BSL), with prior data AT. In mode gradient, one class, or R = r with prior data, is the
paper's DONE; r -> inf, then R -> 0 is the mean loss of the worst class. The class means of a batch are divided by the
batch's own counts, so DONE's u is met where these are those of the data.
"""

from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_logits, frozen_statistics
from doubly.bilevel import ClassLogMeanExp, Diagonal, Terms, cid, tilted_probabilities
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, needs_clean_logits, probability_margin, sample_losses
from doubly.methods.method import DRAWS_CLASSES, WEIGHTS_BY_COUNTS, Method, implicit_precision, require_counts
from doubly.methods.weighting import class_prior
from doubly.schedules import Constant, Schedule
from doubly.types import Batch, Objective, Perturbation, State, TrainStep

INFINITE = 1e9  # temperatures from here on count as infinite, which configurations cannot hold


@dataclass(frozen=True)
class DONEClass(Method):
    """KL weights over classes by their error or loss under attack, and optionally inside each class.

    Raises:
        UsageError: If a number is out of range, or settings exclude each other.
    """

    attack: PGD = field(default_factory=PGD)
    """how delta is found"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized; one that compares with the clean logits (TRADES, MART) costs a pass more"""
    mode: Literal["best_response", "gradient"] = "best_response"
    """best_response: classes are chosen by their error, a game; gradient: by the loss, the gradient of one function"""
    class_temperature: Schedule = field(default_factory=lambda: Constant(0.5))
    """R over training: small values follow the worst classes; 1e9 leaves the prior"""
    action: Literal["weights", "sampling", "offsets"] = "weights"
    """what p does in best_response: weighs samples, draws the classes of an epoch, or shifts logits in the loss"""
    class_cap: float | None = 2.0
    """largest probability of a class, in units of 1 / (number of classes); none for no bound"""
    prior: Literal["uniform", "data"] = "uniform"
    """where the class adversary is drawn back to: all classes alike, or their shares of the training images"""
    prior_weights: tuple[float, ...] = ()
    """a prior of your own, one number per class, scaled to sum to 1; it replaces `prior`"""
    score: Literal["error", "margin"] = "error"
    """e in best_response: the share of misclassified images, or (1 - mean probability margin) / 2"""
    driver: Literal["train", "holdout"] = "train"
    """where e comes from: the attacked training batches, or held-out images, for which the run needs data.holdout"""
    rate: float = 0.02
    """decay of the counts behind e in each step; its inverse is their memory in steps"""
    interval: int = 10
    """steps between two batches of held-out images, for driver holdout"""
    temperature: Schedule = field(default_factory=lambda: Constant(INFINITE))
    """r over training: small values follow the worst samples of a class; 1e9 weights all samples of a class alike"""
    eta: float = 0.9
    """share of the current batch in the running means of each class"""
    cap: float | None = None
    """largest weight of a sample inside its class, where the mean weight is 1; none for no bound"""
    floor: float = 0.0
    """smallest weight of a sample inside its class"""
    logit_adjustment: float = 0.0
    """the loss takes the logits plus this times log(M_c / M); 1 is the balanced softmax, 0 is none"""
    implicit: Literal["none", "exact"] = "none"
    """exact: how the attack answers the network is differentiated as in DONE; none: it is left out"""
    damping: float = 10.0
    """added to the barrier's curvature before it is inverted, for implicit exact"""

    def __post_init__(self) -> None:
        pairs = [(R, r) for R in self.class_temperature.values_taken() for r in self.temperature.values_taken()]
        try:
            for class_temperature, r in pairs:
                self._composition(torch.ones(1), class_temperature, r)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if not (0 < self.rate <= 1 and self.interval >= 1):
            raise UsageError(f"rate lies in (0, 1] and interval is at least 1, got {self.rate:g} and {self.interval}")
        if self.prior_weights and not (min(self.prior_weights) >= 0 and 0 < sum(self.prior_weights) < inf):
            raise UsageError(f"prior_weights are numbers from 0 on, not all of them 0, got {self.prior_weights}")
        shifted = self.logit_adjustment != 0 or self.action == "offsets"
        if not isfinite(self.logit_adjustment) or (shifted and needs_clean_logits(self.loss)):
            raise UsageError(
                "logit_adjustment is a number, and like action offsets for a loss of the attacked images alone; got "
                f"{self.logit_adjustment:g} and {type(self.loss).__name__}: use CrossEntropy, or neither of them"
            )
        if self.action != "weights" and (self.mode == "gradient" or self.logit_adjustment):
            raise UsageError(
                f"action {self.action} needs mode best_response and logit_adjustment 0, since p takes the place of the "
                "class counts: use these, or action weights"
            )
        if not self.damping >= 0 or (self.implicit != "none" and not self.attack.threat.has_barrier):
            raise UsageError("implicit exact needs a LinfBall and a damping from 0 on: use these, or implicit none")

    @property
    def needs_second_derivatives(self) -> bool:
        return self.implicit == "exact"

    @property
    def class_balance(self) -> str | None:
        return DRAWS_CLASSES if self.action == "sampling" else WEIGHTS_BY_COUNTS

    @property
    def validation_interval(self) -> int | None:
        return self.interval if self.mode == "best_response" and self.driver == "holdout" else None

    def init(self, counts: Tensor | None = None) -> State:
        counts = require_counts(counts, "DONEClass")
        images, never = counts.new_zeros(2, len(counts), dtype=torch.float64), torch.full_like(counts[:1].repeat(2), -1)
        state = {"counts": counts.double(), "images": images, "validated": never}
        if ((self._prior(state) == 0) & (counts > 0)).any() and self.action == "offsets":
            raise UsageError("prior_weights must be above 0 for classes with training images: or use action weights")
        return state

    def _prior(self, state: State) -> Tensor:
        return class_prior(state["counts"], self.prior, self.prior_weights)

    def sampling(self, state: State, progress: float = 0.0) -> Tensor | None:
        return self.class_probabilities(state, progress) if self.action == "sampling" else None

    def class_scores(self, state: State) -> Tensor:
        """Return e, (classes,), from the decayed numbers of images and of errors."""
        images, errors = state["images"].unbind()
        mean = errors.sum() / images.sum().clamp_min(1e-300)
        return (errors + mean) / (images + 1)

    def class_probabilities(self, state: State, progress: float) -> Tensor:
        """Return the best response p, (classes,), at a share of training."""
        R = _or_infinite(self.class_temperature.at(progress))
        return tilted_probabilities(self.class_scores(state), self._prior(state), R, self.class_cap)

    def _composition(
        self, shares: Tensor, R: float, r: float, prior: Tensor | None = None, p: Tensor | None = None
    ) -> ClassLogMeanExp:
        bounds = (self.class_cap, self.cap, self.floor)
        return ClassLogMeanExp(shares, _or_infinite(R), _or_infinite(r), prior, self.eta, *bounds, p)

    def composition(self, state: State, progress: float) -> ClassLogMeanExp:
        """Return the outer function at a share of training, with the class probabilities where errors choose them."""
        p, shares = None, state["counts"] / state["counts"].sum()
        if self.mode == "best_response":  # shares as p weigh the samples of all classes alike
            p = self.class_probabilities(state, progress) if self.action == "weights" else shares
        temperatures = self.class_temperature.at(progress), self.temperature.at(progress)
        return self._composition(shares, *temperatures, self._prior(state), p)

    def logit_shift(self, state: State, progress: float) -> Tensor | None:
        """Return what the loss adds to the logits, (classes,), in float64; None for nothing."""
        log_shares = (state["counts"] / state["counts"].sum()).clamp_min(1e-300).log()
        if self.action == "offsets":
            return log_shares - self.class_probabilities(state, progress).log().masked_fill(state["counts"] == 0, 0.0)
        return self.logit_adjustment * log_shares if self.logit_adjustment else None

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor:
        with torch.no_grad(), frozen_statistics(model), implicit_precision(self.implicit, batch.x):
            return self._rows(model, batch, state, step, perturbation.delta)[0]

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        composition, gathered = self.composition(state, step.progress), []

        def problem(delta: Tensor) -> Terms:
            rows, logits = self._rows(model, batch, state, step, delta)
            gathered.append(step.communicator.all_gather(rows.detach()))
            return Terms(rows[:, :2], -self.attack.loss(logits, batch.y), logits.detach())

        with implicit_precision(self.implicit, batch.x):
            solve = None
            if self.implicit == "exact":
                solve = Diagonal(self.attack.box(batch.x, batch.y).inverse_curvature(delta, self.damping))
            previous = state if "nu" in state else {}
            direction = cid(problem, delta, composition, previous, solve, all_gather=lambda _: gathered[0][:, :2])
        counting = self.mode == "best_response" and self.driver == "train"
        images = self._count(state, gathered[0], 1 - self.rate) if counting else state["images"]
        new_state = {"counts": state["counts"], "images": images, "validated": state["validated"], **direction.state}
        losses, weights = direction.values[:, 0], direction.cotangents[:, 0]
        p = composition.class_probabilities(direction.state)
        if self.action != "weights":
            p = self.class_probabilities(state, step.progress)
        record = {"largest_class_probability": p.max()}
        return Objective(direction.loss, losses, weights, direction.aux, new_state, record)

    def on_validation(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> State:
        delta = self.attack(model, batch.x, batch.y, step.generator("validation"))
        with torch.no_grad():
            rows, _ = self._rows(model, batch, state, step, delta)
        now = torch.tensor([step.epoch, step.step]).to(state["validated"])
        decay = 1.0 if torch.equal(now, state["validated"]) else (1 - self.rate) ** self.interval  # once per batch
        return {**state, "images": self._count(state, step.communicator.all_gather(rows), decay), "validated": now}

    def _rows(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return loss, class and score of each sample, (B, 3), and the logits."""
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        shift = self.logit_shift(state, step.progress)
        shifted = logits if shift is None else logits + shift.to(logits)
        losses = sample_losses(self.loss, shifted, batch.y, lambda: clean_logits(model, batch.x))
        detached = logits.detach()
        errors = detached.argmax(1) != batch.y
        scores = errors if self.score == "error" else (1 - probability_margin(detached, batch.y)) / 2
        return torch.stack([losses, batch.y.to(losses), scores.to(losses)], 1), logits

    @staticmethod
    def _count(state: State, rows: Tensor, decay: float) -> Tensor:
        """Return the decayed numbers of images and of errors with those of a batch, (2, classes)."""
        columns = torch.stack([torch.ones_like(rows[:, 2]), rows[:, 2]]).double()
        return (decay * state["images"]).index_add(1, rows[:, 1].long(), columns)


def _or_infinite(temperature: float) -> float:
    return inf if temperature >= INFINITE else temperature
