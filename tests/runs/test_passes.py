import pytest
import torch

from doubly.recipes.digits import FAST, METHODS, unsearched
from doubly.recipes.digits_comparison import cost


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("standard", 1, 1),
        ("at", 11, 11),  # ten steps and the update
        ("trades", 13, 12),  # and the clean images, once for the attack and once for the update
        ("awp", 12, 12),  # one attack, and the ascent of the weights
        ("done_pgd", 12, 12),  # the difference quotient
        ("fast_at", 2, 2),
        ("fast_bat", 4, 6),  # two steps, z and delta*; the implicit term is a double backward
    ],
)
def test_the_passes_of_a_step(method, forward, backward):
    with torch.random.fork_rng():
        found = cost(unsearched(method, True))
    assert (found["forward"], found["backward"]) == (forward, backward)


def test_every_method_can_be_counted():
    with torch.random.fork_rng():
        assert all(cost(unsearched(method, True))["backward"] >= 1 for method in (*METHODS, *FAST))
