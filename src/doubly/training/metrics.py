"""The metrics of one epoch: per-sample losses and weights, collected as tensors so that a checkpoint can hold them."""

import torch
from torch import Tensor

from doubly.distributed import Communicator
from doubly.training.passes import Passes
from doubly.types import Batch, Objective, State

MAX_QUANTILE_SAMPLES = 10**6  # torch.quantile takes no more than 16 million


def effective_sample_size(sums: Tensor, squares: Tensor) -> Tensor:
    """Return (sum w)^2 / sum w^2: the number of equally weighted samples that would be as informative."""
    return sums.square() / squares.clamp_min(torch.finfo(torch.float64).tiny)


class EpochMetrics:
    """Collects objectives over an epoch. Each process collects its own; `collected` and `row` are collective."""

    def __init__(self, restored: State | None = None) -> None:
        """Start an epoch.

        Args:
            restored: What `collected` returned before the epoch was interrupted, the same on every process.
        """
        self.restored = restored or {}
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, objective: Objective, batch: Batch, passes: Passes | None = None) -> None:
        """Add one step.

        Args:
            objective: What was trained on.
            batch: Its images.
            passes: The network's passes in this step, where they were counted.
        """
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
        """Add to a number that is summed up over the epoch and that every process counts alike."""
        self.parts.setdefault(f"count/{name}", []).append(times.reshape(1))

    def collected(self, communicator: Communicator) -> State:
        """Return everything collected so far, of all processes."""
        current = {name: _gather_steps(name, values, communicator) for name, values in self.parts.items()}
        both = {
            name: [state[name] for state in (self.restored, current) if name in state]
            for name in {**self.restored, **current}
        }
        return {name: torch.cat(values) for name, values in both.items()}

    def row(self, communicator: Communicator) -> dict[str, object]:
        """Return the means over the epoch's samples, as metrics.jsonl keeps them.

        The effective sample size is the mean over the steps, as a share of the batch.
        """
        values = {name: tensor.double().cpu() for name, tensor in self.collected(communicator).items()}
        losses, weights = values["losses"], values["weights"]
        levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
        sample = weights[:: max(1, len(weights) // MAX_QUANTILE_SAMPLES)]
        quantiles = [round(q, 8) for q in sample.quantile(levels).tolist()]
        return {
            "loss": losses.mean().item(),
            "weighted_loss": (losses * weights).mean().item(),
            "train_accuracy": values["correct"].mean().item(),
            "weight_mean": weights.mean().item(),
            "weight_max": weights.max().item(),
            "weight_quantiles": dict(zip(("5%", "50%", "95%"), quantiles, strict=True)),
            "weight_ess": (effective_sample_size(*values["steps"][:, :2].T) / values["steps"][:, 2]).mean().item(),
            **{name[7:]: values[name].mean().item() for name in values if name.startswith("record/")},
            **{name[6:]: int(values[name].sum()) for name in values if name.startswith("count/")},
        }


def _gather_steps(name: str, values: list[Tensor], communicator: Communicator) -> Tensor:
    """Return the values of all processes, step by step as one process would have them; sums for the steps' numbers."""
    local, world_size = torch.cat(values), communicator.world_size
    if world_size == 1 or name.startswith("count/"):
        return local
    by_rank = communicator.all_gather(local).view(world_size, *local.shape)
    if name == "steps":
        return by_rank.sum(0)
    return torch.cat([step.flatten(0, 1) for step in torch.split(by_rank, [len(v) for v in values], dim=1)])
