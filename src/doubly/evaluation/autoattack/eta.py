"""The remaining time of AutoAttack. Work is counted in forward passes of one image; a gradient counts as three."""

import time
from collections.abc import Callable, Sequence

from doubly.attacks.autoattack import AutoAttack, Part
from doubly.callbacks import Callback

GRADIENT_COST = 3  # of a forward pass with a backward pass to the image


def passes_per_image(attack: AutoAttack, classes: int) -> dict[Part, int]:
    """Return the forward passes that each attack of AutoAttack needs for an image that it cannot break."""
    targets = min(attack.targets, classes - 1)
    passes: dict[Part, int] = {
        "apgd-ce": GRADIENT_COST * attack.iterations,
        "apgd-t": GRADIENT_COST * attack.iterations * targets,
        "fab-t": 4 * attack.iterations * targets,
        "square": attack.queries,
    }
    return {part: passes[part] for part in attack.parts}


class RemainingTime:
    """Estimates the remaining seconds from the passes done and the attacks to come."""

    def __init__(
        self, attack: AutoAttack, classes: int, images: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start with nothing done.

        Args:
            attack: AutoAttack.
            classes: Number of classes.
            images: Number of images in the chunks of this process.
            clock: Returns seconds.
        """
        self.passes = passes_per_image(attack, classes)
        self.images, self.clock = images, clock
        self.started: float | None = None  # when the first chunk started
        self.done = 0  # passes of this process
        self.done_in_attack = 0  # passes since the running attack started
        self.images_seen = 0  # of the finished and the running chunks
        self.parts_left: list[Part] = []  # attacks of the running chunk that are not finished
        self.robust = 0  # images of the running chunk
        self.robust_at_end = 0  # images of the finished chunks

    def start_chunk(self, images: int, robust: int, parts: Sequence[Part]) -> None:
        """Note that a chunk starts.

        Args:
            images: Its number of images.
            robust: How many of these no attack has broken yet.
            parts: The attacks that are still to run on it.
        """
        self.started = self.clock() if self.started is None else self.started
        self.images_seen += images
        self.robust, self.parts_left, self.done_in_attack = robust, list(parts), 0
        if not parts:  # finished by an earlier process
            self.robust_at_end += robust

    def count_pass(self, rows: int, graph: bool) -> None:
        """Note a pass of the network; `graph` says whether a gradient is recorded."""
        passes = rows * (GRADIENT_COST if graph else 1)
        self.done += passes
        self.done_in_attack += passes

    def end_attack(self, robust: int) -> None:
        """Note that the running attack has ended and left so many images of the chunk robust."""
        self.parts_left, self.done_in_attack, self.robust = self.parts_left[1:], 0, robust
        if not self.parts_left:
            self.robust_at_end += robust

    def seconds(self) -> float | None:
        """Return the estimated remaining seconds; None before the first pass."""
        if not self.done or self.started is None:
            return None
        passes_left = sum(self.passes[part] for part in self.parts_left)
        in_this_chunk = max(0.0, self.robust * passes_left - self.done_in_attack)
        # In the chunks to come as many images are robust as on average so far.
        robust = self.robust_at_end + (self.robust if self.parts_left else 0)
        share = robust / max(1, self.images_seen)
        in_later_chunks = max(0, self.images - self.images_seen) * share * sum(self.passes.values())
        return (in_this_chunk + in_later_chunks) * (self.clock() - self.started) / self.done


class Progress:
    """Passes the progress of AutoAttack on to a callback, with the remaining time."""

    def __init__(self, remaining: RemainingTime, callback: Callback) -> None:
        self.remaining, self.callback = remaining, callback
        self.last_report = remaining.clock()

    def count_pass(self, rows: int, graph: bool) -> None:
        """Note a pass of the network; about once a second the callback receives the remaining time."""
        self.remaining.count_pass(rows, graph)
        if self.remaining.clock() - self.last_report > 1:
            self.last_report = self.remaining.clock()
            self.callback.on_time_left(self.remaining.seconds())

    def start_chunk(self, images: int, robust: int, parts: Sequence[Part]) -> None:
        """Note that a chunk starts; see `RemainingTime.start_chunk`."""
        self.remaining.start_chunk(images, robust, parts)

    def end_attack(self, chunk: int, chunks: int, part: Part, robust: int) -> None:
        """Note that an attack has ended, and notify the callback; see `Callback.on_attack`."""
        self.remaining.end_attack(robust)
        self.callback.on_attack(chunk, chunks, part, robust, self.remaining.seconds())
