"""When does the implicit term matter? Its size against barrier strength c, damping lambda and interior pixels.

Trains a network by AT on digits, attacks a batch with each variant's steps, and compares the gradients of DONE with and
without the term. Writes docs/images/implicit_term.png and prints the numbers of docs/numerics.md.

    python benchmarks/implicit_term.py
"""

from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from doubly import DONE, Batch, LinfBall, TrainStep
from doubly.bilevel import BarrierStep, Box, SignStep, StepRule
from doubly.data import load_splits
from doubly.data.loader import batches
from doubly.recipes import recipe
from doubly.schedules import Constant
from doubly.training.loop import train_run

EPSILON = 0.15
RULES: dict[str, StepRule] = {
    "sign steps (DONE-PGD)": SignStep(EPSILON / 4),
    "barrier steps (DONE-GD)": BarrierStep(1.0),
}
DAMPING = [0.0, 1.0, 10.0, 100.0, 1000.0, 10000.0]
STRENGTHS = [1e-4, 1e-5, 1e-6]


def gradient(model: nn.Module, batch: Batch, delta: Tensor, method: DONE) -> Tensor:
    scalar = method.direction(model, batch, delta, {}, TrainStep()).loss
    return torch.cat([g.flatten() for g in torch.autograd.grad(scalar, list(model.parameters()))])


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a, b, 0).item()


def main() -> None:
    torch.set_num_threads(1)
    run = replace(recipe("digits.at"), epochs=40)
    model = train_run(run, None)
    batch = next(batches(load_splits(run.data).train, 256, 0, 0))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    print("rule                     c      lambda  interior  |term|/|grad|  cos(none, exact)  first order: cos, length")
    for axis, (label, rule) in zip(axes, RULES.items(), strict=True):
        for strength in STRENGTHS:
            attack = replace(recipe("digits.done_pgd").method.attack, threat=LinfBall(EPSILON, strength), rule=rule)
            delta = attack(model, batch.x, batch.y, TrainStep().generator("attack"))
            box: Box = attack.threat.around(batch.x)
            above, below = box.slacks(delta)
            interior = (torch.minimum(above, below) > 0.01 * EPSILON).float().mean().item()
            sizes = []
            for damping in DAMPING:
                method = DONE(attack, temperature=Constant(1.0), damping=damping, implicit="none")
                plain, exact, quotient = (
                    gradient(model, batch, delta, replace(method, implicit=i)) for i in ("none", "exact", "first_order")
                )
                term, approximate = exact - plain, quotient - plain
                sizes.append((term.norm() / plain.norm()).item())
                print(
                    f"{label:24} {strength:.0e} {damping:8g} {interior:8.2f} {sizes[-1]:14.4f} "
                    f"{cosine(plain, exact):17.4f} {cosine(term, approximate):14.4f} "
                    f"{(approximate.norm() / term.norm()).item():8.3f}"
                )
            axis.plot(range(len(DAMPING)), sizes, marker="o", label=f"c = {strength:.0e}, {interior:.0%} interior")
        axis.set_title(label)
        axis.set_xticks(range(len(DAMPING)), [f"{d:g}" for d in DAMPING])
        axis.set_xlabel("damping λ")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("size of the implicit term\n(share of the gradient without it)")
    path = Path(__file__).parent.parent / "docs" / "images" / "implicit_term.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
