"""The protocol of a training method, with its defaults."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from doubly.attacks.attack import Attack
from doubly.bilevel.arguments import check_arguments, show
from doubly.checks import check_batch, check_images, explained_network
from doubly.distributed.microbatch import WholeBatch
from doubly.errors import UsageError
from doubly.settings import Settings
from doubly.threat import Threat
from doubly.types import Batch, Objective, Perturbation, State, TrainStep

DRAWS_CLASSES = "draws classes itself"  # answers of `Method.class_balance`
WEIGHTS_BY_COUNTS = "weights classes by their counts"


class Method(Settings):
    """A way to train: the objective of one batch, and what it remembers between batches.

    A subclass is a frozen dataclass that implements `objective`; everything else has a default.
    """

    attack: Attack | None = None
    """the attack inside, if there is one"""

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """Refuse a threat, or a class, in the place of an attack: the methods themselves would fail less clearly."""
        for value in (*arguments, *settings.values()):
            if isinstance(value, Threat):
                raise UsageError(
                    f"{cls.__name__} takes an attack, got the threat {value}: write {cls.__name__}(PGD({value}))"
                )
            if isinstance(value, type):
                raise UsageError(f"{cls.__name__} got the class {value.__name__}: write {value.__name__}()")
        return super().__new__(cls, *arguments, **settings)

    def __init_subclass__(cls, **settings: Any) -> None:
        """Check what `objective` and `init` are given; a batch may also be a plain pair (x, y)."""
        super().__init_subclass__(**settings)
        if "objective" in vars(cls):
            cls.objective = _checked_objective(cls.objective)  # type: ignore[method-assign]
        if "init" in vars(cls):
            cls.init = _checked_init(cls.init)  # type: ignore[method-assign]

    @property
    def wrapped(self) -> "Method | None":
        """The method inside a wrapper such as AWP."""
        return None

    @property
    def needs_second_derivatives(self) -> bool:
        """Whether the objective differentiates the network twice, which compiled networks do not allow."""
        return False

    @property
    def class_balance(self) -> str | None:
        """What the method does about class sizes itself, as `draws classes itself`; None if nothing.

        It would happen twice if the run drew all classes equally often as well.
        """
        return None

    @property
    def validation_interval(self) -> int | Literal["epoch"] | None:
        """Steps between two calls of `on_validation`; "epoch" for all held-out images after each epoch; None: never."""
        return None

    def init(self, counts: Tensor | None = None) -> State:
        """Return what the method remembers before the first batch.

        Args:
            counts: Number of training images per class, for methods that need it.

        Returns:
            The state that the first call of `objective` takes.

        Raises:
            UsageError: If the method needs `counts` and they are missing.
        """
        return {}

    def sampling(self, state: State, progress: float = 0.0) -> Tensor | None:
        """Return class probabilities to draw the next epoch by, or None for one pass over the data.

        Args:
            state: What the last objective, or `init`, returned.
            progress: Share of training at the beginning of the epoch.

        Returns:
            One probability per class, (classes,), or None.
        """
        return None

    def recorded_state(self, state: State) -> dict[str, float]:
        """Return numbers of the state that the row of metrics of an epoch records, such as DONE's temperature.

        Args:
            state: What the last objective of the epoch returned.

        Returns:
            The numbers by their key in metrics.jsonl.
        """
        return {}

    def scaled(self, factor: float) -> Self:
        """Return the same method with `factor` times the attack's radius, for a warm-up of epsilon."""
        return self if self.attack is None else self.with_attack(self.attack.scaled(factor))

    def with_attack(self, attack: Attack) -> Self:
        """Return the same method with another attack inside.

        Raises:
            TypeError: If the method has no attack.
        """
        return replace(self, attack=attack)  # type: ignore[type-var]  # subclasses are dataclasses

    def costliest(self) -> Self:
        """Return the method at its greatest cost per step, for estimates; FAT's attacks then never stop early."""
        return self

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation | None:
        """Attack the batch.

        Args:
            model: The network, in training mode.
            batch: The images.
            state: What the previous objective, or `init`, returned.
            step: The training step.

        Returns:
            What `objective` takes as `perturbation`; None for a method that attacks inside `objective`, or not at all.
        """
        return None

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor | None:
        """Return the rows that `objective` gathers from the whole batch; None if it gathers nothing.

        Only called for microbatches. It must not change the network's running statistics.

        Args:
            model: The network, in training mode.
            batch: The images.
            state: What the previous objective, or `init`, returned.
            step: The training step.
            perturbation: What `perturb` returned.

        Returns:
            One row per sample, or a single row; None if nothing is shared.
        """
        return None

    def objective(
        self,
        model: nn.Module,
        batch: Batch,
        state: State,
        step: TrainStep,
        perturbation: Perturbation | None = None,
    ) -> Objective:
        """Return the objective of a batch.

        Args:
            model: The network, in training mode.
            batch: The images.
            state: What the previous objective, or `init`, returned.
            step: The training step.
            perturbation: What `perturb` returned; computed if not given.

        Returns:
            The loss to differentiate, what is recorded of each sample, and the new state.

        Raises:
            UsageError: If images, labels and logits do not fit each other.
            NonFiniteError: If the network returns NaN or infinity.
        """
        raise NotImplementedError

    def on_validation(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> State:
        """Learn from held-out images, which the method attacks itself.

        Only called if `validation_interval` is not None. The images are those of the hold-out that validation does not
        use, without augmentation. What depends on all of them goes through `step.communicator.all_gather`. Calls with
        the same epoch and step are microbatches of one batch.

        Args:
            model: The network, in evaluation mode.
            batch: The held-out images of this process.
            state: What the last objective returned.
            step: Where training stands; its "validation" generator is there for the attack.

        Returns:
            The state that the next call takes.
        """
        return state

    def microbatch_objectives(
        self,
        model: nn.Module,
        parts: Sequence[Batch],
        state: State,
        steps: Sequence[TrainStep],
        perturbations: Sequence[Perturbation | None] | None = None,
    ) -> Iterator[Objective]:
        """Yield the objectives of the parts of one batch, with the weights of the whole batch.

        There are two phases: first the attacks and the shared values of every part, then the objective of one part
        after the other. The caller differentiates each objective before it asks for the next, so that only one part's
        graph is in memory.

        Args:
            model: The network, in training mode.
            parts: The microbatches of this process.
            state: The state before the batch.
            steps: The training step of each part, with its rows and stream.
            perturbations: What `perturb` returned for each part; computed if not given.

        Yields:
            The objective of each part; their losses, weighted by the number of images, add up to that of the batch.
        """
        if perturbations is None:
            perturbations = perturb_parts(self, model, parts, state, steps)
        if len(parts) > 1:
            steps = self._with_shared_values(model, parts, state, steps, perturbations)
        for part, step, perturbation in zip(parts, steps, perturbations, strict=True):
            with step.network_rng():
                objective = compute_objective(self, model, part, state, step, perturbation)
            yield objective

    def _with_shared_values(
        self,
        model: nn.Module,
        parts: Sequence[Batch],
        state: State,
        steps: Sequence[TrainStep],
        perturbations: Sequence[Perturbation | None],
    ) -> Sequence[TrainStep]:
        """Return the steps with communicators that know the shared values of the whole batch."""
        values = []
        for part, step, perturbation in zip(parts, steps, perturbations, strict=True):
            if perturbation is None:
                return steps
            with step.network_rng():
                values.append(self.shared_values(model, part, state, step, perturbation))
        tensors = [value for value in values if value is not None]
        if not tensors:
            return steps
        all_values = steps[0].communicator.all_gather(torch.cat(tensors))
        return [step._replace(communicator=WholeBatch(all_values)) for step in steps]


class MethodWrapper:
    """What a method around another one, its field `method`, takes over from it; a mixin in front of `Method`."""

    method: Method

    @property
    def attack(self) -> Attack | None:
        return self.method.attack

    @property
    def wrapped(self) -> Method | None:
        return self.method

    @property
    def needs_second_derivatives(self) -> bool:
        return self.method.needs_second_derivatives

    @property
    def class_balance(self) -> str | None:
        return self.method.class_balance

    @property
    def validation_interval(self) -> int | Literal["epoch"] | None:
        return self.method.validation_interval

    def init(self, counts: Tensor | None = None) -> State:
        return self.method.init(counts)

    def sampling(self, state: State, progress: float = 0.0) -> Tensor | None:
        return self.method.sampling(state, progress)

    def recorded_state(self, state: State) -> dict[str, float]:
        return self.method.recorded_state(state)

    def with_attack(self, attack: Attack) -> Self:
        return replace(self, method=self.method.with_attack(attack))  # type: ignore[type-var]  # a dataclass

    def costliest(self) -> Self:
        return replace(self, method=self.method.costliest())  # type: ignore[type-var]

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation | None:
        return self.method.perturb(model, batch, state, step)

    def on_validation(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> State:
        return self.method.on_validation(model, batch, state, step)


def _checked_objective(objective: Callable[..., Objective]) -> Callable[..., Objective]:
    """Return the method `objective` with a batch that may be a pair of tensors, and with checks of its arguments."""

    @wraps(objective)
    def checked(
        self: Method, model: nn.Module, batch: Any, state: State, step: TrainStep, *arguments: Any, **settings: Any
    ) -> Objective:
        batch = _as_batch(batch)
        given = {"model": model, "state": state, "step": step}
        check_arguments(Method.objective, given, UsageError)
        with explained_network(model, batch.x, batch.y):
            try:
                return objective(self, model, batch, state, step, *arguments, **settings)
            except KeyError as error:
                if error.args[0] in state:
                    raise
                raise UsageError(
                    f"the state of {type(self).__name__} has no {error}: pass what init(images.counts()) or the "
                    "previous objective returned"
                ) from error

    return checked


def _as_batch(batch: Any) -> Batch:
    """Return a batch, or a pair (x, y), as a batch that was checked; the pixels of a `Batch` are not looked at."""
    if not isinstance(batch, Batch):
        if not isinstance(batch, tuple | list) or not 2 <= len(batch) <= 3:
            raise UsageError(
                f"a batch is Batch(x, y) or a pair (x, y), got {type(batch).__name__}: pass images and labels"
            )
        check_images(batch[0], batch[1])
    x, y, ids = checked = Batch(*batch)
    check_batch(x, y)
    count = len(x)
    if not isinstance(ids, Tensor) or ids.dtype is not torch.int64 or ids.numel() not in (0, count) or ids.is_meta:
        raise UsageError(f"ids must be {count} positions, int64, or left out, got {show(ids)}")
    return checked


def _checked_init(init: Callable[..., State]) -> Callable[..., State]:
    """Return the method `init` with a check of the counts."""

    @wraps(init)
    def checked(self: Method, counts: Tensor | None = None) -> State:
        if counts is not None and not (
            isinstance(counts, Tensor)
            and counts.dim() == 1
            and counts.numel()
            and not (counts.is_complex() or counts.is_meta or counts.dtype is torch.bool)
            and counts.layout is torch.strided
            and bool((counts >= 0).all() and torch.isfinite(counts).all() and counts.sum() > 0)
        ):
            raise UsageError(
                f"counts are the training images per class, a tensor (classes,) of numbers from 0 on, got "
                f"{show(counts)}: pass images.counts()"
            )
        return init(self, counts)

    return checked


def check_attack(attack: Any, owner: str) -> None:
    """Refuse what is no attack, for methods that work with any attack whatever their annotation says.

    Raises:
        UsageError: If it is none.
    """
    if not isinstance(attack, Attack):
        raise UsageError(f"{owner} takes an attack, got {show(attack)}: write {owner}(PGD())")


def require_counts(counts: Tensor | None, name: str) -> Tensor:
    """Return the training images per class that a method was given.

    Args:
        counts: The images per class, or None.
        name: What needs them, as the message calls it.

    Raises:
        UsageError: If they are missing.
    """
    if counts is None:
        raise UsageError(f"{name} needs the training images per class: init(images.counts())")
    return counts


def implicit_precision(implicit: str, x: Tensor) -> AbstractContextManager[object]:
    """Switch autocast off inside where there is an implicit term, which drowns in half precision."""
    return nullcontext() if implicit == "none" else torch.autocast(x.device.type, enabled=False)


def perturb_parts(
    method: Method, model: nn.Module, parts: Sequence[Batch], state: State, steps: Sequence[TrainStep]
) -> list[Perturbation | None]:
    """Attack each part of a batch, with the random numbers of its step."""
    perturbations = []
    for part, step in zip(parts, steps, strict=True):
        with step.network_rng():
            perturbations.append(method.perturb(model, part, state, step))
    return perturbations


def compute_objective(
    method: Method, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None
) -> Objective:
    """Call `method.objective`; a method that attacks inside `objective` need not have its last parameter."""
    if perturbation is None:
        return method.objective(model, batch, state, step)
    return method.objective(model, batch, state, step, perturbation)
