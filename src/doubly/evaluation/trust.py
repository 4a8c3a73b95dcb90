"""Checks of whether the numbers of an evaluation are trustworthy (Athalye et al. 2018, Carlini et al. 2019).

A network whose gradients mislead the attack looks robust without being so. No check proves that a network is robust;
each of them finds one way in which networks only look robust. A check has a value and a verdict. A share of images is
suspicious if the lower end of its 95 % Wilson interval is above the limit; it is unclear if only the share itself is,
or if there are too few images to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, attack_context
from doubly.attacks.mode import connected
from doubly.bilevel.rows import flat
from doubly.evaluation.intervals import wilson
from doubly.evaluation.result import EvalResult
from doubly.losses import CrossEntropy
from doubly.seeding import generator
from doubly.threat import Threat

Verdict = Literal["fine", "unclear", "suspicious", "not measured"]

MAX_AUTOATTACK_GAP = 0.08  # PGD-20 minus AutoAttack: after adversarial training it is 3 to 5 points
MAX_MARGIN_GAP = 0.05  # PGD on cross-entropy minus PGD on the margin
MAX_NEGATIVE_GAP = 0.02  # by which PGD may be stronger than AutoAttack, which draws other random numbers
MAX_SQUARE_GAIN = 0.002  # the reference's own limit: an attack without gradients should find nothing new
MAX_GAIN = 0.03  # of five times the steps or restarts
MAX_ZERO_GRADIENTS = 0.01  # share of the correct samples
MIN_LOGIT_GAP, MAX_LOGIT_GAP = 1e-3, 16.6  # beyond ln 2^24 a float32 softmax is exactly 1
MIN_IMAGES = 50  # fewer say little: even if none is broken, up to 7 % may be
MAX_UNBOUNDED = 0.05  # accuracy that may be left when every pixel may take any value

CHECKS = (
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


class Check(NamedTuple):
    """One check: its name, the value it is decided by (None if not measured), the verdict, and a sentence."""

    name: str
    value: float | None
    verdict: Verdict
    text: str


def summarize_checks(checks: Sequence[Check]) -> dict[str, Any]:
    """Return all checks as evaluation.json keeps them; one suspicious or unclear check makes the whole so."""
    names = {check.name for check in checks}
    missing = [Check(name, None, "not measured", "needs pgd") for name in CHECKS if name not in names]
    measured = [check for check in checks if check.verdict != "not measured"]
    doubts = [word for word in ("suspicious", "unclear") if any(check.verdict == word for check in measured)]
    enough = 2 * len(measured) > len(CHECKS)
    return {
        "verdict": doubts[0] if doubts else "fine" if enough else "too little was measured",
        "measured": len(measured),
        "of": len(CHECKS),
        "lines": [check._asdict() for check in (*checks, *missing)],
    }


def update_checks(trust: Mapping[str, Any], result: EvalResult, differences: Mapping[str, float]) -> dict[str, Any]:
    """Return the checks again once AutoAttack has run; those that ran attacks of their own are kept.

    Args:
        trust: The checks before AutoAttack, from `summarize_checks`; empty if there are none.
        result: The result with AutoAttack.
        differences: See `checks_of_result`.
    """
    if not trust:
        return {}
    new = checks_of_result(result, differences)
    names = {check.name for check in new}
    return summarize_checks([*new, *(Check(**line) for line in trust["lines"] if line["name"] not in names)])


def checks_of_attacks(model: nn.Module, x: Tensor, y: Tensor, attack: PGD, seed: int = 0) -> list[Check]:
    """Check gradients and logits on some images, and what stronger attacks find.

    Args:
        model: The network; it is left as it was found.
        x: The images.
        y: Their labels.
        attack: The PGD attack of the evaluation.
        seed: Seed of the attacks.
    """
    logits, gradient = _logits_and_gradient(model, x, y)
    correct = logits.argmax(1) == y
    return [
        _zero_gradients(gradient, correct),
        _logit_scale(logits),
        *_stronger_attacks(model, x, y, correct, attack, seed),
    ]


def _zero_gradients(gradient: Tensor, correct: Tensor) -> Check:
    n = int(correct.sum())
    share = float((flat(gradient).abs().amax(1) == 0)[correct].float().mean()) if n else 0.0
    text = f"{_percent(share)} of the correct images have no gradient (n = {n} of {len(correct)})"
    return _share_check("zero gradients", share, MAX_ZERO_GRADIENTS, n, text)


def _logit_scale(logits: Tensor) -> Check:
    gap = float((logits.topk(2, 1)[0] @ logits.new_tensor([1.0, -1.0])).median()) if logits.shape[1] > 1 else 0.0
    text = (
        f"the two largest logits differ by {gap:.3g} in the median (n = {len(logits)}); fine between {MIN_LOGIT_GAP:g} "
        f"and {MAX_LOGIT_GAP:g}, where a float32 softmax is neither flat nor exactly 1"
    )
    return _check("logit scale", gap, not MIN_LOGIT_GAP < gap < MAX_LOGIT_GAP, text)


def _stronger_attacks(
    model: nn.Module, x: Tensor, y: Tensor, correct: Tensor, attack: PGD, seed: int
) -> tuple[Check, Check, Check]:
    robust = _robust(model, x, y, correct, attack, seed)

    def gain(stronger: PGD) -> float:
        return float(robust.float().mean()) - float(_robust(model, x, y, robust, stronger, seed).float().mean())

    steps = gain(replace(attack, steps=5 * attack.steps))
    restarts = gain(replace(attack, restarts=5 * attack.restarts))
    left = float(_robust(model, x, y, correct, unbounded_attack(attack.threat, x), seed).float().mean())
    n = f"(n = {len(y)})"
    return (
        _share_check(
            "more steps", steps, MAX_GAIN, len(y), f"five times the steps lower the accuracy by {_points(steps)} {n}"
        ),
        _share_check(
            "more restarts",
            restarts,
            MAX_GAIN,
            len(y),
            f"five times the restarts lower the accuracy by {_points(restarts)} {n}",
        ),
        _share_check(
            "unbounded attack",
            left,
            MAX_UNBOUNDED,
            len(y),
            f"{_percent(left)} stay correct if every pixel may take any value {n}; suspicious above "
            f"{_percent(MAX_UNBOUNDED)}",
        ),
    )


def unbounded_attack(threat: Threat, x: Tensor) -> PGD:
    """Return a PGD attack that starts at the images and may reach any image."""
    unbounded = threat.unbounded(x)
    return PGD(unbounded, 50, unbounded.step_rule(unbounded.radius / 20), "zero")


def _logits_and_gradient(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with attack_context(model, "eval"):
        with torch.no_grad():
            logits = model(x).float()
        point = x.clone().requires_grad_()
        with torch.enable_grad():
            loss = CrossEntropy()(connected(model(point), point), y).sum()
            return logits, torch.autograd.grad(loss, point)[0]


def _robust(model: nn.Module, x: Tensor, y: Tensor, among: Tensor, attack: PGD, seed: int) -> Tensor:
    """Return which of the samples `among` an attack leaves correct; the others are not attacked."""
    robust = among.clone()
    if among.any():
        delta = attack(model, x[among], y[among], generator(seed, 0, 0, "trust"))
        with attack_context(model, "eval"), torch.no_grad():
            robust[among] = model(x[among] + delta).argmax(1) == y[among]
    return robust


def checks_of_result(result: EvalResult, differences: Mapping[str, float]) -> list[Check]:
    """Compare the attacks of the evaluation with each other, and check the attacked images.

    Args:
        result: The result.
        differences: From `check_network`.
    """
    batch = max(differences.values())
    return [
        _autoattack_gap(result),
        _margin_gap(result),
        _square_gain(result),
        _check(
            "batch invariance",
            batch,
            False,
            f"logits of an image alone, in a batch and repeated differ by {batch:.1e} of their spread",
        ),
        _attacked_images(result),
        _warnings(result),
    ]


def _autoattack_gap(result: EvalResult) -> Check:
    name, ensemble = "PGD minus AutoAttack", result.ensemble or "autoattack"
    gap, n, text = _gap(result, ensemble)
    if gap is None:
        return Check(name, None, "not measured", text)
    text = (
        f"{result.label}: {text}; suspicious above {_points(MAX_AUTOATTACK_GAP)} and below -{_points(MAX_NEGATIVE_GAP)}"
        ", where PGD breaks images that stronger attacks did not"
    )
    if gap < 0:
        return _share_check(name, -gap, MAX_NEGATIVE_GAP, n, text)._replace(value=gap)
    return _share_check(name, gap, MAX_AUTOATTACK_GAP, n, text)


def _margin_gap(result: EvalResult) -> Check:
    name = "PGD minus PGD on the logit margin"
    gap, n, text = _gap(result, "margin")
    if gap is None:
        return Check(name, None, "not measured", text)
    return _share_check(name, gap, MAX_MARGIN_GAP, n, f"{text}; suspicious above {_points(MAX_MARGIN_GAP)}")


def _gap(result: EvalResult, attack: str) -> tuple[float | None, int, str]:
    """Return accuracy under PGD minus that under another attack, the images that both attacked, and a sentence."""
    if "pgd" not in result.predictions or attack not in result.predictions:
        return None, 0, f"needs pgd and {attack}"
    both = (result.predictions["pgd"] >= 0) & (result.predictions[attack] >= 0)
    if not both.any():
        return None, 0, f"pgd and {attack} share no sample"
    gap = float(result.correct["pgd"][both].mean() - result.correct[attack][both].mean())
    return gap, int(both.sum()), f"{_points(gap)} on the same {int(both.sum())} images"


def _square_gain(result: EvalResult) -> Check:
    name, parts = "Square beats white-box", list(result.robust_after)
    if "square" not in parts[1:] or result.ensemble is None:
        return Check(name, None, "not measured", "needs all attacks of AutoAttack")
    run = result.predictions[result.ensemble] >= 0
    before = result.robust_after[parts[parts.index("square") - 1]]
    gain = float(before[run].mean() - result.robust_after["square"][run].mean())
    return _share_check(
        name,
        gain,
        MAX_SQUARE_GAIN,
        int(run.sum()),
        f"Square breaks {_points(gain)} more than the attacks with gradients; suspicious above "
        f"{_points(MAX_SQUARE_GAIN)}",
    )


def _attacked_images(result: EvalResult) -> Check:
    name, checked = "examples re-checked", result.examples
    if not checked:
        return Check(name, None, "not measured", "no attack was run")
    bad = checked["outside"] + checked["changed"]
    text = (
        f"{checked['n']} attacked images: largest |delta| {checked['largest']:.6f} epsilon, {checked['outside']} "
        f"outside the ball or [0,1]; {checked['changed']} of {checked['asked']} predicted otherwise in another batch"
    )
    return _check(name, float(bad), bad > 0, text)


def _warnings(result: EvalResult) -> Check:
    name, warnings = "AutoAttack's own warnings", result.autoattack.get("warnings")
    if warnings is None:
        return Check(name, None, "not measured", "AutoAttack was not run")
    return _check(name, float(len(warnings)), bool(warnings), "; ".join(warnings) if warnings else "none")


def _share_check(name: str, share: float, limit: float, n: int, text: str) -> Check:
    """Return the verdict on a share of n images that should not exceed a limit."""
    low = wilson(round(max(share, 0.0) * n), n)[0] if n else 0.0
    if low > limit:
        return Check(name, share, "suspicious", text)
    if n < MIN_IMAGES:
        return Check(name, share, "unclear", f"{text}; {n} images are too few to say, from {MIN_IMAGES} on they can")
    if share > limit:
        return Check(
            name, share, "unclear", f"{text}; more images would tell, the interval reaches down to {_percent(low)}"
        )
    return Check(name, share, "fine", text)


def _check(name: str, value: float, suspicious: bool, text: str) -> Check:
    return Check(name, value, "suspicious" if suspicious else "fine", text)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"
