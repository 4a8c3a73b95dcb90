"""Accuracy against the radius: the PGD attack of an evaluation at radii from 0 to four times its own."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from doubly.attacks import PGD, Attack
from doubly.data import Images
from doubly.distributed import SINGLE_PROCESS, Communicator
from doubly.evaluation.attacks import describe_attacks, reference_pgd
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.intervals import wilson
from doubly.evaluation.memory import MicrobatchLimit
from doubly.evaluation.metrics import Bools, Ints, per_class, tail
from doubly.evaluation.predict import predict
from doubly.threat import Threat

FACTORS = (1 / 4, 1 / 2, 1.0, 3 / 2, 2.0, 3.0, 4.0)  # of epsilon, after 0


def curve_attack(attacks: Mapping[str, Attack], threat: Threat) -> PGD:
    """Return the attack whose radius is varied: the evaluation's `pgd`, or the reference PGD if there is none.

    Raises:
        UsageError: If its steps cannot be scaled with the radius.
    """
    attack = attacks.get("pgd")
    pgd = attack if isinstance(attack, PGD) else reference_pgd(threat)
    pgd.scaled(FACTORS[0])
    return pgd


def radius_curve(
    model: nn.Module,
    images: Images,
    pgd: PGD,
    config: EvalConfig,
    communicator: Communicator = SINGLE_PROCESS,
    limit: MicrobatchLimit | None = None,
) -> dict[str, Any]:
    """Return the accuracy at several radii, as evaluation.json keeps it.

    The random numbers are the same at every radius, and the steps grow with it. Radii beyond the largest that the
    threat allows are left out.

    Args:
        model: The network.
        images: The images.
        pgd: The attack, from `curve_attack`.
        config: Seed, chunk size and tail.
        communicator: The processes that share the work.
        limit: How many images fit into memory at a time.
    """
    radius, max_radius = pgd.threat.radius, pgd.threat.max_radius
    attacks = {f"{factor:g}": pgd.scaled(factor) for factor in FACTORS if factor * radius <= max_radius}
    predictions = predict(
        model,
        images,
        attacks,
        seed=config.seed,
        chunk_size=config.chunk_size,
        communicator=communicator,
        limit=limit,
    )
    y = images.y.cpu().numpy()
    points = []
    for name, classes in predictions.classes.items():
        epsilon = 0.0 if name == "clean" else float(name) * radius
        points.append({"epsilon": epsilon, **_point(classes == y, y, len(images.classes), config)})
    return {"n": len(y), "attack": describe_attacks({"pgd": pgd})["attack"], "points": points}


def _point(correct: Bools, y: Ints, classes: int, config: EvalConfig) -> dict[str, Any]:
    point: dict[str, Any] = {"accuracy": float(correct.mean())}
    if config.tail_share == 0.3:
        point["tail_30"] = tail(per_class(correct, y, classes), config.tail_share, config.tail_rounding)[0]
    return {**point, "interval": list(wilson(int(correct.sum()), len(y)))}
