import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.attacks.autoattack import AutoAttack
from doubly.bilevel import NormalizedStep, SignStep
from doubly.evaluation import trust
from doubly.evaluation.api import evaluate
from doubly.evaluation.result import EvalResult
from doubly.threat import L2Ball, LinfBall

EPSILON = 0.1
ATTACK = PGD(LinfBall(EPSILON), 5, SignStep(0.05))
SOME = AutoAttack(LinfBall(EPSILON), ("apgd-ce", "square"), iterations=5, queries=100)


class Threshold(nn.Module):
    """Class 1 where the mean pixel exceeds a half."""

    def __init__(self, scale=10.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        margin = self.scale * (x.mean((1, 2, 3)) - 0.5)
        return torch.stack([-margin, margin], 1)


class Steps(Threshold):
    """Pixels in few levels: there is no gradient."""

    def forward(self, x):
        return super().forward((x * 50).round() / 50)


class Elsewhere(Threshold):
    """The gradient points away from where the loss grows."""

    def forward(self, x):
        logits = super().forward(x)
        return 2 * logits.detach() - logits


def near(n=16, side=2):
    """Images that an attack can turn: half of them darker than a half by 0.03, half lighter."""
    y = torch.arange(n) % 2
    x = 0.5 + 0.06 * (y - 0.5) + torch.linspace(-0.02, 0.02, n)
    return x.view(-1, 1, 1, 1).expand(-1, 1, side, side).contiguous(), y


def lines(found):
    return {line["name"]: line for line in found.trust["lines"]}


def suspicious(found):
    return {name for name, line in lines(found).items() if line["verdict"] == "suspicious"}


@pytest.mark.parametrize(("apart", "robust"), [(0.0, 0.0), (0.2, 1.0)], ids=["weak", "robust"])
@pytest.mark.parametrize("threat", [LinfBall(EPSILON), L2Ball(5 * EPSILON)], ids=["linf", "l2"])
def test_an_honest_network_is_fine(threat, apart, robust):
    x, y = near(side=5)
    some = AutoAttack(threat, ("apgd-ce", "square"), iterations=5, queries=50)
    found = evaluate(Threshold(), (x * (1 - apart) + apart * y.view(-1, 1, 1, 1), y), threat, ["pgd", "margin", some])
    assert (found.sa, found.ra_pgd, found.accuracy("autoattack_in_part")) == (1, robust, robust)
    assert not suspicious(found) and found.trust["verdict"] == "fine"
    assert found.trust["measured"] == found.trust["of"] == 11


@pytest.mark.parametrize(
    ("network", "caught"),
    [
        (Steps(), {"zero gradients", "unbounded attack"}),
        (Threshold(1e4), {"zero gradients", "logit scale", "PGD minus PGD on the logit margin"}),
        (Elsewhere(), {"unbounded attack"}),
        (Threshold(1e-6), {"logit scale"}),
    ],
    ids=["steps", "saturated", "elsewhere", "flat"],
)
def test_a_network_that_hides_its_gradient_is_called_suspicious(network, caught, tmp_path):
    found = evaluate(network, near(), LinfBall(EPSILON), output=tmp_path)
    assert found.trust["verdict"] == "suspicious" and caught <= suspicious(found)
    kept = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))["trust"]
    assert kept == found.trust
    for line in kept["lines"]:
        assert line["text"] and "\n" not in line["text"]
        assert (line["value"] is None) == (line["verdict"] == "not measured")


@pytest.mark.parametrize("network", [Steps(), Elsewhere()])
def test_square_beats_what_follows_a_hidden_gradient(network):
    found = evaluate(network, near(), LinfBall(EPSILON), [replace(ATTACK, start="zero"), SOME])
    assert found.ra_pgd == 1 and found.accuracy("autoattack_in_part") < 0.2
    caught = {"Square beats white-box", "PGD minus AutoAttack", "AutoAttack's own warnings"}
    assert caught <= suspicious(found)
    assert lines(found)["Square beats white-box"]["value"] == pytest.approx(
        found.after["apgd-ce"].mean() - found.accuracy("autoattack_in_part")
    )


