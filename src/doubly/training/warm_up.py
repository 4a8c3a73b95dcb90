"""epsilon grows over the first part of training: against collapse at high learning rates, and in fast training."""

from dataclasses import replace
from typing import Any

from doubly.config.run import Run
from doubly.types import Method

LEAST = 0.01  # an attack of no reach at all is none


def warmed(run: Run, progress: float) -> Method:
    """The method as it trains at this moment."""
    if progress >= run.warm_up:
        return run.method
    method: Method = _scaled(run.method, max(LEAST, progress / run.warm_up))
    return method


def _scaled(method: Any, share: float) -> Any:
    if hasattr(method, "method"):  # a wrapper
        return replace(method, method=_scaled(method.method, share))
    return replace(method, attack=method.attack.scaled(share)) if hasattr(method, "attack") else method
