"""The outcome of AutoAttack in an earlier evaluation in the same folder, which a later one need not lose."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from doubly.attacks.autoattack import QUICK, STANDARD, AutoAttack
from doubly.errors import UsageError
from doubly.evaluation.config import EvalConfig
from doubly.rundir import RunDir, read_json
from doubly.threat import Threat

REUSED = "is reused: it was computed for this network and these images"
NOT_REUSED = (
    "of the earlier evaluation is dropped: it was not computed for this network and these images, or its state is "
    "missing; with --autoattack or --quick it is computed again"
)
_PARTS = {"RA-AA": STANDARD, "RA-APGD": QUICK}


class EarlierAutoAttack(NamedTuple):
    """AutoAttack and the settings with which an earlier evaluation ran it."""

    attack: AutoAttack
    config: EvalConfig


def find_earlier_autoattack(folder: Path, threat: Threat, images: int, config: EvalConfig) -> EarlierAutoAttack | None:
    """Return how AutoAttack was run by the evaluation in a folder, within the same threat; None if it was not.

    Args:
        folder: Output folder of the evaluations.
        threat: The threat of the later evaluation.
        images: Its number of images.
        config: Its settings.
    """
    try:
        info = read_json(RunDir(folder).evaluation)["autoattack"]
        attack = AutoAttack(threat, _PARTS[info["label"]], seed=int(info["seed"]))
        count = int(info["n"]) if int(info["n"]) < images else None
        if (info["norm"], info["epsilon"]) != (threat.norm, threat.radius):
            return None
        return EarlierAutoAttack(
            attack,
            replace(config, autoattack_images=count, autoattack_chunk_size=int(info["chunk"])),
        )
    except (UsageError, LookupError, TypeError, ValueError):  # nothing there, or nothing that can be read
        return None
