"""The passes of the network that a step of each method takes, as a table: foreseen, and counted on digits."""

import torch

from doubly.recipes.digits import FAST, METHODS, unsearched
from doubly.recipes.methods import LABELS
from doubly.studies.digits_comparison import cost
from doubly.text import method_label
from doubly.training.passes import predicted


def markdown() -> str:
    """With the settings of the recipes on digits."""
    rows = [f"| {LABELS.get(name) or method_label(name)} | {' | '.join(both(name))} |" for name in (*METHODS, *FAST)]
    return "\n".join(["| method | predicted | counted |", "|---|---|---|", *rows])


def both(name: str) -> tuple[str, str]:
    """Foreseen on a tiny network, and counted in a step of the recipe's own network on its images."""
    with torch.random.fork_rng():
        run = unsearched(name, imbalanced=True)
        foreseen = predicted(run.method, 1, 10)  # type: ignore[arg-type]  # methods are frozen, so hashable
        counted = cost(run)
    return _shown(foreseen.forward, foreseen.backward), _shown(counted["forward"], counted["backward"])


def _shown(forward: float, backward: float) -> str:
    return f"{forward:.3g} + {backward:.3g}"
