"""GAIRAT, geometry-aware instance-reweighted adversarial training (Zhang et al. 2021).

    mean omega_i loss_i,   omega = (1 + tanh(lambda + 5 (1 - 2 kappa / K))) / 2,   scaled to a batch mean of 1

kappa in 0 ... K measures how far a sample is from the boundary, in steps of the attack; lambda = +inf is AT. Released
code and paper differ twice, and the code is the default, since others compare with it. kappa: the code counts how many
of x_0 ... x_{K-1} are classified correctly, the paper takes the fewest steps that fool; they differ for samples that
are fooled and recover. half: the code rounds K / 2 down, which matters for odd K only. Not taken over: a piecewise
lambda whose later stages are never reached, and a linear one that begins with NaN.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doubly.attacks import PGD
from doubly.checks import check_logits
from doubly.distributed import SINGLE_PROCESS, Communicator
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.methods.method import Method
from doubly.methods.weighting import mean_one_weights
from doubly.schedules import Constant, Schedule
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class GAIRAT(Method):
    """Adversarial training with weights that grow as a sample withstands fewer steps of the attack.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: PGD = field(default_factory=PGD)
    """how delta is found; kappa counts its steps"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized"""
    form: Literal["tanh", "sigmoid", "discrete"] = "tanh"
    """omega; sigmoid: the logistic function of the same argument; discrete: (K + 1 - kappa) / (K + 1), no lambda"""
    shift: Schedule = field(default_factory=lambda: Constant(-1.0))
    """lambda: the larger, the more equal the weights"""
    burn_in: float = 0.5
    """share of training before which all weights are 1; released: 59 of 120 epochs, 0.4917"""
    kappa: Literal["official", "paper"] = "official"
    """official: number of iterates that are classified correctly; paper: number of steps to the first that is not"""
    half: Literal["official", "paper"] = "official"
    """K / 2 for an odd K. official: rounded down; paper: exact"""

    def __post_init__(self) -> None:
        check_plain(self.loss, "GAIRAT")
        least = 2 if self.half == "official" and self.form != "discrete" else 1
        if self.attack.steps < least or self.attack.restarts != 1:
            raise UsageError(
                f"GAIRAT counts the steps of one attempt, at least {least}: use restarts 1 and steps >= {least}, got "
                f"restarts {self.attack.restarts} and steps {self.attack.steps}"
            )
        if not 0 <= self.burn_in < 1:
            raise UsageError(f"burn_in is a share of training in [0, 1), got {self.burn_in:g}: 0.5 is the first half")
        shift = self.shift
        if any(share <= self.burn_in for share in shift.boundaries):
            raise UsageError(
                f"burn_in {self.burn_in:g} covers the first stage of shift, whose boundaries are {shift.boundaries}: "
                "begin the second stage later, or leave the first out"
            )
        if not all(value > -math.inf for value in shift.values_taken()):
            raise UsageError(f"shift (lambda) must be a number, or +inf for AT, got {shift}")

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        kappa, still_correct = torch.zeros_like(batch.y), torch.ones_like(batch.y, dtype=torch.bool)

        def value(logits: Tensor) -> Tensor:
            nonlocal kappa, still_correct
            correct = logits.detach().argmax(1) == batch.y
            still_correct = correct & still_correct if self.kappa == "paper" else correct
            kappa = kappa + still_correct.long()
            return self.attack.loss(logits, batch.y)

        delta = self.attack.maximize(model, batch.x, batch.y, step.generator("attack"), value)
        return Perturbation(delta, {"kappa": kappa})

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor | None:
        if step.progress < self.burn_in:
            return None
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        return self.log_omega(perturbation.values["kappa"].to(dtype), step.progress)

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, values = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        kappa = values["kappa"].to(losses)
        weights = self.weights(kappa, step.progress, step.communicator)
        record = {"kappa": kappa.mean()}
        return Objective((weights * losses).mean(), losses.detach(), weights, logits.detach(), state, record)

    def weights(self, kappa: Tensor, progress: float, communicator: Communicator = SINGLE_PROCESS) -> Tensor:
        """Return the weights, of mean 1 over the batch of all processes."""
        if progress < self.burn_in:
            return torch.ones_like(kappa)
        return mean_one_weights(self.log_omega(kappa, progress), communicator)

    def log_omega(self, kappa: Tensor, progress: float) -> Tensor:
        """Return the logarithm of the weight before normalization."""
        steps = self.attack.steps
        if self.form == "discrete":
            return ((steps + 1 - kappa) / (steps + 1)).log()
        half = steps // 2 if self.half == "official" else steps / 2
        argument = self.shift.at(progress) + 5 * (1 - kappa / half)
        return F.logsigmoid(2 * argument if self.form == "tanh" else argument)  # (1 + tanh a) / 2 = sigmoid(2 a)
