"""Every entry of THREATS keeps the promises of a threat: a new norm is tested by being listed."""

import dataclasses

import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import StepRule
from doubly.config.serialize import from_json, to_json
from doubly.evaluation.attacks import reference_pgd
from doubly.threat import THREATS, Threat, is_image, is_inside

each_threat = pytest.mark.parametrize("kind", THREATS.values(), ids=THREATS)


def subclasses(kind):
    return {kind} | {other for child in kind.__subclasses__() for other in subclasses(child)}


def images(count=6):
    """Return images with pixels at both ends of the range."""
    x = torch.rand(count, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 0] = (x[:, 0] > 0.5).double()
    return x


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def test_every_threat_in_the_file_is_listed():
    listed = {kind for kind in subclasses(Threat) - {Threat} if kind.__module__ == Threat.__module__}
    assert listed == set(THREATS.values())
    assert len({kind.norm for kind in THREATS.values()}) == len(THREATS)


@each_threat
def test_is_a_frozen_value_with_defaults_that_survives_json(kind):
    threat = kind()
    assert isinstance(threat, Threat) and threat == kind() and threat.__dataclass_params__.frozen
    assert from_json(to_json(threat)) == threat
    assert threat.norm and 0 < threat.radius <= threat.max_radius


@each_threat
def test_scaling_and_unbounding_change_the_radius_alone(kind):
    threat, x = kind(), images()
    other_fields = [field.name for field in dataclasses.fields(threat) if field.name != "radius"]
    for changed in (threat.scaled(0.5), threat.unbounded(x)):
        assert type(changed) is kind
        assert all(getattr(changed, name) == getattr(threat, name) for name in other_fields)
    assert threat.scaled(0.5).radius == 0.5 * threat.radius
    # Every image is allowed as a perturbation of every other one.
    assert threat.unbounded(x).radius <= threat.max_radius
    corners = torch.stack([torch.zeros_like(x[0]), torch.ones_like(x[0])])
    assert is_inside(threat.unbounded(x), corners - corners.flip(0)).all()


@each_threat
def test_the_set_around_an_image_has_the_radius_and_stays_in_the_image_range(kind):
    threat, x = kind(), images()
    far = 10 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    for delta in (threat.around(x).project(far), threat.around(x).at(torch.rand_like(x))):
        assert is_inside(threat, delta).all() and is_image(x + delta).all()
    gray = torch.full_like(x, 0.5)
    reached = threat.length(threat.around(gray).project(far))
    assert torch.allclose(reached, torch.full_like(reached, threat.radius))
    assert threat.length(torch.zeros_like(x)).tolist() == [0.0] * len(x)
    assert torch.allclose(threat.length(3 * far), 3 * threat.length(far))


@each_threat
def test_the_step_is_the_steepest_one_of_its_size(kind):
    threat, x = kind(), images()
    rule = threat.step_rule(0.25)
    assert isinstance(rule, StepRule) and rule.sizes == (0.25,)
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    step, _ = rule.step(gradient, torch.zeros_like(x), threat.around(x), rule.init(torch.zeros_like(x)))
    assert torch.allclose(threat.length(step), torch.tensor(0.25, dtype=x.dtype))
    for seed in range(20):  # no other direction of that length descends further
        other = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
        other = 0.25 * other / threat.length(other).view(-1, 1, 1, 1)
        assert ((gradient * step).flatten(1).sum(1) <= (gradient * other).flatten(1).sum(1)).all()


@each_threat
def test_attacks_stay_inside_and_raise_the_loss(kind):
    threat, x, y, model = kind(), images(), torch.arange(6) % 3, network()
    attacks = [
        reference_pgd(threat),
        PGD(threat, 3, threat.step_rule(threat.radius / 2)),
        PGD(threat, 3, threat.step_rule(threat.radius / 2)).scaled(0.5),
        FGSM(threat),
    ]
    for attack in attacks:
        delta = attack(model, x, y, torch.Generator().manual_seed(0))
        assert is_inside(attack.threat, delta).all() and is_image(x + delta).all()
        clean, attacked = (nn.functional.cross_entropy(model(point), y) for point in (x, x + delta))
        assert attacked > clean


@each_threat
def test_rounded_images_are_moved_back_inside(kind):
    threat, x = kind(), images().float()
    delta = threat.around(x).project(10 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    levels = threat.clip_gray_levels((255 * (x + delta)).round(), x)
    assert torch.equal(levels, levels.round()) and is_image(levels / 255).all()
    if threat.has_barrier:  # a box has whole gray levels inside
        assert is_inside(threat, levels / 255 - x).all()


@each_threat
def test_the_barrier_is_that_of_the_same_set(kind):
    threat, x = kind(), images()
    if threat.has_barrier:
        far = 10 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
        assert torch.equal(threat.box(x).project(far), threat.around(x).project(far))
        assert (threat.box(x).inverse_curvature(torch.zeros_like(x), 1.0) >= 0).all()
    else:
        with pytest.raises(ValueError, match="has no barrier"):
            threat.box(x)
