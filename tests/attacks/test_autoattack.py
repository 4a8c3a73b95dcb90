import logging
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from doubly.attacks import attacked
from doubly.attacks.autoattack import QUICK, STANDARD, AutoAttack, reference_version, warnings_about, warnings_after
from doubly.errors import UsageError
from doubly.threat import L2Ball, LinfBall

SMALL = {"iterations": 20, "queries": 60}


def silent(text):
    raise AssertionError(text)


def linear(classes, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, classes))


def right_answers(model, n=24, seed=1):
    """Images away from 0 and 1, so that the ball is never cut, and the network's own answers as their labels."""
    x = 0.3 + 0.4 * torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
    return x, model(x).argmax(1).detach()


def turned(attack, part, model, x, y, warn=silent):
    with attacked(model, "eval"):
        found = attack.perturb(part, model, x, y, model(x).shape[1], warn)
        return found, model(found).argmax(1) != y


def distance(model, x, y, ball):
    """From each image to the suggestion boundary of a linear network, in closed form."""
    weight, logits = model[1].weight.detach(), model(x).detach()
    dual = 1 if ball is LinfBall else 2
    lead = logits.gather(1, y[:, None]) - logits
    each = lead / (weight[None] - weight[y][:, None]).norm(dual, dim=2)
    return each.scatter(1, y[:, None], torch.inf).amin(1)


def half_of_them(model, ball):
    """A ball that reaches the boundary from half of the images."""
    x, y = right_answers(model)
    far = distance(model, x, y, ball)
    return x, y, far, ball(float(far.median()) * 1.001)


@pytest.mark.parametrize("classes", [2, 3, 5, 11])
@pytest.mark.parametrize("ball", [LinfBall, L2Ball])
@pytest.mark.parametrize("part", ["apgd-t", "fab-t"])
def test_a_linear_network_falls_exactly_where_its_closed_form_says(part, ball, classes):
    model = linear(classes)
    x, y, far, threat = half_of_them(model, ball)
    sure = (far / threat.radius - 1).abs() > 0.01
    found, broken = turned(AutoAttack(threat, iterations=25), part, model, x, y, lambda text: None)
    length = (found - x).flatten(1).norm(torch.inf if ball is LinfBall else 2, dim=1)
    assert torch.equal(broken[sure], (far < threat.radius)[sure]) and sure.sum() > 20
    assert length.max() <= threat.radius + 1e-6


@pytest.mark.parametrize("ball", [LinfBall, L2Ball])
@pytest.mark.parametrize("part", STANDARD)
def test_nothing_falls_that_cannot_and_it_comes_back_as_it_was(part, ball):
    model = linear(5)
    x, y, far, threat = half_of_them(model, ball)
    given = x.clone()
    found, broken = turned(AutoAttack(threat, **SMALL), part, model, x, y)
    assert broken.any() and not broken[far > 1.0001 * threat.radius].any()
    assert torch.equal(found[~broken], x[~broken]) and not (found[broken] == x[broken]).flatten(1).all(1).any()
    assert torch.equal(x, given)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_loss_for_few_classes(classes):
    attack = AutoAttack()._made("apgd-t", None, torch.device("cpu"), classes, None)
    logits = torch.tensor([[3.0, 1.0, -1.0], [0.5, 2.0, 4.0]])[:, :classes]
    y, attack.y_target = torch.tensor([0, 1]), torch.tensor([1, 0])
    expected = [-2.0, -1.5] if classes == 2 else [-2.0 / 3.0, -1.5 / 2.75]
    assert attack.dlr_loss_targeted(logits, y).tolist() == pytest.approx(expected)


def test_three_classes_with_gradients_are_not_said_to_have_none():
    model = linear(3)
    x, y, _, threat = half_of_them(model, LinfBall)
    turned(AutoAttack(threat, iterations=2), "apgd-t", model, x, y, silent)


def test_from_four_classes_on_the_loss_is_the_reference_s():
    from pyautoattack.autopgd_base import APGDAttack_targeted

    attack = AutoAttack()._made("apgd-t", None, torch.device("cpu"), 4, None)
    assert attack.dlr_loss_targeted.__func__ is APGDAttack_targeted.dlr_loss_targeted


