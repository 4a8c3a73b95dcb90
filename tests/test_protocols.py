"""The base classes that users and tables subclass."""

import pytest
import torch

from doubly.attacks import Attack
from doubly.bilevel import StepRule
from doubly.config import OptimizerConfig
from doubly.losses import Loss, PairedLoss
from doubly.methods import Method
from doubly.models import Model
from doubly.schedules import Schedule
from doubly.threat import Threat

X = torch.zeros(2, 1, 2, 2)


def test_what_a_subclass_has_to_implement_is_not_silently_missing():
    for call in (
        lambda: Attack()(torch.nn.Identity(), X, X, torch.Generator()),
        lambda: Method().objective(torch.nn.Identity(), None, {}, None),
        lambda: Loss()(X, X),
        lambda: PairedLoss()(X, X, X),
        lambda: Schedule().at(0.5),
        lambda: StepRule().step(X, X, None, {}),
        lambda: OptimizerConfig().build([]),
        lambda: Model().build(1, 2, [0.0], [1.0]),
        lambda: Threat().around(X),
        lambda: Threat().length(X),
        lambda: Threat().step_rule(0.1),
        lambda: Threat().unbounded(X),
    ):
        with pytest.raises(NotImplementedError):
            call()
