"""The attacks of AutoAttack on one batch: the reference's parameters, closed forms, and nothing left behind."""

import logging
import random
import sys
import warnings
from importlib.metadata import version

import numpy as np
import pytest
import torch
from pyautoattack import AutoAttack as Reference
from pyautoattack import checks
from pyautoattack.autopgd_base import APGDAttack_targeted
from torch import nn

from doubly.attacks import attack_context
from doubly.attacks.autoattack import QUICK, STANDARD, AutoAttack, reference_version, warnings_about, warnings_after
from doubly.errors import UsageError
from doubly.threat import L2Ball, LinfBall, Threat

SMALL = {"iterations": 20, "queries": 60}


def no_warning(text):
    raise AssertionError(text)


def ignore(text):
    return None


def linear(classes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, classes))


def correct_images(model, n=24):
    """Images away from 0 and 1, so that the range never limits an attack, with the network's predictions as labels."""
    x = 0.3 + 0.4 * torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return x, model(x).argmax(1).detach()


def attack_images(attack, part, model, x, y, warn=no_warning):
    """Return (attacked images, which of them are broken)."""
    with attack_context(model, "eval"):
        attacked = attack.perturb(part, model, x, y, model(x).shape[1], warn)
        return attacked, model(attacked).argmax(1) != y


def half_broken(model, kind):
    """Return images, labels, their distances to the decision boundary, and a ball that reaches half of them."""
    x, y = correct_images(model)
    weight, logits = model[1].weight.detach(), model(x).detach()
    lead = logits.gather(1, y[:, None]) - logits
    distances = lead / (weight[None] - weight[y][:, None]).norm(1 if kind is LinfBall else 2, dim=2)
    distance = distances.scatter(1, y[:, None], torch.inf).amin(1)
    return x, y, distance, kind(float(distance.median()) * 1.001)


def reference_attack(part, classes, attack=None):
    return (attack or AutoAttack())._reference_attack(part, None, torch.device("cpu"), classes, None)


def test_a_linear_network_is_broken_exactly_where_its_closed_form_says():
    for classes in (2, 3, 5, 11):
        for kind in (LinfBall, L2Ball):
            model = linear(classes)
            x, y, distance, threat = half_broken(model, kind)
            decided = (distance / threat.radius - 1).abs() > 0.01
            for part in ("apgd-t", "fab-t"):
                attacked, broken = attack_images(AutoAttack(threat, iterations=25), part, model, x, y, ignore)
                assert torch.equal(broken[decided], (distance < threat.radius)[decided]) and decided.sum() > 20
                assert threat.length(attacked - x).max() <= threat.radius + 1e-6


def test_images_that_cannot_be_broken_come_back_unchanged():
    for kind in (LinfBall, L2Ball):
        model = linear(5)
        x, y, distance, threat = half_broken(model, kind)
        before = x.clone()
        for part in STANDARD:
            attacked, broken = attack_images(AutoAttack(threat, **SMALL), part, model, x, y)
            assert broken.any() and not broken[distance > 1.0001 * threat.radius].any()
            assert torch.equal(attacked[~broken], x[~broken])
            assert not (attacked[broken] == x[broken]).flatten(1).all(1).any()
            assert torch.equal(x, before)


@pytest.mark.parametrize("threat", [LinfBall(0.03), L2Ball(0.5)], ids=["linf", "l2"])
def test_every_parameter_is_the_reference_s(threat):
    names = {"apgd-ce": "apgd", "apgd-t": "apgd_targeted", "fab-t": "fab", "square": "square"}
    attack, ensemble = AutoAttack(threat, seed=3), Reference(None, norm=threat.norm, eps=threat.radius, seed=3)
    assert ensemble.attacks_to_run == list(STANDARD) == list(attack.parts)
    for part, name in names.items():
        ours = vars(reference_attack(part, 10, attack))
        theirs = vars(getattr(ensemble, name)) | ({"targeted": True} if part == "fab-t" else {})
        assert len(ours) > 10 and ours.keys() == theirs.keys()
        assert {key for key in ours if ours[key] != theirs[key]} <= {"device", "logger"}


def test_with_few_classes_the_loss_is_replaced_and_has_a_gradient_for_every_target():
    for classes, expected in ((2, [-2.0, -1.5]), (3, [-2.0 / 3.0, -1.5 / 2.75])):
        attack = reference_attack("apgd-t", classes)
        logits = torch.tensor([[3.0, 1.0, -1.0], [0.5, 2.0, 4.0]])[:, :classes]
        attack.y_target = torch.tensor([1, 0])
        assert attack.dlr_loss_targeted(logits, torch.tensor([0, 1])).tolist() == pytest.approx(expected)
    logits = torch.tensor([[3.0, 1.0, -1.0]], requires_grad=True)
    attack.y_target = torch.tensor([2])  # the least likely, where (z_t - z_y) / (z_1 - z_3) is -1
    loss = attack.dlr_loss_targeted(logits, torch.tensor([0])).sum()
    assert torch.autograd.grad(loss, logits)[0].abs().max() > 0.1
    model = linear(3)
    x, y, _, threat = half_broken(model, LinfBall)
    attack_images(AutoAttack(threat, iterations=2), "apgd-t", model, x, y, no_warning)
    four = reference_attack("apgd-t", 4)
    assert four.dlr_loss_targeted.__func__ is APGDAttack_targeted.dlr_loss_targeted


