"""One line on stderr that says how far a run is."""

import sys
import time
from typing import Any

WIDTH = 24


class Bar:
    """Draws itself at most ten times a second, and ends its line whatever happens."""

    def __init__(self, steps: int, wanted: bool) -> None:
        self.steps, self.wanted = steps, wanted
        self.began = self.shown = time.monotonic()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *problem: Any) -> None:
        if self.wanted:
            sys.stderr.write("\n")

    def show(self, done: int, record: dict[str, float]) -> None:
        now = time.monotonic()
        if not self.wanted or (now - self.shown < 0.1 and done < self.steps):
            return
        self.shown = now
        left = (now - self.began) / done * (self.steps - done)
        filled = WIDTH * done // self.steps
        text = f"[{'=' * filled}{' ' * (WIDTH - filled)}] {done}/{self.steps}  {left:.0f} s left"
        sys.stderr.write(f"\r{text}  value {record['value']:.6g}  gradient {record['gradient']:.2e}\033[K")
        sys.stderr.flush()
