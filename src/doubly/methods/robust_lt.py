"""RobustLT (2026): any method, with wider attacks on classes that have few images.

    epsilon_c = epsilon (1 - alpha + alpha h_c / mean h),   h_c = sqrt(log(n_max / n_c)),   step sizes alike

n_c is the number of training images of the class, and the mean of h is over all images, so that the mean radius of an
image is epsilon. alpha grows linearly from 0 during the first `ramp` of training. With classes of equal size, and with
alpha = 0, this is the method itself.

What differs: a class that has few images next to very large ones would be attacked within many epsilon; `limit` bounds
the factor. A class without images keeps epsilon. The method inside needs an attack whose radius can depend on the
class, PGD. Around a method with class radii of its own, such as DAFA or CFA, the factors multiply.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from doubly.errors import UsageError
from doubly.methods.at import AT
from doubly.methods.method import Method, MethodWrapper, compute_objective, require_counts
from doubly.types import Batch, Objective, Perturbation, State, TrainStep

FACTORS = "robust_lt_factors"  # in the state, beside the entries of the method inside


@dataclass(frozen=True)
class RobustLT(MethodWrapper, Method):  # type: ignore[override]  # attack is a property
    """Another method, with radii that grow as a class has fewer images.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    method: Method = field(default_factory=AT)
    """what is trained"""
    alpha: float = 0.3
    """how much of the radius depends on the class; 0 is the method itself"""
    ramp: float = 0.8
    """share of training over which alpha grows to its value"""
    limit: float = 3.0
    """largest factor of the radius of a class"""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise UsageError(
                f"alpha is the share of the radius that classes change, in [0, 1), got {self.alpha:g}: try 0.3"
            )
        if not 0 <= self.ramp < 1:
            raise UsageError(f"ramp is a share of training in [0, 1), got {self.ramp:g}: published is 0.8")
        if not 1 <= self.limit < float("inf"):
            raise UsageError(f"limit bounds the factor of a radius, a number from 1 on, got {self.limit:g}: try 3")
        if self.method.attack is None:
            raise UsageError(
                f"RobustLT changes the radius of an attack, and {type(self.method).__name__} has none: wrap AT"
            )
        if isinstance(self.method, RobustLT):
            raise UsageError("RobustLT around RobustLT scales the same radii twice: wrap the method inside it, once")
        self.method.attack.with_class_factors(torch.ones(1))

    def on_validation(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> State:
        """Let the method inside learn from held-out images, attacked within the same radius in all classes."""
        return {**self.method.on_validation(model, batch, _inner(state), step), FACTORS: state[FACTORS]}

    def recorded_state(self, state: State) -> dict[str, float]:
        return self.method.recorded_state(_inner(state))

    def init(self, counts: Tensor | None = None) -> State:
        counts = require_counts(counts, "RobustLT")
        return {**self.method.init(counts), FACTORS: self.class_factors(counts)}

    def sampling(self, state: State, progress: float = 0.0) -> Tensor | None:
        return self.method.sampling(_inner(state), progress)

    def class_factors(self, counts: Tensor) -> Tensor:
        """Return epsilon_c / epsilon at the end of the ramp, (classes,), from the training images per class."""
        shares = counts.double() / counts.sum()
        heights = (counts.max() / counts.double().clamp_min(1)).log().sqrt() * (counts > 0)
        mean = (shares * heights).sum()
        if mean == 0:
            return torch.ones_like(shares)
        factors = (1 - self.alpha + self.alpha * heights / mean).clamp_max(self.limit)
        return torch.where(counts > 0, factors, 1.0)

    def at_step(self, state: State, step: TrainStep) -> Method:
        """Return the method inside with the radii of this step."""
        share = min(1.0, step.progress / self.ramp) if self.ramp > 0 else 1.0
        factors = 1 + share * (state[FACTORS] - 1)
        attack = self.method.attack
        assert attack is not None  # refused at the beginning
        return self.method.with_attack(attack.with_class_factors(factors))

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation | None:
        return self.at_step(state, step).perturb(model, batch, _inner(state), step)

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor | None:
        return self.at_step(state, step).shared_values(model, batch, _inner(state), step, perturbation)

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        method = self.at_step(state, step)
        return _outer(compute_objective(method, model, batch, _inner(state), step, perturbation), state)

    def microbatch_objectives(
        self,
        model: nn.Module,
        parts: Sequence[Batch],
        state: State,
        steps: Sequence[TrainStep],
        perturbations: Sequence[Perturbation | None] | None = None,
    ) -> Iterator[Objective]:
        """Yield the objectives of the method inside."""
        method = self.at_step(state, steps[0])
        for objective in method.microbatch_objectives(model, parts, _inner(state), steps, perturbations):
            yield _outer(objective, state)


def _inner(state: State) -> State:
    """Return the state of the method inside."""
    return {key: value for key, value in state.items() if key != FACTORS}


def _outer(objective: Objective, state: State) -> Objective:
    return replace(objective, state={**objective.state, FACTORS: state[FACTORS]})
