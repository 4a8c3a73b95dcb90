"""AWP, adversarial weight perturbation (Wu, Xia and Wang 2020): any method, at the worst weights nearby.

delta   the wrapped method's attack, at the weights w as they are, once
g       gradient in w of the wrapped objective at delta
v       gamma |w| / (|g| + 1e-20) g for each tensor with more than one dimension and "weight" in its name, else 0
update  the gradient of the wrapped objective at w + v, v constant, applied to w

Released code gets g from one SGD step of a proxy, whose length cancels: the same v. Its optimizer steps from w + v, and
then v is taken off, so weight decay acts on w + v; here it acts on w, a difference of gamma times the decay. As there,
batch norm remembers the pass at w + v; the losses, weights, logits and state handed out are those at w + v too.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from doubly.attacks import CachedAttack, draws, repeating, statistics_frozen
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.methods.at import AT
from doubly.types import Batch, Method, Objective, State, TrainStep


@dataclass(frozen=True)
class AWP:
    """Another method, at adversarially perturbed weights."""

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

    @property
    def differentiates_twice(self) -> bool:
        return getattr(self.method, "differentiates_twice", False)

    def init(self, counts: Tensor | None = None) -> State:
        return self.method.init(counts)

    def sampling(self, state: State) -> Tensor | None:
        return self.method.sampling(state)

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        if self.gamma == 0 or step.progress < self.warm_up:
            return self.method.objective(model, batch, state, step)
        method: Any = self.method
        attack = CachedAttack(getattr(method, "attack", None))
        if attack.attack is not None:
            method = replace(method, attack=attack)
        with statistics_frozen(model), repeating(draws()):  # dropout draws the same in both passes
            here = method.objective(model, batch, state, step)
        moved = _Moved(model, self.perturbation(model, here.loss))
        attack.again()
        there: Objective = method.objective(moved, batch, state, step)
        rise = (there.loss - here.loss).detach()
        return replace(there, record={**there.record, "awp_rise": rise})

    def perturbation(self, model: nn.Module, scalar: Tensor) -> dict[str, Tensor]:
        """v, by the parameter's name; from the gradient over all processes."""
        weights = {n: p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1 and "weight" in n}
        if not weights:
            raise UsageError(
                'AWP perturbs trained tensors with more than one dimension and "weight" in their name, and the model '
                "has none: name them so, or train without AWP"
            )
        scale = torch.full_like(scalar, 1024)  # in fp16 the gradient of a mean would vanish
        gradients = torch.autograd.grad(scalar, list(weights.values()), scale, materialize_grads=True)
        found = {}
        for (name, weight), gradient in zip(
            weights.items(), parallel.mean([own / scale for own in gradients]), strict=True
        ):
            found[name] = self.gamma * weight.detach().norm() / (gradient.norm() + 1e-20) * gradient
        return found


class _Moved(nn.Module):
    """The model at w + v. Its modules and parameters are the model's, so modes and gradients reach those."""

    def __init__(self, model: nn.Module, shifts: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.shifts, self.training = model, shifts, model.training

    def forward(self, x: Tensor) -> Any:
        own = dict(self.model.named_parameters())
        return functional_call(self.model, {name: own[name] + shift for name, shift in self.shifts.items()}, (x,))
