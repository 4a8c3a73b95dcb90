"""What one epoch is remembered by: per-sample losses and weights, as tensors, so that a checkpoint can hold them."""

import torch
from torch import Tensor

from doubly.runs.passes import Passes
from doubly.types import Batch, Objective, State


def effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2: the number of equally weighted samples that would be as informative."""
    weights = weights.double()
    return weights.sum().square() / weights.square().sum().clamp_min(torch.finfo(torch.float64).tiny)


class Meter:
    """Collects objectives over an epoch; `row` sums them up."""

    def __init__(self, collected: State | None = None) -> None:
        self.parts: dict[str, list[Tensor]] = {name: [values] for name, values in (collected or {}).items()}

    def add(self, objective: Objective, batch: Batch, passes: Passes | None = None) -> None:
        """`passes`: of this step, where they were counted."""
        share = effective_sample_size(objective.weights) / len(batch.y)
        correct = (objective.logits.argmax(1) == batch.y).float()
        for name, values in [
            ("losses", objective.losses),
            ("weights", objective.weights),
            ("correct", correct),
            ("ess", share[None]),
        ]:
            self.parts.setdefault(name, []).append(values.detach().float())
        for name, value in objective.record.items():
            self.parts.setdefault(f"record/{name}", []).append(value.detach().float().reshape(1))
        if passes is not None:
            self.parts["record/passes_forward"] = [share.new_tensor([passes.forward]).float()]
            self.parts["record/passes_backward"] = [share.new_tensor([passes.backward]).float()]

    def count(self, name: str, times: Tensor) -> None:
        """Summed over the epoch."""
        self.parts.setdefault(f"count/{name}", []).append(times.reshape(1))

    def collected(self) -> State:
        return {name: torch.cat(values) for name, values in self.parts.items()}

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
            "weight_ess": found["ess"].mean().item(),
            **{name[7:]: found[name].mean().item() for name in found if name.startswith("record/")},
            **{name[6:]: int(found[name].sum()) for name in found if name.startswith("count/")},
        }
