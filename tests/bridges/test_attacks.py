"""Attacks of foolbox, torchattacks and adv-lib by name, perturbations from files, and what counts as a failure."""

import importlib.util
import json
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from doubly import L2Ball, LinfBall, evaluate
from doubly.attacks import PGD, Attack
from doubly.bridges.attacks import ForeignAttack, foreign_attack
from doubly.errors import UsageError
from doubly.evaluation.perturbations import read_perturbations
from doubly.evaluation.result import EvalResult
from doubly.threat import Threat

BALL = LinfBall(0.1)
NAMES = {
    "foolbox": [
        (BALL, "LinfPGD,steps=5", False),
        (BALL, "linffmnattack,steps=20", True),
        (BALL, "LinfDeepFoolAttack", True),
        (L2Ball(0.5), "L2PGD,steps=5", False),
        (L2Ball(0.5), "DDNAttack", True),
    ],
    "torchattacks": [
        (BALL, "APGD,steps=5", False),
        (BALL, "PGD", False),
        (L2Ball(0.5), "PGDL2,steps=5", False),
        (L2Ball(0.5), "CW,c=100,steps=100", True),
    ],
    "advlib": [
        (BALL, "pgd_linf,steps=5", False),
        (BALL, "apgd,n_iter=5,loss_function=ce", False),
        (BALL, "fmn,steps=20", True),
        (L2Ball(0.5), "ddn,steps=20", True),
        (L2Ball(0.5), "fab,n_iter=5", True),
    ],
}


