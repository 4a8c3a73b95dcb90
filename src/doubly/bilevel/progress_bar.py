"""A progress bar for `minimize`: one line on stderr."""

import sys
import time
from typing import Any

WIDTH = 24
SECONDS_BETWEEN_DRAWS = 0.1


class ProgressBar:
    """A context manager that draws the bar, and ends its line however the block is left.

    Args:
        steps: Number of steps of the run.
        enabled: Whether to draw anything.
    """

    def __init__(self, steps: int, enabled: bool) -> None:
        self.steps, self.enabled = steps, enabled
        self.start = self.last_draw = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.enabled:
            sys.stderr.write("\n")

    def draw(self, done: int, record: dict[str, float]) -> None:
        """Draw the bar, unless it was drawn a moment ago.

        Args:
            done: Number of finished steps.
            record: The numbers of the last step; its value and gradient are shown.
        """
        now = time.monotonic()
        if not self.enabled or (now - self.last_draw < SECONDS_BETWEEN_DRAWS and done < self.steps):
            return
        self.last_draw = now
        seconds_left = (now - self.start) / done * (self.steps - done)
        filled = WIDTH * done // self.steps
        text = f"[{'=' * filled}{' ' * (WIDTH - filled)}] {done}/{self.steps}  {seconds_left:.0f} s left"
        sys.stderr.write(f"\r{text}  value {record['value']:.6g}  gradient {record['gradient']:.2e}\033[K")
        sys.stderr.flush()
