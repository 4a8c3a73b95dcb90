"""How long AutoAttack will still take. Work is counted in forward passes of one image; a gradient counts as three."""

import time
from collections.abc import Callable

from doubly.attacks.autoattack import AutoAttack, Part


class Remaining:
    """Fed by the passes of the network and the ends of attacks; asked for the seconds left."""

    def __init__(
        self, attack: AutoAttack, classes: int, images: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        targets = min(attack.targets, classes - 1)
        each = {
            "apgd-ce": 3 * attack.iterations,
            "apgd-t": 3 * attack.iterations * targets,
            "fab-t": 4 * attack.iterations * targets,
            "square": attack.queries,
        }
        self.work = {part: each[part] for part in attack.parts}
        self.images, self.clock = images, clock
        self.begun: float | None = None  # when the first chunk began
        self.passed = 0  # by this process, in all
        self.inside = 0  # since the attack that is running began
        self.seen = 0  # images of the chunks that are over or running
        self.left: list[Part] = []  # attacks still to come in this chunk, the running one first
        self.standing = 0.0
        self.survivors = 0.0

    def enter(self, images: int, standing: int, parts: list[Part]) -> None:
        """A chunk begins: so many images, of which so many stand, and these attacks are to come."""
        self.begun = self.clock() if self.begun is None else self.begun
        self.seen += images
        self.standing, self.left, self.inside = standing, list(parts), 0
        if not parts:  # done by an earlier process
            self.survivors += standing

    def add(self, rows: int, graph: bool) -> None:
        self.passed += rows * (3 if graph else 1)
        self.inside += rows * (3 if graph else 1)

    def ended(self, standing: int) -> None:
        """The running attack is over."""
        self.left, self.inside, self.standing = self.left[1:], 0, standing
        if not self.left:
            self.survivors += standing

    def seconds(self) -> float | None:
        """None before anything is known."""
        if not self.passed or self.begun is None:
            return None
        here = max(0.0, self.standing * sum(self.work[part] for part in self.left) - self.inside)
        # Chunks to come: as many stand as on average so far, or as here while the first is running.
        done = self.survivors if not self.left else self.survivors + self.standing
        share = done / max(1, self.seen)
        later = max(0, self.images - self.seen) * share * sum(self.work.values())
        return (here + later) * (self.clock() - self.begun) / self.passed
