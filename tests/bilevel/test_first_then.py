import pytest
import torch

from doubly.bilevel import AdamStep, FirstThen, GradientStep, SignStep, WholeSpace, projected_descent


@pytest.mark.parametrize("then", [GradientStep(0.2), AdamStep(0.1)])
def test_one_step_of_the_first_rule_and_all_others_of_the_second(then):
    target, start = torch.tensor([[1.0, -2.0]]), torch.zeros(1, 2)

    def inner(delta):
        return 0.5 * (delta - target).square().sum(1)

    first = projected_descent(inner, start, WholeSpace(), SignStep(0.1), 1)
    expected = projected_descent(inner, first, WholeSpace(), then, 3)
    found = projected_descent(inner, start, WholeSpace(), FirstThen(SignStep(0.1), then), 4)
    assert torch.equal(found, expected) and not torch.equal(found, first)
