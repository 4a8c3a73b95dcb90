"""Can the number be trusted? Each check is a line, a number and a verdict (Athalye et al. 2018, Carlini et al. 2019).

A network whose gradients mislead the attack looks robust without being so. No check here proves that a network is
robust; each catches one way in which networks only look it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, attacked
from doubly.attacks.forward import connected
from doubly.bilevel import NormalizedStep, SignStep
from doubly.bilevel.rows import flat
from doubly.evaluation.result import EvalResult
from doubly.losses import CrossEntropy
from doubly.seeding import generator
from doubly.threat import L2Ball, LinfBall, Threat

Verdict = Literal["fine", "suspicious", "not measured"]

GAP = 0.08  # PGD-20 minus AutoAttack: adversarial training leaves 3 to 5 points (methods.md 7)
MARGIN_GAP = 0.05  # PGD on cross-entropy minus PGD on the margin
WEAKER = 0.02  # by which PGD may be stronger than the ensemble, whose draws are others
SQUARE = 0.002  # the reference's own limit: an attack without gradients should find nothing new
HARDER = 0.03  # what five times the steps, or five restarts, may take away
ZERO = 0.01  # of the samples without a gradient
FLAT, SATURATED = 1e-3, 16.6  # gap of the two largest logits: beyond ln 2^24 a float32 softmax is exactly 1
UNBOUNDED = 0.05  # accuracy that may be left when every pixel may be anything


ALL = (
    "PGD minus AutoAttack",
    "PGD minus PGD on the logit margin",
    "Square beats white-box",
    "batch invariance",
    "examples re-checked",
    "AutoAttack's own warnings",
    "zero gradients",
    "logit scale",
    "more steps",
    "more restarts",
    "unbounded attack",
)


class Line(NamedTuple):
    name: str
    value: float | None
    verdict: Verdict
    text: str


def attack_checks(model: nn.Module, x: Tensor, y: Tensor, attack: PGD, seed: int = 0) -> list[Line]:
    """What a few more attacks on some of the images say, and the gradients and logits on them."""
    with attacked(model, "eval"):
        with torch.no_grad():
            logits = model(x).float()
        point = x.clone().requires_grad_()
        with torch.enable_grad():
            slope = torch.autograd.grad(CrossEntropy()(connected(model(point), point), y).sum(), point)[0]
    right = logits.argmax(1) == y
    zero = float((flat(slope).abs().amax(1) == 0)[right].float().mean()) if right.any() else 0.0
    gap = float((logits.topk(2, 1)[0] @ logits.new_tensor([1.0, -1.0])).median()) if logits.shape[1] > 1 else 0.0
    standing = _standing(model, x, y, right, attack, seed)
    base = float(standing.float().mean())
    steps = base - float(_standing(model, x, y, standing, replace(attack, steps=5 * attack.steps), seed).float().mean())
    restarted = _standing(model, x, y, standing, replace(attack, restarts=5 * attack.restarts), seed)
    restarts = base - float(restarted.float().mean())
    left = float(_standing(model, x, y, right, unbounded(attack.threat, x), seed).float().mean())
    n = f"n = {len(y)}"
    return [
        _line("zero gradients", zero, zero > ZERO, f"{_percent(zero)} of the right answers have no gradient ({n})"),
        _line(
            "logit scale",
            gap,
            not FLAT < gap < SATURATED,
            f"the two largest logits lie {gap:.3g} apart in the median ({n}); "
            f"trusted between {FLAT:g} and {SATURATED:g}, where the softmax of float32 is neither flat nor exactly 1",
        ),
        _line("more steps", steps, steps > HARDER, f"five times the steps take away {_points(steps)} ({n})"),
        _line(
            "more restarts", restarts, restarts > HARDER, f"five times the restarts take away {_points(restarts)} ({n})"
        ),
        _line(
            "unbounded attack",
            left,
            left > UNBOUNDED,
            f"{_percent(left)} stay right if every pixel may be anything ({n}); suspicious above {_percent(UNBOUNDED)}",
        ),
    ]


def unbounded(threat: Threat, x: Tensor) -> PGD:
    """PGD from the image itself, to any image."""
    if isinstance(threat, LinfBall):
        return PGD(LinfBall(1.0), 50, SignStep(0.05), "zero")
    radius = math.sqrt(x[0].numel())
    return PGD(L2Ball(radius), 50, NormalizedStep(radius / 20), "zero")


def _standing(model: nn.Module, x: Tensor, y: Tensor, among: Tensor, attack: PGD, seed: int) -> Tensor:
    """Which of the samples `among` an attack leaves right; the others are not attacked."""
    standing = among.clone()
    if among.any():
        delta = attack(model, x[among], y[among], generator(seed, 0, 0, "trust"))
        with attacked(model, "eval"), torch.no_grad():
            standing[among] = model(x[among] + delta).argmax(1) == y[among]
    return standing


def from_result(result: EvalResult, invariance: dict[str, float]) -> list[Line]:
    """What the evaluation itself says: the attacks against each other, and the examples that they made."""
    batch = max(invariance.values())
    return [
        _gap(result, "pgd", result.ensemble or "autoattack", GAP, "PGD minus AutoAttack"),
        _gap(result, "pgd", "margin", MARGIN_GAP, "PGD minus PGD on the logit margin"),
        _square(result),
        _line(
            "batch invariance",
            batch,
            False,
            f"answers alone, in a batch and again differ by {batch:.1e} of their spread",
        ),
        _examples(result),
        _warnings(result),
    ]


def _gap(result: EvalResult, weak: str, strong: str, limit: float, what: str) -> Line:
    if weak not in result.answers or strong not in result.answers:
        return Line(what, None, "not measured", f"needs {weak} and {strong}")
    both = (result.answers[weak] >= 0) & (result.answers[strong] >= 0)
    if not both.any():
        return Line(what, None, "not measured", f"{weak} and {strong} share no sample")
    gap = float(result.correct[weak][both].mean() - result.correct[strong][both].mean())
    label = "" if strong == "margin" else f"{result.label}: "
    text = f"{label}{_points(gap)} on the same {int(both.sum())} images; suspicious above {_points(limit)}"
    stronger = strong != "margin" and gap < -WEAKER
    text += f" and below -{_points(WEAKER)}, where PGD breaks what an ensemble of stronger attacks did not"
    return _line(what, gap, gap > limit or stronger, text if strong != "margin" else text.partition(" and below")[0])


def _square(result: EvalResult) -> Line:
    name, parts = "Square beats white-box", list(result.after)
    if "square" not in parts[1:] or result.ensemble is None:
        return Line(name, None, "not measured", "needs AutoAttack whole")
    run = result.answers[result.ensemble] >= 0
    before = result.after[parts[parts.index("square") - 1]]
    gain = float(before[run].mean() - result.after["square"][run].mean())
    return _line(
        name,
        gain,
        gain > SQUARE,
        f"Square breaks {_points(gain)} that stood against gradients; suspicious above {_points(SQUARE)}",
    )


def _examples(result: EvalResult) -> Line:
    name, checked = "examples re-checked", result.examples
    if not checked:
        return Line(name, None, "not measured", "no attack was run")
    bad = checked["outside"] + checked["changed"]
    largest = "of no known ball" if checked["largest"] is None else f"largest |delta| {checked['largest']:.6f} epsilon"
    text = (
        f"{checked['n']} attacked images: {largest}, {checked['outside']} outside the ball or [0,1]; "
        f"{checked['changed']} of {checked['asked']} answered otherwise in another batch"
    )
    return _line(name, float(bad), bad > 0, text)


def _warnings(result: EvalResult) -> Line:
    name, said = "AutoAttack's own warnings", result.autoattack.get("warnings")
    if said is None:
        return Line(name, None, "not measured", "AutoAttack was not run")
    return _line(name, float(len(said)), bool(said), "; ".join(said) if said else "none")


def completed(before: Mapping[str, Any], result: EvalResult, invariance: dict[str, float]) -> dict[str, Any]:
    """The panel again, once AutoAttack has run: the lines that took attacks of their own are as they were."""
    if not before:
        return {}
    fresh = from_result(result, invariance)
    old = [Line(**line) for line in before["lines"] if line["name"] not in {each.name for each in fresh}]
    return panel([*fresh, *old])


def panel(lines: Sequence[Line]) -> dict[str, Any]:
    """As evaluation.json keeps it: suspicious if one line is."""
    named = {line.name for line in lines}
    lines = [*lines, *(Line(name, None, "not measured", "needs pgd") for name in ALL if name not in named)]
    measured = [line for line in lines if line.verdict != "not measured"]
    found = any(line.verdict == "suspicious" for line in measured)
    enough = 2 * len(measured) > len(ALL)
    return {
        "verdict": "suspicious" if found else "fine" if enough else "too little was measured",
        "measured": len(measured),
        "of": len(ALL),
        "lines": [line._asdict() for line in lines],
    }


def _line(name: str, value: float, bad: bool, text: str) -> Line:
    return Line(name, value, "suspicious" if bad else "fine", text)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"
