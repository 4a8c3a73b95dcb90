"""What one epoch is remembered by: per-sample losses and weights, as tensors, so that a checkpoint can hold them."""

import torch
from torch import Tensor

from doubly.distributed import collectives as parallel
from doubly.training.passes import Passes
from doubly.types import Batch, Objective, State


def effective_sample_size(sums: Tensor, squares: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2: the number of equally weighted samples that would be as informative."""
    return sums.square() / squares.clamp_min(torch.finfo(torch.float64).tiny)


def _everybodys(name: str, values: list[Tensor]) -> Tensor:
    """The samples of all processes, step by step as one process would have them; of the steps' own numbers the sums."""
    own, size = torch.cat(values), parallel.world()[1]
    if size == 1 or name.startswith("count/"):  # which all of them have counted alike
        return own
    everyone = parallel.gather(own).view(size, *own.shape)
    if name == "steps":
        return everyone.sum(0)
    return torch.cat([part.flatten(0, 1) for part in torch.split(everyone, [len(v) for v in values], dim=1)])


class Meter:
    """Collects objectives over an epoch; `row` sums them up. Each process collects its own, and all of them ask alike.

    `before`: what all of them had collected when the epoch was cut, which every one knows.
    """

    def __init__(self, before: State | None = None) -> None:
        self.before = before or {}
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, objective: Objective, batch: Batch, passes: Passes | None = None) -> None:
        """`passes`: of this step, where they were counted."""
        weights = objective.weights.detach().double()
        step = torch.stack([weights.sum(), weights.square().sum(), weights.new_tensor(float(len(weights)))])
        for name, values in [
            ("losses", objective.sample_losses.detach().float()),
            ("weights", weights.float()),
            ("correct", (objective.logits.argmax(1) == batch.y).float()),
            ("steps", step[None]),
        ]:
            self.parts.setdefault(name, []).append(values)
        for name, value in objective.record.items():
            self.parts.setdefault(f"record/{name}", []).append(value.detach().float().reshape(1))
        if passes is not None:
            self.parts["record/passes_forward"] = [step.new_tensor([passes.forward]).float()]
            self.parts["record/passes_backward"] = [step.new_tensor([passes.backward]).float()]

    def count(self, name: str, times: Tensor) -> None:
        """Summed over the epoch."""
        self.parts.setdefault(f"count/{name}", []).append(times.reshape(1))

    def collected(self) -> State:
        """Of all processes, each of which has to ask."""
        found = {name: _everybodys(name, values) for name, values in self.parts.items()}
        both = {
            name: [state[name] for state in (self.before, found) if name in state] for name in {**self.before, **found}
        }
        return {name: torch.cat(values) for name, values in both.items()}

    def row(self) -> dict[str, object]:
        """Means over the epoch's samples; the effective sample size is the mean share of a batch."""
        found = {name: values.double().cpu() for name, values in self.collected().items()}
        losses, weights = found["losses"], found["weights"]
        levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
        quantiles = [round(q, 8) for q in weights[:: max(1, len(weights) // 10**6)].quantile(levels).tolist()]
        return {
            "loss": losses.mean().item(),
            "weighted_loss": (losses * weights).mean().item(),
            "train_accuracy": found["correct"].mean().item(),
            "weight_mean": weights.mean().item(),
            "weight_max": weights.max().item(),
            "weight_quantiles": dict(zip(("5%", "50%", "95%"), quantiles, strict=True)),
            "weight_ess": (effective_sample_size(*found["steps"][:, :2].T) / found["steps"][:, 2]).mean().item(),
            **{name[7:]: found[name].mean().item() for name in found if name.startswith("record/")},
            **{name[6:]: int(found[name].sum()) for name in found if name.startswith("count/")},
        }
