"""Any method as the loss of a Hugging Face Trainer. Needs transformers and accelerate."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from doubly.bridges.logger import require
from doubly.bridges.loops import MethodLoss, position
from doubly.errors import UsageError
from doubly.methods import Method
from doubly.models.adapt import AdaptedModel, Statistics, normalization

require("transformers", "the Trainer", "transformers")
require("accelerate", "the Trainer", "transformers")
import transformers  # noqa: E402 - after the check, which says what to install


class RobustTrainer(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose training loss is that of a method of doubly.

    Batches have `pixel_values`, images in [0, 1], and `labels`; `ids` too for methods that remember samples, with
    `remove_unused_columns=False`. A network that expects normalized images gets them by `mean` and `std`, which are
    applied inside, after the attack; do not normalize in the image processor as well.
    """

    def __init__(
        self,
        *arguments: Any,
        method: Method | str,
        mean: Statistics | None = None,
        std: Statistics | None = None,
        method_settings: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Make a Trainer.

        Args:
            *arguments: Those of `transformers.Trainer`.
            method: A method, such as `DONE(PGD(LinfBall(8 / 255)))`, or a name.
            mean: Mean of the channels, if the network expects normalized images.
            std: Standard deviation of the channels.
            method_settings: Further arguments of `MethodLoss`: counts, threat, images, seed.
            **settings: Those of `transformers.Trainer`.

        Raises:
            UsageError: If the method does not fit.
        """
        self.robust_loss = MethodLoss(method, **(method_settings or {}))
        self.mean, self.std = mean, std
        super().__init__(*arguments, **settings)
        self.model_accepts_loss_kwargs = False  # the loss is a mean: the Trainer divides by the accumulated batches

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of the method in training, that of the network in evaluation.

        Args:
            model: The network.
            inputs: The batch.
            return_outputs: Whether to return the outputs as well.
            num_items_in_batch: Not used.

        Raises:
            UsageError: If the batch lacks images or labels, or images are not in [0, 1].
        """
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        if self.args.world_size > 1:
            raise UsageError("several processes would weight each part alone: use torchrun -m doubly train")
        x, y = _images_and_labels(inputs)
        network = self._adapted(model, x)
        step = position(self.state.global_step, self.state.max_steps)
        loss = self.robust_loss(network, x, y, inputs.get("ids"), step)
        assert self.robust_loss.last is not None
        return (loss, {"logits": self.robust_loss.last.logits}) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Predict a batch as the Trainer does, with `inputs` normalized; the other arguments are the Trainer's."""
        x, _ = _images_and_labels(inputs)
        inputs = {**inputs, "pixel_values": self._adapted(model, x).normalize(x)}
        inputs.pop("ids", None)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _adapted(self, model: Any, x: Tensor) -> AdaptedModel:
        """Return the network as one from images in [0, 1] to logits; it shares the weights."""
        statistics = normalization(self.mean, self.std, x.shape[1])
        return (AdaptedModel(model) if statistics is None else AdaptedModel(model, *statistics)).to(x.device)


def _images_and_labels(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    if missing := [name for name in ("pixel_values", "labels") if not torch.is_tensor(inputs.get(name))]:
        raise UsageError(f"the batch has no {' and no '.join(missing)}: it has {', '.join(inputs)}")
    x: Tensor = inputs["pixel_values"]
    if x.min() < 0 or x.max() > 1:
        raise UsageError(
            f"pixel_values run from {float(x.min()):.3g} to {float(x.max()):.3g}, and attacks need pixels in [0, 1]: "
            "turn off do_normalize of the image processor, and pass mean and std to RobustTrainer"
        )
    return x, inputs["labels"]
