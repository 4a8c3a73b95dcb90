"""A method inside somebody else's training loop: it keeps the method's state, and knows where training stands."""

from typing import Any

import torch
from torch import Tensor, nn

from doubly.bilevel.arguments import check_arguments
from doubly.errors import UsageError
from doubly.methods import Method
from doubly.recipes.methods import method_by_name
from doubly.threat import LinfBall, Threat
from doubly.types import Batch, Objective, State, TrainStep


class MethodLoss:
    """The loss of a method, for a loop that asks for a loss per batch.

    Attributes:
        method: The method.
        state: What it remembers; a checkpoint should keep it, as `state_dict` returns it.
        last: The objective of the last batch, with losses and weights per sample.
    """

    def __init__(
        self,
        method: Method | str,
        counts: Tensor | None = None,
        threat: Threat | None = None,
        images: int = 50_000,
        seed: int = 0,
    ) -> None:
        """Start the method.

        Args:
            method: A method, or a name such as "done_pgd".
            counts: Training images per class, for methods that need them.
            threat: What the attacker may do, for a method given by name; `LinfBall()` by default.
            images: Number of training images, for a method given by name.
            seed: Seed of the random numbers of the attacks.

        Raises:
            UsageError: If there is no such method, it needs counts, or it learns from held-out images, which a loop of
                your own does not hand it.
        """
        check_arguments(MethodLoss.__init__, {"counts": counts, "threat": threat, "images": images}, UsageError)
        if isinstance(method, str):
            method = method_by_name(method, threat or LinfBall(), images)
        elif not isinstance(method, Method):
            raise UsageError(f"the method is one of doubly, such as DONE(), or a name, got {type(method).__name__}")
        if method.validation_interval is not None or method.sampling(method.init(counts)) is not None:
            raise UsageError(
                f"{type(method).__name__} needs held-out images or draws classes itself, which only doubly's own loop "
                "does: call doubly.train, or take another method"
            )
        self.method, self.seed, self.state = method, seed, method.init(counts)
        self.last: Objective | None = None

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, ids: Tensor | None = None, step: TrainStep | None = None
    ) -> Tensor:
        """Return the loss to differentiate.

        Args:
            model: From images in [0, 1] to logits, in training mode.
            x: Images in [0, 1], (N, C, H, W).
            y: Labels, (N,).
            ids: Positions in the dataset, for methods that remember samples.
            step: Where training stands.
        """
        batch = Batch(x, y) if ids is None else Batch(x, y, ids)
        where = (step or TrainStep())._replace(seed=self.seed)
        self.last = self.method.objective(model, batch, self.state, where)
        self.state = self.last.state
        return self.last.loss

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the method remembers, for a checkpoint."""
        return {name: value.detach().clone() for name, value in self.state.items()}

    def load_state_dict(self, state: State) -> None:
        """Continue with a `state` that `state_dict` returned."""
        self.state = dict(state)


def position(step: int, steps: Any) -> TrainStep:
    """Return where training stands.

    Args:
        step: Number of the step since the beginning.
        steps: Number of all steps; where it is not known, training counts as just begun.
    """
    known = isinstance(steps, int | float) and 0 < steps < float("inf")
    return TrainStep(0, step, min(step / steps, 1 - 1e-9) if known else 0.0)


def split_batch(batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return images, labels and positions of a batch (x, y) or (x, y, ids).

    Raises:
        UsageError: If it is something else.
    """
    if not isinstance(batch, list | tuple) or not 2 <= len(batch) <= 3 or not all(map(torch.is_tensor, batch)):
        raise UsageError(f"a batch is (images, labels) or (images, labels, ids), got {type(batch).__name__}")
    return batch[0], batch[1], batch[2] if len(batch) == 3 else None
