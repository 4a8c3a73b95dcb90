"""The attacks that a command names: doubly's own by name, those of other libraries, and saved perturbations."""

from collections.abc import Sequence
from pathlib import Path

from doubly.attacks import Attack
from doubly.bridges.attacks import foreign_attack, is_foreign
from doubly.threat import LinfBall, Threat


def select_named_attacks(
    names: Sequence[str], threat: Threat | None, perturbations: Path | None = None
) -> list[str | Attack]:
    """Return the attacks of a command.

    Args:
        names: What was given as --attacks.
        threat: The threat of the command; None is `LinfBall()`.
        perturbations: What was given as --perturbations.

    Raises:
        UsageError: If another library, its attack or the file cannot be used.
    """
    ball = threat or LinfBall()
    attacks: list[str | Attack] = [foreign_attack(name, ball) if is_foreign(name) else name for name in names]
    if perturbations is not None:
        from doubly.evaluation.perturbations import read_perturbations

        attacks.append(read_perturbations(perturbations, ball))
    return attacks
