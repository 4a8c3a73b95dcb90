"""Networks as they are: what they return, and where they normalize."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.methods import AT, ATBSL, CFOL
from doubly.models import Normalize, adapt_model
from doubly.offsets.api import repair
from doubly.training.api import train


class Returns(nn.Module):
    """A linear network whose output is changed by a function."""

    def __init__(self, change, logits=3):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.linear = nn.Linear(16, logits)
        self.change = change

    def forward(self, x):
        return self.change(self.linear(x.flatten(1)))


class NoForward(nn.Module):
    pass


FORMS = {
    "object": lambda z: SimpleNamespace(logits=z),
    "dict": lambda z: {"loss": z.sum(), "logits": z},
    "dict of one": lambda z: {"scores": z},
    "tuple": lambda z: (z, z.flatten()),
}
QUICK = {"epochs": 1, "batch_size": 16, "verbose": False, "channels_last": "no"}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_every_output_with_logits_trains_evaluates_and_repairs_like_the_logits_alone(tiny, tmp_path):
    data, plain = tiny.splits.train, Returns(lambda z: z)
    train(plain, data, AT(tiny.attack), **QUICK)
    before = evaluate(plain, data, tiny.attack.threat, trust=False)
    repaired = repair(plain, data, tiny.attack.threat, rounds=2)
    for change in FORMS.values():
        model = Returns(change)
        trained = train(model, data, AT(tiny.attack), output=tmp_path / str(len(list(tmp_path.iterdir()))), **QUICK)
        assert trained.model is model and torch.equal(weights(model), weights(plain))
        result = evaluate(model, data, tiny.attack.threat, trust=False)
        assert (result.predictions["pgd"] == before.predictions["pgd"]).all()
        assert torch.equal(repair(model, data, tiny.attack.threat, rounds=2).offsets, repaired.offsets)


def test_normalization_outside_equals_a_first_layer(tiny):
    data, threat = tiny.splits.train, tiny.attack.threat
    inside, outside = nn.Sequential(Normalize([0.4], [0.2]), Returns(lambda z: z)), Returns(FORMS["dict"])
    train(inside, data, AT(tiny.attack), **QUICK)
    train(outside, data, AT(tiny.attack), mean=[0.4], std=0.2, **QUICK)
    assert torch.equal(weights(inside), weights(outside))
    results = evaluate(inside, data, threat), evaluate(outside, data, threat, mean=0.4, std=[0.2])
    assert results[0].ra_pgd == results[1].ra_pgd != evaluate(outside, data, threat).ra_pgd


def test_more_logits_than_classes_are_the_same_everywhere(tiny):
    data, threat = Images.of(tiny.splits.train.x, tiny.splits.train.y), tiny.attack.threat
    for method in (AT(tiny.attack), ATBSL(tiny.attack), CFOL(tiny.attack)):
        model = Returns(lambda z: z, logits=5)
        train(model, data, method, **QUICK)
        assert weights(model).isfinite().all() and evaluate(model, data, threat, trust=False).n == len(data)
        assert len(repair(model, data, threat, rounds=1).offsets) == 5


def test_refusals():
    x = torch.rand(2, 1, 4, 4)
    for call, message in (
        (lambda: adapt_model(Returns(lambda z: {"a": z, "b": z}), x), "returns dict with a, b, in which there are no"),
        (lambda: adapt_model(Returns(lambda z: ()), x), "returns tuple, in which there are no logits"),
        (lambda: adapt_model(Returns(lambda z: z.tolist), x), "no logits"),
        (lambda: adapt_model(NoForward(), x), "NoForward has no forward: define it, or pass the network inside"),
        (lambda: adapt_model(Returns(lambda z: z), x, mean=[0.1, 0.2, 0.3], std=[1, 1, 1]), "one number per channel"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
