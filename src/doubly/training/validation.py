"""The evaluation during training: clean and under two attacks, on a fixed part of the hold-out or of the test set."""

from typing import Any

import numpy as np

from doubly.config.run import Validation
from doubly.evaluation.attacks import chosen
from doubly.evaluation.predict import answers
from doubly.evaluation.result import EvalResult, number
from doubly.training.state import Training


def validate(t: Training) -> dict[str, Any]:
    """A part of a row of metrics; all processes share the work, and know the outcome."""
    images, attacks = t.images.validation, chosen(("pgd", "margin"), t.run.validation.attack)[0]
    found = EvalResult(images.y.cpu().numpy(), images.classes, answers(t.evaluated, images, attacks).classes)
    worst, value = found.worst("pgd")
    return {
        "on": "holdout" if t.images.chooses else "test",
        "n": found.n,
        "sa": found.accuracy("clean"),
        "ra_pgd": found.accuracy("pgd"),
        "ra_tail_30": found.tail("pgd")[0],
        "worst_class": {"name": worst, "ra_pgd": value},
        "ra_margin": found.accuracy("margin"),
        "commonest": _commonest(found),
        "per_class": {name: number(value) for name, value in zip(found.names, found.per_class("pgd"), strict=True)},
    }


def _commonest(found: EvalResult) -> dict[str, Any]:
    """The class that clean images are most often taken for: its share of the answers and of the images."""
    counts = np.array(found.confusion("clean"))  # a row per label
    most = int(counts.sum(0).argmax())
    share, true_share = counts.sum(0)[most] / found.n, counts.sum(1)[most] / found.n
    return {"name": found.names[most], "share": float(share), "true_share": float(true_share)}


def score(validation: dict[str, Any], settings: Validation) -> float:
    """What makes an epoch the best."""
    if settings.choose == "both":
        return float(validation["ra_pgd"] + validation["ra_tail_30"]) / 2
    return float(validation[settings.choose])