@pytest.fixture
def line():
    """Two classes, told apart by w·x + b: the smallest perturbations are known."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 2))
    x, w = 0.5 + 0.1 * torch.randn(20, 1, 3, 3), net[1].weight
    with torch.no_grad():
        net[1].bias.copy_(torch.tensor([0.0, float((w[0] - w[1]).sum() / 2)]))
        y = net(x).argmax(1)
    y[3] = 1 - y[3]  # misclassified without an attack
    score = (net(x)[:, 0] - net(x)[:, 1]).abs().detach()
    return net, (x.clamp(0, 1), y), score, (w[0] - w[1]).detach().reshape(1, 3, 3)


@dataclass(frozen=True)
class Shortest(Attack):
    """The smallest perturbation in l-infinity that crosses the line, times a factor."""

    threat: Threat
    score: torch.Tensor
    direction: torch.Tensor
    radius: bool = True
    may_leave: ClassVar[bool] = True

    @property
    def finds_radius(self):
        return self.radius

    def __call__(self, model, x, y, generator=None):
        distance = 1.0001 * self.score / self.direction.abs().sum()
        side = (model(x)[:, 1] - model(x)[:, 0]).sign()
        return (distance * side).reshape(-1, 1, 1, 1) * self.direction.sign()


def test_radii_of_a_linear_network_are_the_closed_form(line, tmp_path):
    net, data, score, direction = line
    radii = (score / direction.abs().sum()).numpy()
    radii[3] = 0
    result = evaluate(
        net, data, LinfBall(0.02), {"near": Shortest(LinfBall(0.02), score, direction)}, output=tmp_path, trust=False
    )
    assert np.allclose(result.radii["near"], radii, rtol=1e-3, atol=1e-6)
    assert result.accuracy("near") == np.mean(result.radii["near"] > 0.02)
    points = {point["epsilon"]: point["accuracy"] for point in result.curve["points"]}
    assert points == {k * 0.02: np.mean(result.radii["near"] > k * 0.02) for k in (0, 0.25, 0.5, 1, 1.5, 2, 3, 4)}
    found = json.loads((tmp_path / "evaluation.json").read_text())["minimum_norm"]["near"]
    y = data[1].numpy()
    expected = {str(k): np.quantile(result.radii["near"][y == k], 0.5, method="lower") for k in (0, 1)}
    assert found["per_class"] == pytest.approx(expected) and found["found"] == 20 and "failed" not in result.examples
    assert np.array_equal(EvalResult.load(tmp_path).radii["near"], result.radii["near"])


def test_points_outside_the_ball_are_failures_and_are_said(line):
    net, data, score, direction = line
    attack = Shortest(LinfBall(0.02), score, direction, radius=False)
    with pytest.warns(UserWarning, match="far returned (.*) of 20 points outside the ball .* count as not broken"):
        result = evaluate(net, data, LinfBall(0.02), {"far": attack}, trust=False)
    outside = (score / direction.abs().sum() * 1.0001 > 0.02).numpy()
    assert result.examples["failed"] == {"far": int(outside.sum())} and 0 < outside.sum() < 20
    assert np.array_equal(result.correct["far"], outside & result.correct["clean"])
    assert result.examples["outside"] == 0


@pytest.fixture
def stand_ins(monkeypatch):
    """Packages that adv-lib imports and its attacks do not use."""
    for name, attribute in (("visdom", "Visdom"), ("torchvision", "models")):
        if importlib.util.find_spec(name) is None:
            module = ModuleType(name)
            setattr(module, attribute, object)
            monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", NAMES)
def test_attacks_by_name_run_in_an_evaluation_and_repeat(library, line, stand_ins):
    package = {"advlib": "adv_lib"}.get(library, library)
    pytest.importorskip(package, reason=f"{package} is not installed: the bridge was run where it is")
    net, data, score, direction = line
    for threat, name, finds_radius in NAMES[library]:
        attack = foreign_attack(f"{library}:{name}", threat)
        assert attack.finds_radius == finds_radius, name
        reference = PGD(threat, 50, threat.step_rule(threat.radius / 4))
        results = [evaluate(net, data, threat, [reference, attack], trust=False) for _ in range(2)]
        (key,) = [key for key in results[0].predictions if key.startswith(f"{library}_")]
        assert np.array_equal(results[0].predictions[key], results[1].predictions[key]), name
        assert results[0].sa > results[0].accuracy(key) >= results[0].ra_pgd, name
        assert results[0].protocol["attacks"][key]["version"] and "failed" not in results[0].examples, name
        assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters()), name
        if finds_radius:
            dual = direction.abs().sum() if isinstance(threat, LinfBall) else direction.norm()
            exact = (score / dual).numpy()
            found = results[0].radii[key]
            assert found[3] == 0 and (np.delete(found, 3) >= np.delete(exact, 3) * 0.999).all(), name


@pytest.mark.filterwarnings("ignore")
def test_foolbox_through_the_bridge_is_foolbox(line):
    import foolbox

    net, (x, y), *_ = line
    kind = foolbox.attacks.LInfFMNAttack
    model = foolbox.PyTorchModel(net.eval(), bounds=(0, 1))
    expected = kind(steps=10)(model, x, foolbox.Misclassification(y), epsilons=None)[1]
    delta = foreign_attack("foolbox:LInfFMNAttack,steps=10", BALL)(net, x, y)
    assert torch.allclose(x + delta, expected, atol=1e-6)


@dataclass(frozen=True)
class Broken(ForeignAttack):
    library: ClassVar[str] = "foolbox"

    def prepare(self):
        pass

    def search(self, model, x, y):
        return {"raises": lambda: 1 / 0, "none": lambda: None, "wide": lambda: x[:, :, :2]}[self.name]()


def test_what_cannot_be_attacked_with_is_refused_in_a_sentence(line, monkeypatch):
    net, (x, y), *_ = line
    cases = [
        (
            lambda: foreign_attack("foolbox:LinfFNM", BALL),
            "foolbox has no attack 'LinfFNM': did you mean LinfPGD, LInfFMN",
        ),
        (
            lambda: foreign_attack("foolbox:L2PGD", BALL),
            "measures perturbations in L2 and the threat is Linf: add --no",
        ),
        (lambda: foreign_attack("foolbox:LinfPGD,stepz=3", BALL), "has no option 'stepz': it has rel_stepsize"),
        (lambda: foreign_attack("foolbox:LinfPGD,steps=[", BALL), "is no JSON value: write name=0.5"),
        (lambda: foreign_attack("foolbox:os.system", BALL), "an attack is written foolbox:NAME"),
        (lambda: foreign_attack("art:PGD", BALL), "'art' is no library of attacks: write one of foolbox, torcha"),
        (lambda: Broken(BALL, "raises")(net, x, y), "foolbox:raises raised ZeroDivisionError: division by zero; chan"),
        (lambda: Broken(BALL, "none")(net, x, y), "foolbox:none returned NoneType for images of shape"),
        (lambda: Broken(BALL, "wide")(net, x, y), r"foolbox:wide returned \(20, 1, 2, 3\) for images"),
    ]
    for call, sentence in cases:
        with pytest.raises(UsageError, match=sentence):
            call()
    for package, library in (("torchattacks", "torchattacks"), ("adv_lib.attacks", "advlib"), ("foolbox", "foolbox")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UsageError, match=rf"need the package .* pip install doubly\[{library}\]"):
            foreign_attack(f"{library}:PGD", BALL)


def test_perturbations_from_a_file_are_checked_and_scored(line, tmp_path):
    net, (x, y), *_ = line
    result = evaluate(net, (x, y), BALL, ["pgd"], output=tmp_path, save_examples="npz", trust=False)
    theirs = read_perturbations(tmp_path / "examples" / "pgd" / "examples.npz", BALL)
    again = evaluate(net, (x, y), BALL, [theirs], trust=False)
    assert np.array_equal(again.predictions["perturbations"], result.predictions["pgd"])
    file = tmp_path / "theirs.npz"
    np.savez(file, delta=np.full((20, 1, 3, 3), 0.2, np.float32), ids=np.arange(20)[::-1])
    with pytest.warns(UserWarning, match="perturbations returned 20 of 20 points outside"):
        assert (
            evaluate(net, (x, y), BALL, read_perturbations(file, BALL), trust=False).accuracy("perturbations") == 0.95
        )
    np.savez(file, x=np.zeros((2, 1, 3, 3), np.uint8), ids=np.array([3, 19]))  # of two images: far outside
    with pytest.warns(UserWarning, match="perturbations returned 2 of 2"):
        part = evaluate(net, (x, y), BALL, read_perturbations(file, BALL), trust=False)
    assert np.flatnonzero(part.predictions["perturbations"] >= 0).tolist() == [3, 19]
    assert part.accuracy("perturbations") == 0.5
    images, labels = x.numpy(), y.numpy()
    cases = [
        ({"z": images}, r"needs attacked images `x` or perturbations `delta`"),
        ({"x": images, "delta": images}, r"one of them"),
        ({"x": images[:, 0]}, r"float32 of shape \(20, 3, 3\): save floats"),
        ({"delta": (255 * images).astype(np.uint8)}, r"holds uint8"),
        ({"x": images, "ids": np.zeros(20, int)}, r"has an image twice"),
        ({"x": images, "ids": np.arange(19)}, r"`ids` in .* one whole number for each of the 20 images"),
        ({"x": images, "ids": 20 + np.arange(20)}, r"none of the 20 evaluated images: `ids` are their pos"),
        ({"x": images, "y": 1 - labels}, r"has other labels `y`"),
        ({"x": images[:, :, :2]}, r"has images of shape \(1, 2, 3\), the test images \(1, 3, 3\)"),
    ]
    for arrays, sentence in cases:
        np.savez(file, **arrays)
        with pytest.raises(UsageError, match=sentence):
            evaluate(net, (x, y), BALL, read_perturbations(file, BALL), trust=False)
    file.write_bytes(b"PK damaged")
    for path, sentence in ((file, "cannot be read as an .npz"), (tmp_path / "no.npz", "there is no file")):
        with pytest.raises(UsageError, match=sentence):
            read_perturbations(path, BALL)