@pytest.mark.parametrize(
    "attacks",
    [["margin"], [FGSM(LinfBall(EPSILON))], [replace(SOME, parts=("apgd-ce",))]],
    ids=["margin", "fgsm", "aa"],
)
def test_a_network_without_gradient_is_caught_whatever_attack_is_run(attacks):
    found = evaluate(Threshold(1e-6), near(), LinfBall(EPSILON), attacks)
    assert {"zero gradients", "logit scale", "more steps", "more restarts", "unbounded attack"} <= set(lines(found))
    assert found.trust["verdict"] == "suspicious"


def validate(network, x, y, attack=ATTACK):
    return {line.name: line for line in trust.attack_checks(network, x, y, attack)}


def test_more_steps_show_that_the_attack_was_too_weak():
    short = PGD(LinfBall(EPSILON), 1, SignStep(0.02), "zero")
    found = validate(Threshold(), *near(), short)
    assert found["more steps"].verdict == "suspicious" and found["more steps"].value == 0.75
    assert found["more restarts"] == ("more restarts", 0.0, "fine", found["more restarts"].text)


def test_more_restarts_show_that_the_attack_was_lucky():
    found = validate(Threshold(), *near(64, 1), PGD(LinfBall(EPSILON), 0))
    assert found["more restarts"].verdict == "suspicious" and 0.4 < found["more restarts"].value < 0.8


def test_a_hidden_gradient_counts_among_right_answers_alone():
    x, y = near()
    y = torch.where(torch.arange(16) < 8, 1 - y, y)

    class Half(Threshold):
        def forward(self, x):
            logits = super().forward(x)
            hidden = (torch.arange(len(x)) < 9).view(-1, 1) & (torch.tensor(len(x)) == 16)
            return torch.where(hidden, logits.detach(), logits)

    assert validate(Half(), x, y)["zero gradients"].value == 1 / 8
    assert validate(Half(), x, 1 - near()[1])["zero gradients"].value == 0


def test_the_logit_scale_is_the_median_gap_of_the_two_largest():
    class Fixed(nn.Module):
        def forward(self, x):
            return torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0], [1.0, 1.0, 0.0]]) + 0 * x.mean((1, 2, 3))[:, None]

    class Given(Fixed):
        def forward(self, x):
            return (
                super().forward(x) if len(x) == 3 else torch.eye(3)[:1].repeat(len(x), 1) + x.mean((1, 2, 3))[:, None]
            )

    assert validate(Given(), torch.full((3, 1, 1, 1), 0.5), torch.tensor([2, 2, 2]))["logit scale"].value == 2


@pytest.mark.parametrize("threat", [LinfBall(0.01), L2Ball(0.01)])
def test_an_unbounded_attack_reaches_every_image(threat):
    x, y = torch.zeros(2, 1, 3, 3), torch.tensor([0, 0])
    delta = trust.unbounded(threat, x)(Threshold(), x, y, torch.Generator())
    assert torch.allclose(x + delta, torch.ones_like(x), atol=1e-4)


def test_a_probe_leaves_the_network_as_it_was():
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4, 2)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    trust.attack_checks(network, *near(), ATTACK)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


Y = np.arange(1000) % 2


def answered(right):
    return np.where(np.arange(1000) < right, Y, 1 - Y)


def read(answers, **about):
    found = EvalResult(Y, ("a", "b"), {"clean": Y, **answers}, **about)
    return {line.name: line for line in trust.from_result(found, {"repeat": 1e-7, "batch": 2e-6})}


