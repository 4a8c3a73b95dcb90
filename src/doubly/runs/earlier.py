"""AutoAttack's outcome of an earlier evaluation in the same folder: hours of work that a later one need not lose."""

from dataclasses import replace
from pathlib import Path

from doubly.attacks.autoattack import QUICK, STANDARD, AutoAttack
from doubly.errors import UsageError
from doubly.rundir import RunDir, read_json
from doubly.runs.autoattack import Compile
from doubly.runs.measuring import Measuring
from doubly.threat import NormBall

_PARTS = {"RA-AA": STANDARD, "RA-APGD": QUICK}


def earlier(folder: Path, ball: NormBall, images: int, how: Measuring) -> tuple[AutoAttack, Measuring] | None:
    """As it was asked for then, of an evaluation within the same ball; None where there is none."""
    try:
        about = read_json(RunDir(folder).evaluation)["autoattack"]
        attack = AutoAttack(ball, _PARTS[about["label"]], seed=int(about["seed"]))
        some = int(about["n"]) if int(about["n"]) < images else None
        if (about["norm"], about["epsilon"]) != (attack.norm, ball.radius):
            return None
        compile_: Compile = "yes" if about["compiled"] else "no"
        chunk = int(about["chunk"])
        return attack, replace(how, autoattack_images=some, autoattack_chunk=chunk, compile=compile_)
    except (UsageError, LookupError, TypeError, ValueError):  # nothing there, or nothing that can be read
        return None
