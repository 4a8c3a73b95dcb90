"""PGD that stops at misclassified samples."""

import pytest
import torch
from torch import nn

from doubly.attacks import PGD, StoppingPGD
from doubly.bilevel import MomentumStep
from doubly.errors import UsageError
from doubly.losses import LogitMargin
from doubly.threat import L2Ball, LinfBall
from doubly.training.passes import counted_passes


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


def test_accuracy_is_at_most_that_of_pgd_for_fewer_passes_and_wrong_images_stay():
    model, x = network(), torch.rand(64, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    clean = model(x).argmax(1)
    y = clean.clone()
    y[::4] = (y[::4] + 1) % 3  # misclassified from the beginning
    for threat, loss in ((LinfBall(0.1), None), (L2Ball(0.3), LogitMargin())):
        plain = PGD(threat, 10, **({} if loss is None else {"loss": loss}))
        stopping = StoppingPGD.of(plain)
        with counted_passes(model, len(x)) as passes:
            delta = stopping(model, x, y, 0)
        assert 0.3 < passes.backward < 10 * 0.75
        assert not delta[::4].any() and (threat.length(delta) <= threat.radius * 1.0001).all()
        robust, last = model(x + delta).argmax(1) == y, model(x + plain(model, x, y, 0)).argmax(1) == y
        assert 0 < robust.sum() < 48 and (last | ~robust).all() and (last ^ robust).sum() <= 3
        assert stopping.loss == plain.loss and stopping.rule == plain.rule


def test_refusals():
    with pytest.raises(UsageError, match="takes a step without a state"):
        StoppingPGD(LinfBall(0.1), 5, MomentumStep(0.01))
