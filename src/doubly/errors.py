"""The one error a user can cause and mend: its text says what came, what is allowed and what to do."""


class UsageError(ValueError):
    """Wrong input. The command line prints the sentence and ends with exit code 2."""


class NonFiniteError(ArithmeticError):
    """Training met a NaN or an infinity; the text names the epoch, the step and the tensor."""


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """A signal asked to stop; what was done stands, and `--resume` or the same command goes on from there."""

    number = 2  # of the signal


class ProcessLost(RuntimeError):  # noqa: N818 - nothing is wrong with this one
    """Another process of this run is gone or out of reach."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"another process of this run has ended or cannot be reached ({reason:.160}): its own message, if it left "
            "one, says why; the run goes on from its last checkpoint with --resume, under torchrun --max-restarts by "
            "itself"
        )