def test_there_are_as_many_targets_as_the_classes_allow_and_the_result_says_so():
    for classes, targets, words in (
        (100, 9, []),
        (10, 9, []),
        (9, 8, ["8 targets"]),
        (5, 4, ["4 targets"]),
        (3, 2, ["2 targets", "(z_t - z_y) / (z_1 - (z_2 + z_3) / 2)"]),
        (2, 1, ["1 ", "margin"]),
    ):
        for part in ("apgd-t", "fab-t"):
            assert reference_attack(part, classes).n_target_classes == targets
        sentences = AutoAttack().substitutions(classes)
        assert len(sentences) == len(words)
        assert all(word in text for word, text in zip(words, sentences, strict=True))
    assert AutoAttack(parts=("apgd-ce", "square")).substitutions(3) == []


def test_only_the_whole_ensemble_is_called_ra_aa():
    for settings in ({}, {"seed": 7}, {"threat": L2Ball(0.1)}):
        assert AutoAttack(**settings).label == "RA-AA" and AutoAttack(**settings).name == "autoattack"
    for settings in (
        *({"parts": STANDARD[:n]} for n in (1, 2, 3)),
        {"parts": STANDARD[::-1]},
        {"iterations": 99},
        {"iterations": 101},
        {"targets": 8},
        {"queries": 4999},
        {"parts": QUICK, "iterations": 10},
    ):
        attack = AutoAttack(**settings)
        assert "RA-AA" not in attack.label and (attack.label == "RA-APGD") == (settings == {"parts": QUICK})
        assert attack.label == "RA-APGD" or all(part in attack.label for part in settings.get("parts", STANDARD))
        assert attack.name == ("apgd" if attack.label == "RA-APGD" else "autoattack_in_part")
    assert AutoAttack(targets=3).label != AutoAttack(targets=5).label


def test_refusals():
    class Cube(Threat):
        norm = "L7"

    for settings, message in (
        ({"threat": Cube()}, "l-infinity, l2 and l1 balls, got Cube"),
        ({"parts": ()}, "apgd-ce"),
        ({"parts": ("apgd-dlr",)}, "apgd-ce"),
        ({"parts": ("square", "square")}, "each once"),
        ({"iterations": 0}, "at least 1"),
        ({"targets": 0}, "at least 1"),
        ({"queries": 0}, "at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            AutoAttack(**settings)
    with pytest.raises(UsageError, match="at least 5 x 5 pixels"):
        AutoAttack(L2Ball(0.1)).check((4, 8))
    AutoAttack(LinfBall(0.1)).check((4, 8))


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


def test_an_attack_leaves_nothing_behind():
    model = linear(5)
    x, y = correct_images(model, 6)
    model[1].bias.grad = torch.full((5,), 3.0)
    before = surroundings()
    for part in STANDARD:
        attack_images(AutoAttack(LinfBall(0.03), **SMALL), part, model, x, y)
        assert surroundings() == before
        assert model[1].weight.grad is None and model[1].bias.grad.tolist() == [3.0] * 5
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_random_numbers_follow_from_the_seed_alone():
    model = linear(5)
    x, y = correct_images(model)
    for part in ("apgd-ce", "apgd-t", "square"):
        result = []
        for state, seed in ((3, 0), (4, 0), (4, 1)):
            torch.manual_seed(state)
            attack = AutoAttack(L2Ball(0.3), iterations=1, queries=3, seed=seed)
            result.append(attack_images(attack, part, model, x, y)[0])
        assert torch.equal(result[0], result[1]) and not torch.equal(result[0], result[2])


def test_a_network_without_a_gradient_gives_a_warning():
    model, messages = linear(5), []
    nn.init.zeros_(model[1].weight)
    x, y = correct_images(model, 4)
    assert not attack_images(AutoAttack(**SMALL), "apgd-t", model, x, y, messages.append)[1].any()
    assert messages and all("points with zero gradient" in text and "flags_doc" not in text for text in messages)


class Noisy(nn.Module):
    def forward(self, x):
        return x.flatten(1) + torch.rand(len(x), x[0].numel())


class Purifying(nn.Module):
    """Takes a derivative in its forward pass."""

    def forward(self, x):
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            return x.flatten(1) * torch.autograd.grad(point.square().sum(), point)[0].flatten(1)


class Failing(nn.Module):
    def forward(self, x):
        if sys.gettrace() is not None and "tracefunc" in repr(sys.gettrace()):
            raise RuntimeError("in the middle of the check")
        return x.flatten(1)


def trace(frame, event, argument):
    return None


@pytest.fixture
def traced():
    before = sys.gettrace()
    sys.settrace(trace)
    yield
    sys.settrace(before)


FOUR = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 3])


def test_the_reference_s_warnings_about_a_network_are_returned(traced):
    for model, word in (
        (Noisy(), "randomized"),
        (nn.Sequential(nn.Flatten(), nn.Softmax(1)), "probability"),
        (Purifying(), "dynamic"),
        (nn.Flatten(), None),  # also after a network with a warning
    ):
        before = surroundings()
        result = warnings_about(model, *FOUR)
        assert surroundings() == before and sys.gettrace() is trace
        assert (len(result) == 1 and word in result[0] and "flags_doc" not in result[0]) if word else result == []
    checks.funcs["grad"] = 3  # as a caller of the reference might leave it
    assert warnings_about(nn.Flatten(), *FOUR) == [] and set(checks.funcs.values()) == {0}
    with pytest.raises(RuntimeError, match="in the middle"):
        warnings_about(Failing(), *FOUR)
    assert sys.gettrace() is trace and warnings_about(nn.Flatten(), *FOUR) == []


def test_square_below_the_gradient_attacks_gives_a_warning():
    for square, count in ((0.5, 0), (0.499, 0), (0.4, 1)):
        result = warnings_after({"clean": 0.9, "apgd-ce": 0.6, "apgd-t": 0.5, "fab-t": 0.5, "square": square})
        assert len(result) == count and all("10.00%" in text and "flags_doc" not in text for text in result)


def test_the_reference_is_named_with_its_version():
    assert reference_version() == f"pyautoattack {version('pyautoattack')}"
