"""Any method as a LightningModule, and a callback that measures robustness on every class. Needs lightning."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from doubly.bridges.logger import require
from doubly.bridges.loops import MethodLoss, position, split_batch
from doubly.data.convert import AnyImages
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.result import EvalResult
from doubly.methods import Method
from doubly.threat import Threat

require("lightning", "Lightning", "lightning")
import lightning.pytorch as pl  # noqa: E402 - after the check, which says what to install

STATE = "doubly_method_state"


class RobustModule(pl.LightningModule):  # type: ignore[misc]
    """Trains a network by a method of doubly in Lightning's loop.

    Batches are (images, labels) or (images, labels, ids), with images in [0, 1]. It logs `train_loss`, the loss of the
    method, and `train_accuracy`, on the attacked images. Checkpoints of Lightning keep the method's state.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method | str,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        **settings: Any,
    ) -> None:
        """Wrap a network.

        Args:
            model: From images in [0, 1] to logits.
            method: A method, such as `DONE(PGD(LinfBall(8 / 255)))`, or a name.
            optimizer: From parameters to an optimizer; Adam with 1e-3 by default. Override `configure_optimizers` for
                schedules.
            **settings: Further arguments of `MethodLoss`: counts, threat, images, seed.

        Raises:
            UsageError: If the method does not fit.
        """
        super().__init__()
        self.model, self.loss = model, MethodLoss(method, **settings)
        self.make_optimizer = optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=1e-3))

    def forward(self, x: Tensor) -> Any:
        return self.model(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return self.make_optimizer(self.model.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a `batch`; `batch_idx` is its number."""
        if self.trainer.world_size > 1:
            raise UsageError(
                "Lightning with several processes would weight each part alone: use torchrun -m doubly train"
            )
        x, y, ids = split_batch(batch)
        step = position(self.global_step, self.trainer.estimated_stepping_batches)
        loss = self.loss(self.model, x, y, ids, step)
        assert self.loss.last is not None
        self.log("train_loss", loss.detach(), prog_bar=True)
        self.log("train_accuracy", (self.loss.last.logits.argmax(1) == y).float().mean(), prog_bar=True)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the method's state into a `checkpoint`."""
        checkpoint[STATE] = self.loss.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the method's state from a `checkpoint`."""
        self.loss.load_state_dict(checkpoint.get(STATE, {}))


class RobustAccuracy(pl.Callback):  # type: ignore[misc]
    """Measures any LightningModule that maps images to logits, clean and under attack, and logs it.

    It logs `sa`, `ra_pgd` and `ra_tail_30`; `result` keeps the whole of the last evaluation, with every class.
    """

    def __init__(self, data: AnyImages, threat: Threat | None = None, every: int = 10, **settings: Any) -> None:
        """Keep what to measure.

        Args:
            data: Held-out images in [0, 1] with labels.
            threat: What the attacker may do.
            every: Epochs between two evaluations; the last epoch always has one.
            **settings: Further arguments of `doubly.evaluate`.

        Raises:
            UsageError: If `every` is below 1.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"every is a number of epochs from 1 on, got {every!r:.40}")
        self.data, self.threat, self.every = data, threat, every
        self.settings = {"attacks": ("pgd",), "trust": False, **settings}
        self.result: EvalResult | None = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate after an epoch of the `trainer` if it is time to; `pl_module` is the network."""
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if not last and (trainer.current_epoch + 1) % self.every:
            return
        self.result = evaluate(pl_module, self.data, self.threat, **self.settings)
        for name in ("sa", "ra_pgd", "ra_tail_30"):
            pl_module.log(name, getattr(self.result, name))
