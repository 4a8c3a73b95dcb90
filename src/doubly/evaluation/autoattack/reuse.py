"""AutoAttack's outcome of an earlier evaluation in the same folder: hours of work that a later one need not lose."""

from dataclasses import replace
from pathlib import Path

from doubly.attacks.autoattack import QUICK, STANDARD, AutoAttack
from doubly.errors import UsageError
from doubly.evaluation.autoattack.runner import Compile
from doubly.evaluation.config import EvalConfig
from doubly.rundir import RunDir, read_json
from doubly.threat import NormBall

KEPT = "is kept: it was measured on this network and these images"
NOT_KEPT = (
    "of the earlier evaluation is not kept: it was not measured on this network and these images, or its state is "
    "gone; with --autoattack or --quick it is measured anew"
)
_PARTS = {"RA-AA": STANDARD, "RA-APGD": QUICK}


def earlier(folder: Path, ball: NormBall, images: int, how: EvalConfig) -> tuple[AutoAttack, EvalConfig] | None:
    """As it was asked for then, of an evaluation within the same ball; None where there is none."""
    try:
        about = read_json(RunDir(folder).evaluation)["autoattack"]
        attack = AutoAttack(ball, _PARTS[about["label"]], seed=int(about["seed"]))
        some = int(about["n"]) if int(about["n"]) < images else None
        if (about["norm"], about["epsilon"]) != (attack.norm, ball.radius):
            return None
        compiled: Compile = "yes" if about["compiled"] else "no"
        return attack, replace(how, autoattack_images=some, autoattack_chunk=int(about["chunk"]), compile=compiled)
    except (UsageError, LookupError, TypeError, ValueError):  # nothing there, or nothing that can be read
        return None
