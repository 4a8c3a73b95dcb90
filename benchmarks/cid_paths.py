"""How far do the two ways to the implicit term differ under batch norm in training mode?

With `inner=None`, h = -g, `cid` takes both gradients in delta from one backward pass and weights row i by c_i; with an
explicit `inner` it differentiates the sum of c_j g_j. They are equal where samples do not see each other.
Trains a network with and one without batch norm by AT on digits, and prints the numbers of docs/numerics.md.

    python benchmarks/cid_paths.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from doubly import AT, Batch, LinfBall, TrainStep
from doubly.attacks import PGD
from doubly.bilevel import BarrierStep, Diagonal, LogMeanExp, SignStep, StepRule, Terms, cid
from doubly.data import Digits
from doubly.models import Model, NarrowResNet, SmallCNN

THREAT = LinfBall(0.15)
RULES: dict[str, StepRule] = {"sign steps": SignStep(0.15 / 4), "barrier steps": BarrierStep(1.0)}
IMAGES = Digits().load().train


def rows(start: int) -> Batch:
    part = slice(start, start + 128)
    return Batch(IMAGES.pixels(part), IMAGES.y[part], IMAGES.ids[part])


def trained(kind: Model) -> nn.Module:
    torch.manual_seed(0)
    model = kind.build(1, 10, *IMAGES.channel_statistics())
    method, optimizer = AT(PGD(THREAT, 3, SignStep(0.1))), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(120):
        optimizer.zero_grad()
        method.objective(model, rows(128 * (step % 11)), {}, TrainStep(step=step)).loss.backward()
        optimizer.step()
    return model.train()


def terms(model: nn.Module, batch: Batch, rule: StepRule, r: float) -> tuple[Tensor, Tensor]:
    """Return the implicit term with `inner=None` and with an explicit `inner`."""
    attack = PGD(THREAT, 10, rule)
    delta = attack(model, batch.x, batch.y, TrainStep().generator("attack"))
    solve = Diagonal(attack.box(batch.x, batch.y).inverse_curvature(delta, 10.0))

    def gradient(explicit: bool, solve: Diagonal | None) -> Tensor:
        def problem(delta: Tensor) -> Terms:
            losses = F.cross_entropy(model(batch.x + delta), batch.y, reduction="none")
            return Terms(losses, -losses if explicit else None)

        loss = cid(problem, delta, LogMeanExp(r), {}, solve).loss
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    without = gradient(False, None)
    return gradient(False, solve) - without, gradient(True, solve) - without


def main() -> None:
    for kind in (SmallCNN(16), NarrowResNet(8, 1)):
        model = trained(kind)
        for name, rule in RULES.items():
            for r in (10.0, 1.0, 0.1):
                pairs = [terms(model, rows(start), rule, r) for start in range(0, 1280, 128)]
                shares = torch.tensor([float((a - b).norm() / b.norm()) for a, b in pairs])
                cosines = torch.tensor([float(F.cosine_similarity(a, b, 0)) for a, b in pairs])
                print(
                    f"{type(kind).__name__}, {name}, r = {r:g}: difference {shares.min():.1%} to {shares.max():.1%}, "
                    f"median {shares.median():.1%}; smallest cosine {cosines.min():.4f}"
                )


if __name__ == "__main__":
    main()
