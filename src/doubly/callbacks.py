"""Callbacks: objects that listen to training and evaluation. No torch."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any


class Callback:
    """Listens to training and evaluation; every method does nothing unless a subclass overrides it.

    Only the first process of a run calls its callbacks.
    """

    def on_message(self, message: str) -> None:
        """Called with a `message` for the user."""

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        """Called after each training step.

        Args:
            epoch: Number of the epoch, from 0.
            step: Steps of the epoch that are done.
            steps: Steps of an epoch.
        """

    def on_epoch(self, row: dict[str, Any]) -> None:
        """Called after each epoch with its `row` of metrics, as metrics.jsonl keeps it."""

    def on_images(self, done: int, total: int) -> None:
        """Called in an evaluation after each chunk: PGD has attacked `done` of `total` images."""

    def on_attack(self, chunk: int, chunks: int, part: str, robust: int, seconds_left: float | None) -> None:
        """Called in an evaluation after each attack of AutoAttack on a chunk.

        Args:
            chunk: Number of the chunk, from 0.
            chunks: Number of chunks.
            part: Name of the attack.
            robust: Images of the chunk that no attack has broken yet.
            seconds_left: Estimated time to the end of the evaluation, if known.
        """

    def on_time_left(self, seconds: float | None) -> None:
        """Called about once a second while AutoAttack runs, with the estimated `seconds` to the end."""

    def close(self) -> None:
        """Called at the end, also after an error."""


class CallbackList(Callback):
    """Passes every call on to several callbacks, in their order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = list(callbacks)

    def on_message(self, message: str) -> None:
        for callback in self.callbacks:
            callback.on_message(message)

    def on_step(self, epoch: int, step: int, steps: int) -> None:
        for callback in self.callbacks:
            callback.on_step(epoch, step, steps)

    def on_epoch(self, row: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_epoch(row)

    def on_images(self, done: int, total: int) -> None:
        for callback in self.callbacks:
            callback.on_images(done, total)

    def on_attack(self, chunk: int, chunks: int, part: str, robust: int, seconds_left: float | None) -> None:
        for callback in self.callbacks:
            callback.on_attack(chunk, chunks, part, robust, seconds_left)

    def on_time_left(self, seconds: float | None) -> None:
        for callback in self.callbacks:
            callback.on_time_left(seconds)

    def close(self) -> None:
        with ExitStack() as stack:  # which closes all, whatever one of them raises
            for callback in reversed(self.callbacks):
                stack.callback(callback.close)
