"""The short flags of a run, --epsilon, --norm and --lr: each sets every place that it concerns."""

from collections.abc import Sequence
from dataclasses import replace

from doubly.cli.options import pop_flag
from doubly.cli.sources import select_threat
from doubly.config import Run
from doubly.config.threats import is_same_ball, measured_threat, training_threat, with_threat
from doubly.errors import UsageError
from doubly.text import format_ball, parse_number
from doubly.threat import Threat


def apply_short_flags(run: Run, words: list[str]) -> Run:
    """Apply --epsilon, --norm and --lr to a run, and remove them from the words.

    Dotted flags are applied after this, so that training and validation can still be given different values.

    Raises:
        UsageError: If a value is not a number, or does not fit the run.
    """
    epsilons, norms, rates = (pop_flag(words, flag) for flag in ("--epsilon", "--norm", "--lr"))
    run = with_epsilon(run, _last(norms), _last(epsilons))
    if rates:
        run = replace(run, optimizer=run.optimizer.with_peak(parse_number(rates[-1])))
    return run


def with_epsilon(run: Run, norm: str | None, epsilon: str | None) -> Run:
    """Return the run with training, validation and evaluation at one epsilon; the same run if neither is given.

    Raises:
        UsageError: If a value is not a norm or number, or an attack of the run cannot use it.
    """
    if norm is None and epsilon is None:
        return run
    threat = select_threat(norm, epsilon, measured_threat(run))
    assert threat is not None  # since the run has one
    return with_threat(run, threat)


def check_one_epsilon(first: Run, run: Run, words: Sequence[str]) -> None:
    """Refuse a run whose training and measurement were driven apart by a change of one of them alone.

    Args:
        first: The run before any change; a recipe may have two radii.
        run: The run with all changes.
        words: The arguments, in which both must be said.

    Raises:
        UsageError: If they differ and only one was given.
    """
    training, measured = training_threat(run), measured_threat(run)
    if training is None or is_same_ball(training, measured):
        return
    before = training_threat(first)
    training_changed = before is None or not is_same_ball(before, training)
    measured_changed = not is_same_ball(measured_threat(first), measured)
    if not training_changed and not measured_changed:
        return
    if (training_changed or _is_said(words, "method")) and (measured_changed or _is_said(words, "validation")):
        return
    raise UsageError(
        f"training would attack at {_ball(training)} and validation and evaluation at {_ball(measured)}: give one "
        f"--epsilon for both, or say both, as in --method.attack.threat.radius {training.radius:g} "
        f"--validation.attack.threat.radius {measured.radius:g}"
    )


def _is_said(words: Sequence[str], part: str) -> bool:
    """Return whether the threat of a part of the run was given on the command line."""
    return any(
        word.removeprefix("--set=").removeprefix("--").startswith(f"{part}.") and "threat" in word for word in words
    )


def _ball(threat: Threat) -> str:
    return format_ball(threat.norm, threat.radius)


def _last(values: Sequence[str]) -> str | None:
    return values[-1] if values else None
