import math

import pytest
import torch

from doubly.losses import LOSSES, CrossEntropy, LogitMargin, Loss

LOGITS = [[2.0, 0.0, -1.0], [0.5, 0.5, 3.0], [-1.0, 4.0, 4.5]]
LABELS = [0, 2, 1]


def test_every_loss_is_listed():
    assert set(LOSSES.values()) == {CrossEntropy, LogitMargin}
    assert all(isinstance(kind(), Loss) and kind() == kind() for kind in LOSSES.values())


def test_cross_entropy_by_hand():
    found = CrossEntropy()(torch.tensor(LOGITS), torch.tensor(LABELS)).tolist()
    for row, label, value in zip(LOGITS, LABELS, found, strict=True):
        assert value == pytest.approx(math.log(sum(math.exp(z) for z in row)) - row[label], rel=1e-6)


def test_logit_margin_by_hand():
    found = LogitMargin()(torch.tensor(LOGITS), torch.tensor(LABELS)).tolist()
    assert found == pytest.approx([0.0 - 2.0, 0.5 - 3.0, 4.5 - 4.0])


def test_logit_margin_is_positive_exactly_where_the_sample_is_misclassified():
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randn(500, 10, generator=generator), torch.randint(10, (500,), generator=generator)
    assert torch.equal(LogitMargin()(logits, y) > 0, logits.argmax(1) != y)


def test_logit_margin_has_gradient_one_on_the_rival_and_minus_one_on_the_truth():
    logits = torch.tensor(LOGITS, requires_grad=True)
    LogitMargin()(logits, torch.tensor(LABELS)).sum().backward()
    assert logits.grad[0].tolist() == [-1, 1, 0] and logits.grad[2].tolist() == [0, -1, 1]
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("given", "answer"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2]
)
def test_cross_entropy_is_at_least_single_precision(given, answer):
    losses = CrossEntropy()(torch.tensor(LOGITS, dtype=given), torch.tensor(LABELS))
    assert losses.dtype is answer and losses.shape == (3,)


def test_cross_entropy_of_extreme_logits_is_finite():
    found = CrossEntropy()(torch.tensor([[1e6, 0.0], [0.0, 1e6]]), torch.tensor([0, 0]))
    assert found.tolist() == [0.0, 1e6]
