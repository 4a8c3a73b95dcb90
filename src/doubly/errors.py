"""The errors that the command line reports without a traceback, and the two that end a run early."""


class UsageError(ValueError):
    """Wrong input. The message says what came, what is allowed and what to do; the command line exits with code 2."""


class NonFiniteError(ArithmeticError):
    """Training met a NaN or an infinity; the message names the epoch, the step and the tensor."""


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """A signal ended the work. Finished work is saved; `--resume` or the same command continues from there."""

    number = 2
    """number of the signal"""


class ProcessLost(RuntimeError):  # noqa: N818 - nothing is wrong with this process
    """Another process of this run has ended or cannot be reached."""

    def __init__(self, reason: str) -> None:
        """Make the message from the reason that the communication library gave."""
        super().__init__(
            f"another process of this run has ended or cannot be reached ({reason:.160}): its own message, if it left "
            "one, says why; continue from the last checkpoint with --resume, or let torchrun --max-restarts do it"
        )
