"""Attacks that may leave the threat: what counts as a failure, and the smallest radius that each image withstands."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from doubly.attacks import Attack
from doubly.bilevel.rows import per_row
from doubly.evaluation.intervals import wilson
from doubly.evaluation.metrics import Floats, per_class, tail
from doubly.threat import TOLERANCE, Threat, is_image, is_inside

if TYPE_CHECKING:
    from doubly.evaluation.result import EvalResult

FACTORS = (0.0, 1 / 4, 1 / 2, 1.0, 3 / 2, 2.0, 3.0, 4.0)  # of epsilon, as in the curve under PGD


class Settled(NamedTuple):
    """Points inside the threat, and (radius, failed) of each image, (B, 2); the radius is 0 if none was looked for."""

    point: Tensor
    search: Tensor


def settle(model: nn.Module, attack: Attack, x: Tensor, y: Tensor, point: Tensor, clean: Tensor) -> Settled:
    """Replace points outside the threat by the clean images, and measure the perturbations of a minimum-norm attack.

    Args:
        model: The network.
        attack: The attack that returned the points.
        x: The clean images.
        y: Their labels.
        point: What the attack returned.
        clean: Logits of the clean images.
    """
    point = point.detach()
    inner = point.clamp(0, 1)
    point = torch.where((point - inner).abs() <= TOLERANCE, inner, point)  # x + (attacked - x) may round beyond 1
    usable, inside = is_image(point), is_inside(attack.threat, point - x)
    search = torch.zeros(len(y), 2, dtype=torch.float64, device=x.device)
    if attack.finds_radius:
        filled = torch.where(per_row(usable, point), point, x)
        with torch.no_grad():
            broken = usable & (model(filled).argmax(1) != y)
        lengths = attack.threat.length(filled - x).double()
        search[:, 0] = torch.where(broken, lengths, torch.inf).masked_fill(clean.argmax(1) != y, 0)
        search[:, 1] = ~usable
    else:
        search[:, 1] = ~(usable & inside)
    return Settled(torch.where(per_row(usable & inside, point), point, x), search)


def failure_sentences(result: "EvalResult") -> list[str]:
    """Return a sentence for each attack that returned points outside of the threat or of the image range."""
    sentences = []
    for name, count in result.examples.get("failed", {}).items():
        n = int((result.predictions[name] >= 0).sum())
        sentences.append(
            f"{name} returned {count} of {n} points outside the ball or [0, 1]: these images count as not broken by "
            "it; check its settings"
        )
    return sentences


def curve_of_radii(result: "EvalResult", attacks: Mapping[str, Attack], threat: Threat) -> dict[str, Any]:
    """Return the accuracy at several radii under the first minimum-norm attack, as evaluation.json keeps it."""
    name, radii = next(iter(result.radii.items()))
    points = []
    for factor in FACTORS:
        epsilon = factor * threat.radius
        if epsilon > threat.max_radius:
            continue
        correct = radii > epsilon
        point: dict[str, Any] = {"epsilon": epsilon, "accuracy": float(correct.mean())}
        if result.tail_share == 0.3:
            accuracies = per_class(correct, result.y, len(result.classes))
            point["tail_30"] = tail(accuracies, result.tail_share, result.tail_rounding)[0]
        points.append({**point, "interval": list(wilson(int(correct.sum()), result.n))})
    return {"n": result.n, "name": name, "attack": attacks[name].describe() or {"kind": name}, "points": points}


def describe_radii(result: "EvalResult", name: str) -> dict[str, Any]:
    """Return the median radius of all images and of each class; None where most images were not broken."""
    radii = result.radii[name]
    return {
        "median": _median(radii),
        "found": int(np.isfinite(radii).sum()),
        "per_class": {label: _median(radii[result.y == index]) for index, label in enumerate(result.names)},
    }


def _median(values: Floats) -> float | None:
    ordered = np.sort(values)
    middle = float(ordered[(len(ordered) - 1) // 2]) if len(ordered) else np.inf  # infinity has no mean with a number
    return middle if np.isfinite(middle) else None
