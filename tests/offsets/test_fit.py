"""The fit: closed forms on a line, finite differences, limits."""

import math

import pytest
import torch

import offset_problems as problems
from doubly.losses import LogitMargin
from doubly.offsets.config import RepairConfig
from doubly.offsets.fit import fit_offsets
from doubly.offsets.objective import smooth_class_errors, soft_maximum, spread_of_margins
from doubly.threat import L2Ball, LinfBall


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("threat", [LinfBall(0.05), L2Ball(0.05)])
def test_offsets_of_two_gaussians_move_the_threshold_to_the_middle(share, threat):
    """Errors of both classes are equal at the threshold 0.5: slope * (0.4 - 0.5) = -1 = b_1 - b_0, whatever M_c are."""
    model = problems.Line(threshold=0.4)
    fit = fit_offsets(model, problems.two_classes(share=share), threat, RepairConfig(temperature=0.05))
    assert fit.offsets.tolist() == pytest.approx([0.5, -0.5], abs=0.06)
    before, after = fit.errors.tolist()
    assert before[0] - before[1] > 0.4 and abs(after[0] - after[1]) < 0.05
    assert min(fit.history) < fit.history[0] - 0.1


def test_values_and_objective_are_those_of_the_formula():
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0], [1.0, 1.0, 0.0], [0.5, 0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0])
    counts, width, temperature = torch.bincount(y, minlength=3), 0.5, 0.2
    margins = [1.0, -2.0, 0.0, 0.5]
    errors = [1 / (1 + math.exp(m / width)) for m in margins]
    values = smooth_class_errors(logits, y, width, counts)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for row, (label, error) in enumerate(zip(y.tolist(), errors, strict=True)):
        expected[row, label] = 4 / 2 * error
    assert torch.allclose(values, expected, atol=1e-6)
    u = values.mean(0)
    assert u[0].item() == pytest.approx((errors[0] + errors[3]) / 2, abs=1e-6)
    value = soft_maximum(temperature, counts > 0)(u)
    by_hand = temperature * math.log((math.exp(u[0] / temperature) + math.exp(u[1] / temperature)) / 2)
    assert value.item() == pytest.approx(by_hand)
    assert spread_of_margins(logits, y) == pytest.approx(LogitMargin()(logits, y).std(correction=0).item())
    assert spread_of_margins(logits[:1], y[:1]) == 1.0


def test_offsets_add_up_to_zero_and_a_class_without_images_keeps_zero():
    images = problems.bright_rows(120)
    part = images.subset(images.y != 2)
    fit = fit_offsets(problems.Rows(), part, LinfBall(0.05), RepairConfig(rounds=4))
    assert fit.offsets[2] == 0 and fit.offsets.abs().sum() > 0.1
    assert fit.offsets.sum().item() == pytest.approx(0, abs=1e-5)
    assert fit.errors[:, 2].isnan().all() and not fit.errors[:, 0].isnan().any()
    assert min(fit.history) < fit.history[0]


def test_the_implicit_term_changes_little_and_the_network_is_left_alone(same_bits):
    model, images = problems.Rows(), problems.bright_rows(80)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = {"rounds": 3, "fit_on": "cross_entropy", "chunk_size": 30}
    plain, implicit = (
        fit_offsets(model, images, LinfBall(0.05), RepairConfig(**settings, implicit=flag)) for flag in (False, True)
    )
    assert same_bits(before, dict(model.state_dict())) and model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert torch.allclose(plain.offsets, implicit.offsets, atol=0.1) and plain.offsets.abs().max() > 0.2
    assert 0 <= implicit.implicit_share < 0.2
    assert fit_offsets(model, images, L2Ball(0.1), RepairConfig(rounds=1)).implicit_share is None


def test_equal_settings_give_equal_bits_and_chunks_change_only_the_start():
    model, images = problems.Rows(), problems.bright_rows(80)
    fits = [
        fit_offsets(model, images, LinfBall(0.05), RepairConfig(rounds=3, chunk_size=size)) for size in (250, 250, 30)
    ]
    assert torch.equal(fits[0].offsets, fits[1].offsets) and fits[0].history == fits[1].history
    assert torch.allclose(fits[0].offsets, fits[2].offsets, atol=0.1)
