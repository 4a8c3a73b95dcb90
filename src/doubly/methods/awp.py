"""AWP, adversarial weight perturbation (Wu, Xia and Wang 2020): any method, at the worst weights nearby.

    delta   the wrapped method's attack, at the weights w as they are, once
    g       gradient in w of the wrapped objective at delta
    v       gamma |w| / (|g| + 1e-20) g for each tensor with more than one dimension and "weight" in its name, else 0
    update  the gradient of the wrapped objective at w + v, v constant, applied to w

Released code gets g from one SGD step of a proxy, whose length cancels: the same v. Its optimizer steps from w + v, and
then v is subtracted, so weight decay acts on w + v; here it acts on w, a difference of gamma times the decay. As there,
batch norm's statistics are updated by the pass at w + v; the losses, weights, logits and state are those at w + v too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from doubly.attacks import frozen_statistics
from doubly.errors import UsageError
from doubly.methods.at import AT
from doubly.methods.method import Method, MethodWrapper, perturb_parts
from doubly.types import Batch, Objective, Perturbation, State, TrainStep

LOSS_SCALE = 1024.0  # in fp16 the gradient of a mean would vanish


@dataclass(frozen=True)
class AWP(MethodWrapper, Method):  # type: ignore[override]  # attack is a property
    """Another method, at adversarially perturbed weights.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    method: Method = field(default_factory=AT)
    """what is trained"""
    gamma: float = 0.01
    """length of the perturbation of a tensor, relative to the tensor (AT 0.01, TRADES 0.005); 0 is the method itself"""
    warm_up: float = 0.0
    """share of training before the first perturbation"""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < float("inf"):
            raise UsageError(f"gamma is a share of the weights' length and not negative, got {self.gamma:g}: try 0.01")
        if not 0 <= self.warm_up < 1:
            raise UsageError(f"warm_up is a share of training in [0, 1), got {self.warm_up:g}")
        if isinstance(self.method, AWP):
            raise UsageError("AWP around AWP perturbs the same weights twice: wrap the method inside it, once")

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        return next(self.microbatch_objectives(model, [batch], state, [step], [perturbation] if perturbation else None))

    def microbatch_objectives(
        self,
        model: nn.Module,
        parts: Sequence[Batch],
        state: State,
        steps: Sequence[TrainStep],
        perturbations: Sequence[Perturbation | None] | None = None,
    ) -> Iterator[Objective]:
        """Yield the objectives at w + v; v follows from the gradient of the whole batch at w."""
        perturbations = perturbations or perturb_parts(self.method, model, parts, state, steps)
        if self.gamma == 0 or steps[0].progress < self.warm_up:
            yield from self.method.microbatch_objectives(model, parts, state, steps, perturbations)
            return
        with frozen_statistics(model):
            at_w = self.method.microbatch_objectives(model, parts, state, steps, perturbations)
            loss_at_w, gradients = self._batch_gradient(model, at_w, sum(len(part.y) for part in parts))
        gradients = dict(zip(gradients, steps[0].communicator.mean(list(gradients.values())), strict=True))
        perturbed = _PerturbedModel(model, self.perturbation(model, gradients))
        for objective in self.method.microbatch_objectives(perturbed, parts, state, steps, perturbations):
            rise = (objective.loss - loss_at_w).detach()
            yield replace(objective, record={**objective.record, "awp_rise": rise})

    def _batch_gradient(
        self, model: nn.Module, objectives: Iterator[Objective], count: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the gradient of the weights that are perturbed, summed up over the microbatches."""
        weights = perturbed_weights(model)
        total_loss, totals = torch.zeros(()), [torch.zeros(())] * len(weights)
        for objective in objectives:
            share = len(objective.sample_losses) / count
            scale = torch.full_like(objective.loss, LOSS_SCALE)
            gradients = torch.autograd.grad(objective.loss, list(weights.values()), scale, materialize_grads=True)
            totals = [
                gradient / scale if share == 1 else total.to(gradient) + share * gradient / scale
                for total, gradient in zip(totals, gradients, strict=True)
            ]
            total_loss = total_loss.to(objective.loss) + share * objective.loss.detach()
        return total_loss, dict(zip(weights, totals, strict=True))

    def perturbation(self, model: nn.Module, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return v by the parameter's name, from the gradients of the whole batch."""
        weights = perturbed_weights(model)
        return {
            name: self.gamma * weights[name].detach().norm() / (gradient.norm() + 1e-20) * gradient
            for name, gradient in gradients.items()
        }


def perturbed_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that AWP perturbs, by name.

    Raises:
        UsageError: If there is none.
    """
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1 and "weight" in n}
    if not weights:
        raise UsageError(
            'AWP perturbs trained tensors with more than one dimension and "weight" in their name, and the model '
            "has none: name them so, or train without AWP"
        )
    return weights


class _PerturbedModel(nn.Module):
    """The model at w + v. Its modules and parameters are the model's, so modes and gradients reach those."""

    def __init__(self, model: nn.Module, shifts: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.shifts, self.training = model, shifts, model.training

    def forward(self, x: Tensor) -> Any:
        parameters = dict(self.model.named_parameters())
        shifted = {name: parameters[name] + shift for name, shift in self.shifts.items()}
        return functional_call(self.model, shifted, (x,))
