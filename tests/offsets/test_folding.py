"""Offsets inside a network: folded where that is possible, and wrapped where it is not."""

import pytest
import torch
from torch import nn

import offset_problems as problems
from doubly.models import MODELS
from doubly.models.shifted import ShiftedLogits
from doubly.offsets.folding import fold_offsets

OFFSETS = torch.tensor([0.5, -1.0, 0.25, 0.25])


class TwoHeads(nn.Module):
    """The linear layer that is called last does not return the logits."""

    def __init__(self):
        super().__init__()
        self.head, self.other = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        logits = self.head(x.flatten(1))
        self.other(x.flatten(1))
        return logits


@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (lambda: problems.Rows(), "head"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Identity()), "1"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 4)), "3"),
        (lambda: TwoHeads(), "head"),
        (lambda: problems.Rows(bias=False), None),
        (lambda: problems.Rows(divided_by=2.0), None),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.LayerNorm(4)), None),
    ],
)
def test_logits_are_shifted_and_the_original_is_not(make, layer):
    torch.manual_seed(0)
    model, x = make(), torch.rand(8, 1, 4, 4)
    expected = model(x).detach()
    folded = fold_offsets(model, OFFSETS, x)
    assert folded.layer == layer
    assert torch.allclose(folded.model(x), expected + OFFSETS, atol=1e-5)
    assert torch.equal(model(x), expected)
    assert (set(folded.model.state_dict()) == set(model.state_dict())) == (layer is not None)
    assert isinstance(folded.model, ShiftedLogits) == (layer is None)


@pytest.mark.parametrize("name", ["small_cnn", "narrow_resnet"])
def test_our_networks_are_folded_into_their_head(name):
    model = MODELS[name]().build(1, 4, [0.5], [0.5])
    assert fold_offsets(model, OFFSETS, torch.rand(4, 1, 8, 8)).layer.startswith("head")
