"""Optimizers by name: settings that build a torch optimizer."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import nn

from doubly.errors import UsageError
from doubly.schedules import Cyclic, Schedule
from doubly.settings import Settings

T = TypeVar("T", bound=torch.optim.Optimizer)
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
FACTORY_EXAMPLE = "optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"


def light(kind: type[T]) -> type[T]:
    """Return an optimizer class that does the same without importing torch's compiler, which takes over a second.

    torch wraps these functions so that the compiler leaves them alone; we call what is inside the wrappers.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict", "step")
    inside = {name: getattr(getattr(kind, name), "__wrapped__", getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**inside, "step": torch.no_grad()(inside["step"])})


class OptimizerConfig(Settings):
    """Settings of an optimizer; a subclass is a frozen dataclass and one line in OPTIMIZERS."""

    lr: Schedule | None
    """learning rate over training; None leaves it to the optimizer"""
    clip: float | None
    """largest norm of the gradient; None does not clip"""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return a new optimizer of these parameters."""
        raise NotImplementedError

    def learning_rate(self, optimizer: torch.optim.Optimizer, progress: float) -> float:
        """Return the learning rate at a share of training; the optimizer's own if there is no schedule."""
        return float(optimizer.param_groups[0]["lr"]) if self.lr is None else self.lr.at(progress)

    def with_peak(self, value: float) -> Self:
        """Return the same settings with `value` as the highest learning rate of the schedule.

        Raises:
            UsageError: If there is no schedule, or the value is negative.
        """
        if self.lr is None:
            raise UsageError("the optimizer of this run sets its own learning rate: change it where it is made")
        return replace(self, lr=self.lr.with_peak(value))  # type: ignore[type-var]  # subclasses are dataclasses

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, progress: float) -> None:
        """Set the learning rate of every parameter group to that at a share of training."""
        if self.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.lr.at(progress)


def _check(config: Any) -> None:
    """Refuse settings that no optimizer takes."""
    if not config.weight_decay >= 0:
        raise UsageError(f"weight_decay must not be negative, got {config.weight_decay}")
    if not all(config.lr.at(percent / 100) >= 0 for percent in range(100)):
        raise UsageError(f"a learning rate must not be negative, got {config.lr}")
    if config.clip is not None and not config.clip > 0:
        raise UsageError(f"clip must be above 0, or none for no clipping, got {config.clip}")


@dataclass(frozen=True)
class SGD(OptimizerConfig):
    """Stochastic gradient descent with momentum.

    Raises:
        UsageError: If a number is out of range.
    """

    lr: Schedule = field(default_factory=Cyclic)
    """learning rate, set in every step"""
    momentum: float = 0.9
    """share of the previous step that is kept"""
    weight_decay: float = 5e-4
    """L2 penalty on all parameters"""
    clip: float | None = None
    """largest norm of the gradient; none does not clip"""

    def __post_init__(self) -> None:
        _check(self)
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum must lie in [0, 1), got {self.momentum}")

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return light(torch.optim.SGD)(
            list(parameters), lr=self.lr.at(0.0), momentum=self.momentum, weight_decay=self.weight_decay
        )


@dataclass(frozen=True)
class Adam(OptimizerConfig):
    """Adam, with the weight decay as an L2 penalty.

    Raises:
        UsageError: If a number is out of range.
    """

    lr: Schedule = field(default_factory=lambda: Cyclic(1e-3))
    """learning rate, set in every step"""
    betas: tuple[float, float] = (0.9, 0.999)
    """decay of the running averages of the gradient and of its square"""
    weight_decay: float = 0.0
    """L2 penalty on all parameters"""
    clip: float | None = None
    """largest norm of the gradient; none does not clip"""

    def __post_init__(self) -> None:
        _check(self)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"betas must be two numbers in [0, 1), got {self.betas}")

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = light(torch.optim.Adam)
        return optimizer(list(parameters), lr=self.lr.at(0.0), betas=self.betas, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    weight_decay: float = 1e-2
    """decay of the parameters in each step, times the learning rate"""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = light(torch.optim.AdamW)
        return optimizer(list(parameters), lr=self.lr.at(0.0), betas=self.betas, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class InMemoryOptimizer(OptimizerConfig):
    """An optimizer handed in from Python, as a function from parameters to a torch optimizer."""

    factory: Factory | None = None
    """returns the optimizer of a list of parameters; none in a saved run"""
    lr: Schedule | None = None
    """learning rate, set in every step; none leaves it to the optimizer"""
    clip: float | None = None
    """largest norm of the gradient; none does not clip"""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.factory is None:
            raise UsageError(
                "this run was trained with an optimizer that was handed in from Python: resume it from Python, with "
                "the same optimizer"
            )
        optimizer = self.factory(list(parameters))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"optimizer must return a torch optimizer, got {type(optimizer).__name__}: write {FACTORY_EXAMPLE}"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__} computes the loss several times in a step, but training computes it once: "
                "use an optimizer whose step needs no closure, such as SGD or Adam"
            )
        return optimizer


def as_optimizer_config(optimizer: OptimizerConfig | Factory) -> OptimizerConfig:
    """Return an optimizer handed in from Python as settings of a run.

    Args:
        optimizer: Settings, which are returned as they are; or a function from a list of parameters to a torch
            optimizer.

    Raises:
        UsageError: If it is neither, such as an optimizer that was already made.
    """
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    if not callable(optimizer):
        raise UsageError(
            f"optimizer must be settings or a function, got {type(optimizer).__name__}: write {FACTORY_EXAMPLE}, or "
            "optimizer=doubly.config.AdamW()"
        )
    return InMemoryOptimizer(optimizer)


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