@pytest.mark.parametrize(("classes", "targets"), [(2, 1), (3, 2), (9, 8), (10, 9), (100, 9)])
@pytest.mark.parametrize("part", ["apgd-t", "fab-t"])
def test_as_many_targets_as_there_are(part, classes, targets):
    assert AutoAttack()._made(part, None, torch.device("cpu"), classes, None).n_target_classes == targets


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (100, []),
        (10, []),
        (5, ["4 targets"]),
        (3, ["2 targets", "(z_t - z_y) / (z_1 - (z_2 + z_3) / 2)"]),
        (2, ["1 ", "margin"]),
    ],
)
def test_what_few_classes_change_is_said(classes, words):
    said = AutoAttack().substitutions(classes)
    assert len(said) == len(words) and all(word in text for word, text in zip(words, said, strict=True))


def test_attacks_without_targets_have_none_replaced():
    assert AutoAttack(parts=("apgd-ce", "square")).substitutions(3) == []


@pytest.mark.parametrize("threat", [LinfBall(0.03), L2Ball(0.5)], ids=["linf", "l2"])
@pytest.mark.parametrize(
    ("part", "theirs"), [("apgd-ce", "apgd"), ("apgd-t", "apgd_targeted"), ("fab-t", "fab"), ("square", "square")]
)
def test_every_parameter_is_the_reference_s(part, theirs, threat):
    from pyautoattack import AutoAttack as Reference

    attack = AutoAttack(threat, seed=3)
    ensemble = Reference(None, norm=attack.norm, eps=threat.radius, seed=3)
    ours = vars(attack._made(part, None, torch.device("cpu"), 10, None))
    reference = vars(getattr(ensemble, theirs)) | ({"targeted": True} if part == "fab-t" else {})
    assert ensemble.attacks_to_run == list(STANDARD) == list(attack.parts)
    assert len(ours) > 10 and ours.keys() == reference.keys()
    assert {name for name in ours if ours[name] != reference[name]} <= {"device", "logger"}


@pytest.mark.parametrize("changes", [{}, {"seed": 7}, {"threat": L2Ball(0.1)}])
def test_the_whole_ensemble_is_called_ra_aa(changes):
    assert AutoAttack(**changes).label == "RA-AA"


@pytest.mark.parametrize(
    "changes",
    [
        *({"parts": STANDARD[:n]} for n in (1, 2, 3)),
        {"parts": STANDARD[::-1]},
        {"iterations": 99},
        {"iterations": 101},
        {"targets": 8},
        {"queries": 4999},
        {"parts": QUICK, "iterations": 10},
    ],
)
def test_anything_less_has_another_name(changes):
    label = AutoAttack(**changes).label
    assert "RA-AA" not in label and (label == "RA-APGD") == (changes == {"parts": QUICK})
    assert label == "RA-APGD" or all(part in label for part in changes.get("parts", STANDARD))