@pytest.mark.parametrize(
    ("strong", "name", "limit"),
    [("autoattack", "PGD minus AutoAttack", 80), ("margin", "PGD minus PGD on the logit margin", 50)],
)
def test_a_gap_is_suspicious_beyond_its_limit(strong, name, limit):
    for more, verdict in ((0, "fine"), (-5, "fine"), (5, "suspicious")):
        found = read({"pgd": answered(600), strong: answered(600 - limit - more)})[name]
        assert found.verdict == verdict or more == 0  # at the limit rounding decides
        assert found.value == pytest.approx((limit + more) / 1000)
        assert f"{(limit + more) / 10:.1f} points on the same 1000 images" in found.text


def test_a_gap_is_that_of_the_samples_that_both_attacks_saw():
    half = np.where(np.arange(1000) < 500, answered(250), -1)
    found = read({"pgd": answered(500), "autoattack": half})["PGD minus AutoAttack"]
    assert found.value == 0.5 and "the same 500 images" in found.text
    assert read({"pgd": Y, "autoattack": np.full(1000, -1)})["PGD minus AutoAttack"].verdict == "not measured"


def test_what_was_not_run_is_not_measured():
    found = read({})
    assert {name for name, line in found.items() if line.verdict != "not measured"} == {"batch invariance"}
    assert all((line.value is None) == (line.verdict == "not measured") for line in found.values())
    assert found["batch invariance"].value == 2e-6


@pytest.mark.parametrize(("broken", "verdict"), [(0, "fine"), (1, "fine"), (3, "suspicious")])
def test_square_may_break_what_the_reference_allows(broken, verdict):
    after = {"apgd-ce": np.arange(1000) < 400, "square": np.arange(1000) < 400 - broken}
    found = read({"autoattack": answered(400 - broken)}, after=after)["Square beats white-box"]
    assert (found.verdict, found.value) == (verdict, pytest.approx(broken / 1000))


def test_square_that_came_first_beats_nobody():
    after = {"square": np.arange(1000) < 500, "apgd-ce": np.arange(1000) < 250}
    assert read({"autoattack": answered(250)}, after=after)["Square beats white-box"].verdict == "not measured"


@pytest.mark.parametrize(("outside", "changed"), [(0, 0), (1, 0), (0, 2), (1, 2)])
def test_examples_that_left_the_ball_or_turned_back_are_suspicious(outside, changed):
    checked = {"n": 9, "asked": 9, "outside": outside, "changed": changed, "largest": 1.0000001}
    found = read({"pgd": Y}, examples=checked)["examples re-checked"]
    assert found.value == outside + changed
    assert found.verdict == ("suspicious" if outside + changed else "fine")
    assert f"{outside} outside" in found.text and f"{changed} of 9 answered otherwise" in found.text


@pytest.mark.parametrize(
    ("said", "expected"), [([], (0.0, "fine", "none")), (["random", "dynamic"], (2.0, "suspicious", "random; dynamic"))]
)
def test_warnings_of_the_reference_are_repeated(said, expected):
    found = read({}, autoattack={"label": "x", "warnings": said})["AutoAttack's own warnings"]
    assert found[1:] == expected


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["fine", "not measured"], ("too little was measured", 1, 11)),
        (["fine"] * 6 + ["not measured"], ("fine", 6, 11)),
        (["fine", "suspicious", "not measured"], ("suspicious", 2, 11)),
        (["suspicious"], ("suspicious", 1, 11)),
    ],
)
def test_one_suspicious_line_makes_the_panel_suspicious(verdicts, expected):
    found = trust.panel([trust.Line(str(i), 0.0, verdict, "text") for i, verdict in enumerate(verdicts)])
    assert (found["verdict"], found["measured"], found["of"]) == expected
    given = [line["verdict"] for line in found["lines"] if line["text"] == "text"]
    assert given == verdicts


def test_a_panel_of_nothing_is_not_fine():
    assert trust.panel([trust.Line("a", None, "not measured", "text")])["verdict"] != "fine"


def test_an_l2_attack_is_probed_with_l2_steps():
    found = validate(Threshold(), *near(), PGD(L2Ball(0.2), 5, NormalizedStep(0.05)))
    assert {line.verdict for line in found.values()} == {"fine"}
