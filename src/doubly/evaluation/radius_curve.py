"""Accuracy against the radius: an evaluation's own PGD at radii from 0 to four times its own."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from doubly.attacks import PGD
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.attacks import described, pgd20
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.intervals import wilson
from doubly.evaluation.memory import Pieces
from doubly.evaluation.metrics import per_class, tail
from doubly.evaluation.predict import answers
from doubly.threat import LinfBall, NormBall
from doubly.types import Attack

SHARES = (1 / 4, 1 / 2, 1.0, 3 / 2, 2.0, 3.0, 4.0)  # of epsilon, after 0


def curve_attack(attacks: Mapping[str, Attack], ball: NormBall | None) -> PGD:
    """The attack whose radius is varied: the evaluation's `pgd`, or the usual one where that is none."""
    given = attacks.get("pgd")
    pgd = given if isinstance(given, PGD) else None if ball is None else pgd20(ball)
    if pgd is None or not isinstance(pgd.threat, NormBall):
        raise UsageError("a curve over the radius needs a ball: give LinfBall or L2Ball, or leave out curve_images")
    pgd.scaled(SHARES[0])  # refuses steps that cannot be shortened
    return pgd


def curve(model: nn.Module, images: Images, pgd: PGD, how: EvalConfig, pieces: Pieces | None = None) -> dict[str, Any]:
    """What evaluation.json says of it. The draws are alike at every radius, and the steps grow with it."""
    ball: Any = pgd.threat  # curve_attack refuses what is none
    # No pixel moves further than 1, and a box of more is refused.
    shares = [share for share in SHARES if not isinstance(ball, LinfBall) or share * ball.radius <= 1]
    attacks = {f"{share:g}": pgd.scaled(share) for share in shares}
    found = answers(model, images, attacks, how.seed, how.chunk, pieces=pieces)
    y, points = images.y.cpu().numpy(), []
    for name, given in found.classes.items():
        right = given == y
        point = {"epsilon": 0.0 if name == "clean" else float(name) * ball.radius, "accuracy": float(right.mean())}
        if how.tail_share == 0.3:
            accuracies = per_class(right, y, len(images.classes))
            point["tail_30"] = tail(accuracies, how.tail_share, how.tail_rounding)[0]
        points.append({**point, "interval": list(wilson(int(right.sum()), len(y)))})
    return {"n": len(y), "attack": described({"pgd": pgd})["attack"], "points": points}
