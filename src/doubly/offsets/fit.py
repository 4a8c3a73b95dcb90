"""Class offsets by CID: the bilevel problem whose outer variable is one number per class.

With z the logits, b the offsets (sum b = 0) and delta_i the attack on the shifted network z + b:

    minimize over b   R log mean_c exp(u_c / R),   u = mean_i g_i,
    g_i = (M / M_{y_i}) sigmoid(-margin_i / s) onehot(y_i),   margin_i = (z + b)_y - max_{j != y} (z + b)_j at delta_i.

u_c is a smooth error of class c under attack, since the error itself has no gradient in b. s is `smoothing` times the
spread of the margins. The attack of each image goes on from round to round; between two of them b takes several
steps, which cost nothing, since the logits are the same. For an attack on the margin the implicit
term is 0: away from ties, d margin / d delta is the difference of two slopes of z, in which b does not occur.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from doubly.attacks import model_device
from doubly.attacks.mode import attack_context, connected
from doubly.bilevel import ConjugateGradient, Direction, RunningMean, Terms, cid, projected_descent
from doubly.checks import check_logits
from doubly.data import Images
from doubly.losses import CrossEntropy, LogitMargin, Loss
from doubly.offsets.config import FIRST_ATTACK, RepairConfig
from doubly.offsets.objective import smooth_class_errors, soft_maximum, spread_of_margins
from doubly.seeding import BatchGenerator, Rows, generator
from doubly.threat import Threat

DAMPING = 10.0  # of the barrier's curvature in the implicit term, as in DONE
IMPLICIT_IMAGES = 64  # on which the implicit term is compared with the direct one


@dataclass(frozen=True, eq=False)
class FittedOffsets:
    """What the fit found.

    Attributes:
        offsets: The fitted offsets, (classes,), on the CPU; 0 for classes without images.
        errors: Error of each class under attack before the first and after the last round, (2, classes); NaN without
            images.
        spread: Standard deviation of the logit margins under attack at the start.
        history: Value of the objective at the start and after each round, each time under attack.
        implicit_share: Length of the implicit term relative to the direct one, for an attack on the cross-entropy, at
            the fitted offsets; None if the threat has no barrier.
    """

    offsets: Tensor
    errors: Tensor
    spread: float
    history: list[float] = field(default_factory=list)
    implicit_share: float | None = None


def fit_offsets(
    model: nn.Module,
    images: Images,
    threat: Threat,
    config: RepairConfig,
    on_round: Callable[[int], None] = lambda done: None,
) -> FittedOffsets:
    """Fit class offsets on held-out images.

    Args:
        model: The network; it is left as it was found.
        images: The images.
        threat: What the attacker may do.
        config: The settings; `priority` does not count here.
        on_round: Called after each round with the number of rounds done.

    Raises:
        NonFiniteError: If the network returns NaN or infinity.
    """
    problem = _OffsetProblem(model, images, threat, config)
    logits = problem.attack(FIRST_ATTACK * config.attack_steps)
    problem.spread = spread_of_margins(logits, problem.y)
    optimizer = torch.optim.Adam([problem.theta])
    best, history, first_errors = problem.candidate(logits), [], problem.errors(logits)
    for done in range(config.rounds):
        history.append(problem.candidate(logits).value)
        for step in range(config.steps):
            progress = (done + step / config.steps) / config.rounds
            optimizer.param_groups[0]["lr"] = config.step_size * (1 + math.cos(math.pi * progress)) / 2
            optimizer.zero_grad()
            problem.backward(logits)
            optimizer.step()
        logits = problem.attack(config.attack_steps)
        best = min(best, problem.candidate(logits), key=lambda candidate: candidate.value)
        on_round(done + 1)
    history.append(problem.candidate(logits).value)
    share = problem.implicit_share(best.offsets) if threat.has_barrier else None
    errors = torch.stack([first_errors, best.errors]).cpu()
    return FittedOffsets(best.offsets.cpu(), errors, problem.spread, history, share)


class _Candidate(NamedTuple):
    """Offsets, with the value of the objective and the error of each class under an attack on them."""

    offsets: Tensor
    value: float
    errors: Tensor


class _OffsetProblem:
    """The images with their latest perturbations, and the outer variable theta: offsets in units of the spread."""

    def __init__(self, model: nn.Module, images: Images, threat: Threat, config: RepairConfig) -> None:
        self.model, self.threat, self.config = model, threat, config
        self.device = model_device(model)
        self.images, self.y = images, images.y.to(self.device)
        self.rule = threat.step_rule(threat.radius / 4)
        self.loss: Loss = LogitMargin() if config.fit_on == "margin" else CrossEntropy()
        with self._attacking():
            logits = model(images.pixels(slice(0, 1)).to(self.device))
            check_logits(logits, self.y[:1])
        classes = logits.shape[1]
        self.counts = torch.bincount(self.y, minlength=classes)
        self.present = self.counts > 0
        self.theta = torch.zeros(classes, device=self.device, requires_grad=True)
        self.composition = RunningMean(soft_maximum(config.temperature, self.present), eta=1.0)
        self.attacked_with = torch.zeros(classes, device=self.device)  # offsets during the latest attack
        self.spread = 1.0
        self.delta = [self._start(start, end) for start, end in self._chunks()]

    def offsets(self) -> Tensor:
        """Return b: theta in units of the logits, with mean 0 over the classes that have images and 0 elsewhere."""
        centered = self.theta - self.theta[self.present].mean()
        return self.spread * torch.where(self.present, centered, 0.0)

    def attack(self, steps: int) -> Tensor:
        """Let the attack go on for some steps against the shifted network; returns the shifted logits of all images."""
        logits = []
        self.attacked_with = offsets = self.offsets().detach()
        with self._attacking():
            for index, (start, end) in enumerate(self._chunks()):
                x, y = self._batch(start, end)
                self.delta[index] = self._descend(x, y, self.delta[index], offsets, self.loss, steps)
                with torch.no_grad():
                    logits.append(self.model(x + self.delta[index]) + offsets)
                check_logits(logits[-1], y)
        return torch.cat(logits)

    def candidate(self, logits: Tensor) -> _Candidate:
        """Return the offsets of the latest attack and how good they are; `logits` are what it returned."""
        value = self.composition.value(self._outer(logits, self.y))
        return _Candidate(self.attacked_with, float(value), self.errors(logits))

    def backward(self, logits: Tensor) -> None:
        """Add the CID estimate to the gradient of theta; `logits` are what the latest attack returned."""
        if not self.config.implicit:  # then the network enters by its logits alone
            shift = self.offsets() - self.attacked_with
            direction = cid(lambda _: Terms(self._outer(logits + shift, self.y)), logits, self.composition, {})
            direction.loss.backward()  # type: ignore[no-untyped-call]
            return
        values = self._outer(logits + self.offsets() - self.attacked_with, self.y).detach()
        with self._attacking():
            for index, (start, end) in enumerate(self._chunks()):
                part = self._direction(*self._batch(start, end), self.delta[index], True, values)
                (part.loss * (end - start) / len(self.y)).backward()  # type: ignore[no-untyped-call]

    def errors(self, logits: Tensor) -> Tensor:
        """Return the share of misclassified images of each class, (classes,); NaN for classes without images."""
        wrong = torch.bincount(self.y, (logits.argmax(1) != self.y).double(), minlength=len(self.counts))
        return wrong / torch.where(self.present, self.counts.double(), torch.nan)

    def implicit_share(self, offsets: Tensor) -> float:
        """Return |implicit term| / |direct term| at an attack on the cross-entropy, on a part of the images."""
        end = min(IMPLICIT_IMAGES, len(self.delta[0]))
        x, y = self._batch(0, end)
        with self._attacking():
            delta = self._descend(x, y, self.delta[0][:end], offsets, CrossEntropy(), self.config.attack_steps)
            direct, total = (self._gradient(x, y, delta, implicit) for implicit in (False, True))
        return float((total - direct).norm() / direct.norm().clamp_min(torch.finfo(direct.dtype).tiny))

    def _gradient(self, x: Tensor, y: Tensor, delta: Tensor, implicit: bool) -> Tensor:
        direction = self._direction(x, y, delta, implicit, None)
        return torch.autograd.grad(direction.loss, self.theta)[0]

    def _direction(self, x: Tensor, y: Tensor, delta: Tensor, implicit: bool, values: Tensor | None) -> Direction:
        """Return the CID estimate of some images; `values` are g_i of all images, or None for these alone."""

        def problem(point: Tensor) -> Terms:
            logits = connected(self.model(x + point), point) + self.offsets()
            return Terms(self._outer(logits, y), -CrossEntropy()(logits, y))

        solve: Any = None
        if implicit:
            inverse = self.threat.box(x).inverse_curvature(delta, DAMPING)
            solve = ConjugateGradient(tolerance=None, inverse_diagonal=inverse)
        return cid(problem, delta, self.composition, {}, solve, all_gather=lambda g: g if values is None else values)

    def _outer(self, logits: Tensor, y: Tensor) -> Tensor:
        return smooth_class_errors(logits, y, self.config.smoothing * self.spread, self.counts)

    def _descend(self, x: Tensor, y: Tensor, delta: Tensor, offsets: Tensor, loss: Loss, steps: int) -> Tensor:
        def inner(point: Tensor) -> Tensor:
            return -loss(connected(self.model(x + point), point) + offsets, y)

        return projected_descent(inner, delta, self.threat.around(x), self.rule, steps)

    def _start(self, start: int, end: int) -> Tensor:
        x, _ = self._batch(start, end)
        chunk = start // self.config.chunk_size
        draws = BatchGenerator(generator(self.config.seed, 0, chunk, "repair"), Rows(0, end - start))
        return self.threat.around(x).at(draws.uniform(x))

    def _batch(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self.images.pixels(slice(start, end)).to(self.device), self.y[start:end]

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self.images), self.config.chunk_size):
            yield start, min(start + self.config.chunk_size, len(self.images))

    @contextmanager
    def _attacking(self) -> Iterator[None]:
        with attack_context(self.model, "eval"):
            yield
