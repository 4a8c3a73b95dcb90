"""Handlers of SIGINT (Ctrl-C) and SIGTERM: save and stop, stop at once, or wait until a critical part is over."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from doubly.errors import Interrupted

Handler = Callable[[int, FrameType | None], object]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A request to stop, made by a signal; calling it returns whether one came.

    Attributes:
        number: Number of the signal; None before one came.
    """

    number: int | None = None

    def __call__(self) -> bool:
        """Return whether to stop."""
        return self.number is not None


def interruption(request: StopRequest) -> Interrupted:
    """Return the error that ends a command of several jobs after a signal; its number becomes the exit code."""
    error = Interrupted("stopped; the same command continues where this one stopped")
    error.number = request.number or error.number
    return error


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request inside; a second signal raises KeyboardInterrupt.

    Yields:
        The request. It is never made in other threads than the main one, which do not get signals.
    """
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.number is not None:
            raise KeyboardInterrupt
        request.number = number

    with _handlers(dict.fromkeys(SIGNALS, handle)):
        yield request


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Stop at once when a signal comes; for work whose files are complete at any time, such as AutoAttack's.

    Raises:
        Interrupted: After SIGINT or SIGTERM.
    """
    received: int = signal.SIGINT

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        raise KeyboardInterrupt

    try:
        # SIGINT too, since a shell lets its background jobs ignore it.
        with _handlers({signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler}):
            yield
    except KeyboardInterrupt:
        error = Interrupted(
            "stopped; finished parts of AutoAttack are saved, and the same command continues from there"
        )
        error.number = received
        raise error from None


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Keep signals that come inside, and raise them afterwards."""
    received: list[int] = []
    with _handlers(dict.fromkeys(SIGNALS, lambda number, frame: received.append(number))):
        yield
    for number in received:
        signal.raise_signal(number)


@contextmanager
def _handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install handlers inside and restore the old ones; Python allows that in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