def test_other_targets_make_another_name():
    assert AutoAttack(targets=3).label != AutoAttack(targets=5).label


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"threat": 8 / 255}, "l-infinity and l2"),
        ({"parts": ()}, "apgd-ce"),
        ({"parts": ("apgd-dlr",)}, "apgd-ce"),
        ({"parts": ("square", "square")}, "each once"),
        ({"iterations": 0}, "at least 1"),
        ({"targets": 0}, "at least 1"),
        ({"queries": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_refused(changes, word):
    with pytest.raises(UsageError, match=word):
        AutoAttack(**changes)


def surroundings():
    loggers = {name: logging.getLogger(name) for name in ("", "auto-attack")}
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(np.random.get_state()),
        sys.gettrace(),
        list(warnings.filters),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        {name: (one.level, list(one.handlers), one.disabled) for name, one in loggers.items()},
    )


@pytest.mark.parametrize("part", STANDARD)
def test_an_attack_leaves_nothing_behind(part):
    model = linear(5)
    x, y = right_answers(model, 6)
    model[1].bias.grad = torch.full((5,), 3.0)
    before = surroundings()
    turned(AutoAttack(LinfBall(0.03), **SMALL), part, model, x, y)
    assert surroundings() == before
    assert model[1].weight.grad is None and model[1].bias.grad.tolist() == [3.0] * 5
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_with_three_classes_every_target_has_a_gradient():
    attack = AutoAttack()._made("apgd-t", None, torch.device("cpu"), 3, None)
    logits = torch.tensor([[3.0, 1.0, -1.0]], requires_grad=True)
    attack.y_target = torch.tensor([2])  # the least likely, where (z_t - z_y) / (z_1 - z_3) is -1
    assert torch.autograd.grad(attack.dlr_loss_targeted(logits, torch.tensor([0])).sum(), logits)[0].abs().max() > 0.1


@pytest.mark.parametrize("part", ["apgd-ce", "apgd-t", "square"])
def test_the_draws_follow_from_the_seed_alone(part):
    model = linear(5)
    x, y = right_answers(model)
    found = []
    for state, seed in ((3, 0), (4, 0), (4, 1)):
        torch.manual_seed(state)
        attack = AutoAttack(L2Ball(0.3), iterations=1, queries=3, seed=seed)
        found.append(turned(attack, part, model, x, y)[0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_network_without_a_gradient_is_spoken_of():
    model, said = linear(5), []
    nn.init.zeros_(model[1].weight)
    x, y = right_answers(model, 4)
    assert not turned(AutoAttack(**SMALL), "apgd-t", model, x, y, said.append)[1].any()
    assert said and all("points with zero gradient" in text and "flags_doc" not in text for text in said)


class Noisy(nn.Module):
    def forward(self, x):
        return x.flatten(1) + torch.rand(len(x), x[0].numel())


class Purified(nn.Module):
    """Takes a derivative in its forward."""

    def forward(self, x):
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            return x.flatten(1) * torch.autograd.grad(point.square().sum(), point)[0].flatten(1)


class Broken(nn.Module):
    def forward(self, x):
        if sys.gettrace() is not None and "tracefunc" in repr(sys.gettrace()):
            raise RuntimeError("in the middle of the check")
        return x.flatten(1)


def tracer(frame, event, argument):
    return None


@pytest.fixture
def traced():
    before = sys.gettrace()
    sys.settrace(tracer)
    yield
    sys.settrace(before)


FEW = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (Noisy(), "randomized"),
        (nn.Sequential(nn.Flatten(), nn.Softmax(1)), "probability"),
        (Purified(), "dynamic"),
        (nn.Flatten(), None),
    ],
)
def test_what_the_reference_would_say_of_a_network(model, word, traced):
    before = surroundings()
    said = warnings_about(model, *FEW)
    assert surroundings() == before and sys.gettrace() is tracer
    assert (len(said) == 1 and word in said[0] and "flags_doc" not in said[0]) if word else said == []


def test_derivatives_of_an_earlier_network_are_not_held_against_the_next():
    from pyautoattack import checks

    assert len(warnings_about(Purified(), *FEW)) == 1
    assert warnings_about(nn.Flatten(), *FEW) == []
    checks.funcs["grad"] = 3  # by somebody who calls the reference directly
    assert warnings_about(nn.Flatten(), *FEW) == [] and set(checks.funcs.values()) == {0}


def test_the_trace_function_comes_back_after_a_failure(traced):
    with pytest.raises(RuntimeError, match="in the middle"):
        warnings_about(Broken(), *FEW)
    assert sys.gettrace() is tracer
    assert warnings_about(nn.Flatten(), *FEW) == []


@pytest.mark.parametrize(("square", "said"), [(0.5, 0), (0.499, 0), (0.4, 1)])
def test_square_below_the_gradients_is_said(square, said):
    found = warnings_after({"clean": 0.9, "apgd-ce": 0.6, "apgd-t": 0.5, "fab-t": 0.5, "square": square})
    assert len(found) == said and all("10.00%" in text and "flags_doc" not in text for text in found)


def test_the_reference_is_named_with_its_version():
    from importlib.metadata import version

    assert reference_version() == f"pyautoattack {version('pyautoattack')}"
