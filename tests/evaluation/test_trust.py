"""Checks of whether numbers can be trusted: on networks that hide their gradients, and on results made by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.attacks.autoattack import AutoAttack
from doubly.bilevel import NormalizedStep, SignStep
from doubly.evaluation.api import evaluate
from doubly.evaluation.result import EvalResult
from doubly.evaluation.trust import (
    Check,
    checks_of_attacks,
    checks_of_result,
    summarize_checks,
    unbounded_attack,
)
from doubly.threat import L2Ball, LinfBall

EPSILON = 0.1
ATTACK = PGD(LinfBall(EPSILON), 5, SignStep(0.05))
ENSEMBLE = AutoAttack(LinfBall(EPSILON), ("apgd-ce", "square"), iterations=5, queries=100)


class Threshold(nn.Module):
    """Predicts 1 where the mean pixel exceeds a half."""

    def __init__(self, scale=10.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        margin = self.scale * (x.mean((1, 2, 3)) - 0.5)
        return torch.stack([-margin, margin], 1)


class Steps(Threshold):
    """Rounds the pixels to few levels, so there is no gradient."""

    def forward(self, x):
        return super().forward((x * 50).round() / 50)


class WrongDirection(Threshold):
    """Has a gradient that points away from where the loss grows."""

    def forward(self, x):
        logits = super().forward(x)
        return 2 * logits.detach() - logits


def near_boundary(n=64, side=2):
    """Images that an attack can break: half of them darker than a half by about 0.03, half lighter."""
    y = torch.arange(n) % 2
    x = 0.5 + 0.06 * (y - 0.5) + torch.linspace(-0.02, 0.02, n)
    return x.view(-1, 1, 1, 1).expand(-1, 1, side, side).contiguous(), y


def lines(result):
    return {line["name"]: line for line in result.trust["lines"]}


def suspicious(result):
    return {name for name, line in lines(result).items() if line["verdict"] == "suspicious"}


def test_an_honest_network_is_fine_whether_weak_or_robust():
    x, y = near_boundary(side=5)
    for threat in (LinfBall(EPSILON), L2Ball(5 * EPSILON)):
        for shift, robust in ((0.0, 0.0), (0.2, 1.0)):
            ensemble = AutoAttack(threat, ("apgd-ce", "square"), iterations=5, queries=50)
            data = x * (1 - shift) + shift * y.view(-1, 1, 1, 1), y
            result = evaluate(Threshold(), data, threat, ["pgd", "margin", ensemble])
            assert (result.sa, result.ra_pgd, result.accuracy("autoattack_in_part")) == (1, robust, robust)
            assert not suspicious(result) and result.trust["verdict"] == "fine"
            assert result.trust["measured"] == result.trust["of"] == 11


def test_a_network_that_hides_its_gradient_is_suspicious(tmp_path):
    for network, expected in (
        (Steps(), {"zero gradients", "unbounded attack"}),
        (Threshold(1e4), {"zero gradients", "logit scale", "PGD minus PGD on the logit margin"}),
        (WrongDirection(), {"unbounded attack"}),
        (Threshold(1e-6), {"logit scale"}),
    ):
        result = evaluate(network, near_boundary(), LinfBall(EPSILON), output=tmp_path)
        assert result.trust["verdict"] == "suspicious" and expected <= suspicious(result)
        saved = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))["trust"]
        assert saved == result.trust
        for line in saved["lines"]:
            assert line["text"] and "\n" not in line["text"]
            assert (line["value"] is None) == (line["verdict"] == "not measured")


def test_square_finds_what_a_hidden_gradient_does_not():
    for network in (Steps(), WrongDirection()):
        result = evaluate(network, near_boundary(), LinfBall(EPSILON), [replace(ATTACK, start="zero"), ENSEMBLE])
        assert result.ra_pgd == 1 and result.accuracy("autoattack_in_part") < 0.2
        expected = {"Square beats white-box", "PGD minus AutoAttack", "AutoAttack's own warnings"}
        assert expected <= suspicious(result)
        gain = result.robust_after["apgd-ce"].mean() - result.accuracy("autoattack_in_part")
        assert lines(result)["Square beats white-box"]["value"] == pytest.approx(gain)


def test_a_network_without_gradient_is_suspicious_whatever_attack_is_run():
    for attacks in (["margin"], [FGSM(LinfBall(EPSILON))], [replace(ENSEMBLE, parts=("apgd-ce",))]):
        result = evaluate(Threshold(1e-6), near_boundary(), LinfBall(EPSILON), attacks)
        assert {"zero gradients", "logit scale", "more steps", "more restarts", "unbounded attack"} <= set(
            lines(result)
        )
        assert result.trust["verdict"] == "suspicious"


def attack_checks(network, x, y, attack=ATTACK):
    return {check.name: check for check in checks_of_attacks(network, x, y, attack)}


def test_more_steps_and_restarts_show_that_an_attack_is_too_weak():
    short = attack_checks(Threshold(), *near_boundary(), PGD(LinfBall(EPSILON), 1, SignStep(0.02), "zero"))
    assert short["more steps"].verdict == "suspicious" and short["more steps"].value == 0.75
    assert (short["more restarts"].value, short["more restarts"].verdict) == (0.0, "fine")
    lucky = attack_checks(Threshold(), *near_boundary(64, 1), PGD(LinfBall(EPSILON), 0))
    assert lucky["more restarts"].verdict == "suspicious" and 0.4 < lucky["more restarts"].value < 0.8
    l2 = attack_checks(Threshold(), *near_boundary(), PGD(L2Ball(0.2), 5, NormalizedStep(0.05)))
    assert {check.verdict for check in l2.values()} == {"fine"}


def test_zero_gradients_count_among_correct_images_only():
    x, y = near_boundary(16)
    y = torch.where(torch.arange(16) < 8, 1 - y, y)

    class HalfHidden(Threshold):
        def forward(self, x):
            logits = super().forward(x)
            hidden = (torch.arange(len(x)) < 9).view(-1, 1) & (torch.tensor(len(x)) == 16)
            return torch.where(hidden, logits.detach(), logits)

    assert attack_checks(HalfHidden(), x, y)["zero gradients"].value == 1 / 8
    assert attack_checks(HalfHidden(), x, 1 - near_boundary(16)[1])["zero gradients"].value == 0


def test_the_logit_scale_is_the_median_gap_of_the_two_largest_logits():
    class Fixed(nn.Module):
        def forward(self, x):
            if len(x) == 3:
                logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
                return logits + 0 * x.mean((1, 2, 3))[:, None]
            return torch.eye(3)[:1].repeat(len(x), 1) + x.mean((1, 2, 3))[:, None]

    x, y = torch.full((3, 1, 1, 1), 0.5), torch.tensor([2, 2, 2])
    assert attack_checks(Fixed(), x, y)["logit scale"].value == 2


def test_an_unbounded_attack_can_reach_every_image():
    x, y = torch.zeros(2, 1, 3, 3), torch.tensor([0, 0])
    for threat in (LinfBall(0.01), L2Ball(0.01)):
        delta = unbounded_attack(threat, x)(Threshold(), x, y, torch.Generator())
        assert torch.allclose(x + delta, torch.ones_like(x), atol=1e-4)


def test_the_checks_leave_the_network_as_it_was():
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4, 2)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    checks_of_attacks(network, *near_boundary(), ATTACK)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


Y = np.arange(1000) % 2


def first_correct(count):
    return np.where(np.arange(1000) < count, Y, 1 - Y)


def result_checks(predictions, **fields):
    result = EvalResult(Y, ("a", "b"), {"clean": Y, **predictions}, **fields)
    return {check.name: check for check in checks_of_result(result, {"repeat": 1e-7, "batch": 2e-6})}


def test_a_gap_is_suspicious_beyond_its_limit():
    """At the limit itself rounding decides."""
    for attack, name, limit in (
        ("autoattack", "PGD minus AutoAttack", 80),
        ("margin", "PGD minus PGD on the logit margin", 50),
    ):
        for more, verdict in ((-5, "fine"), (5, "unclear"), (25, "suspicious")):  # of 1,000 images
            predictions = {"pgd": first_correct(600), attack: first_correct(600 - limit - more)}
            result = result_checks(predictions)[name]
            assert result.verdict == verdict and result.value == pytest.approx((limit + more) / 1000)
            assert f"{(limit + more) / 10:.1f} points on the same 1000 images" in result.text
    stronger = {"pgd": first_correct(500), "autoattack": first_correct(540)}
    assert result_checks(stronger)["PGD minus AutoAttack"].verdict == "suspicious"


def test_a_gap_is_that_of_the_samples_that_both_attacks_were_run_on():
    half = np.where(np.arange(1000) < 500, first_correct(250), -1)
    result = result_checks({"pgd": first_correct(500), "autoattack": half})["PGD minus AutoAttack"]
    assert result.value == 0.5 and "the same 500 images" in result.text
    neither = result_checks({"pgd": Y, "autoattack": np.full(1000, -1)})
    assert neither["PGD minus AutoAttack"].verdict == "not measured"


def test_few_images_are_neither_fine_nor_suspicious_by_chance():
    for n, broken, verdict in [
        (20, 0, "unclear"),  # up to 16 % may be broken
        (20, 2, "unclear"),  # 10 %, and the interval begins at 3 %
        (20, 12, "suspicious"),
        (100, 0, "fine"),
        (100, 7, "unclear"),
        (1000, 70, "suspicious"),
    ]:
        y = np.zeros(n, int)
        predictions = {"clean": y, "pgd": y, "margin": np.where(np.arange(n) < broken, 1, 0)}
        checks = checks_of_result(EvalResult(y, ("a", "b"), predictions), {"batch": 0.0})
        line = next(check for check in checks if check.name == "PGD minus PGD on the logit margin")
        assert (line.verdict, line.value) == (verdict, pytest.approx(broken / n)), (n, broken)
        assert summarize_checks(checks)["verdict"] in (verdict, "too little was measured")


def test_what_was_not_run_is_not_measured():
    result = result_checks({})
    assert {name for name, check in result.items() if check.verdict != "not measured"} == {"batch invariance"}
    assert all((check.value is None) == (check.verdict == "not measured") for check in result.values())
    assert result["batch invariance"].value == 2e-6


def test_square_may_break_what_the_reference_allows():
    for broken, verdict in ((0, "fine"), (1, "fine"), (3, "unclear"), (9, "suspicious")):
        after = {"apgd-ce": np.arange(1000) < 400, "square": np.arange(1000) < 400 - broken}
        result = result_checks({"autoattack": first_correct(400 - broken)}, robust_after=after)
        check = result["Square beats white-box"]
        assert (check.verdict, check.value) == (verdict, pytest.approx(broken / 1000))
    first = {"square": np.arange(1000) < 500, "apgd-ce": np.arange(1000) < 250}
    result = result_checks({"autoattack": first_correct(250)}, robust_after=first)
    assert result["Square beats white-box"].verdict == "not measured"


def test_attacked_images_outside_the_ball_or_predicted_otherwise_are_suspicious():
    for outside, changed in ((0, 0), (1, 0), (0, 2), (1, 2)):
        checked = {"n": 9, "asked": 9, "outside": outside, "changed": changed, "largest": 1.0000001}
        result = result_checks({"pgd": Y}, examples=checked)["examples re-checked"]
        assert result.value == outside + changed
        assert result.verdict == ("suspicious" if outside + changed else "fine")
        assert f"{outside} outside" in result.text and f"{changed} of 9 predicted otherwise" in result.text


def test_warnings_of_the_reference_are_repeated():
    for warnings, expected in (([], (0.0, "fine", "none")), (["a", "b"], (2.0, "suspicious", "a; b"))):
        result = result_checks({}, autoattack={"label": "x", "warnings": warnings})["AutoAttack's own warnings"]
        assert result[1:] == expected


def test_one_suspicious_check_makes_the_verdict_suspicious():
    for verdicts, expected in (
        (["not measured"], ("too little was measured", 0, 11)),
        (["fine", "not measured"], ("too little was measured", 1, 11)),
        (["fine"] * 6 + ["not measured"], ("fine", 6, 11)),
        (["fine", "suspicious", "not measured"], ("suspicious", 2, 11)),
        (["suspicious"], ("suspicious", 1, 11)),
    ):
        result = summarize_checks([Check(str(i), 0.0, verdict, "text") for i, verdict in enumerate(verdicts)])
        assert (result["verdict"], result["measured"], result["of"]) == expected
        assert [line["verdict"] for line in result["lines"] if line["text"] == "text"] == verdicts
