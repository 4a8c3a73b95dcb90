"""One epsilon for a run: the ball of its training attack and of its validation attack, which evaluation uses too."""

from dataclasses import replace
from typing import TypeVar

from doubly.attacks import Attack
from doubly.config.run import Run
from doubly.text import format_ball
from doubly.threat import Threat

AnyAttack = TypeVar("AnyAttack", bound=Attack)


def with_threat(run: Run, threat: Threat) -> Run:
    """Return the run with training and validation within one threat; step sizes keep their ratio to the radius.

    Raises:
        UsageError: If an attack of the run cannot stay within that threat.
    """
    method, validation = run.method, run.validation
    if method.attack is not None:
        method = method.with_attack(_within(method.attack, threat))
    return replace(run, method=method, validation=replace(validation, attack=_within(validation.attack, threat)))


def _within(attack: AnyAttack, threat: Threat) -> AnyAttack:
    """Return the attack within the ball of `threat`; a threat of the same norm keeps its barrier."""
    same = type(attack.threat) is type(threat)
    return attack.within(replace(attack.threat, radius=threat.radius) if same else threat)  # type: ignore[type-var]


def training_threat(run: Run) -> Threat | None:
    """Return what the attacker of training may do; None if the method has no attack."""
    return None if run.method.attack is None else run.method.attack.threat


def measured_threat(run: Run) -> Threat:
    """Return what the attacker of the validation, and of an evaluation by default, may do."""
    return run.validation.attack.threat


def is_same_ball(first: Threat, second: Threat) -> bool:
    """Return whether two threats have one norm and one radius."""
    return (first.norm, first.radius) == (second.norm, second.radius)


def describe_threats(run: Run, measured: Threat | None = None) -> str:
    """Return the balls of a run in words: one if training and measurement share it, else both.

    Args:
        run: The run.
        measured: What the attacker of the evaluation may do, if not that of the run's validation.
    """
    training, measured = training_threat(run), measured or measured_threat(run)
    ball = format_ball(measured.norm, measured.radius)
    if training is None:
        return f"trained without an attack, measured at {ball}"
    if is_same_ball(training, measured):
        return ball
    return f"trained at {format_ball(training.norm, training.radius)}, but measured at {ball}"
