"""The one error a user can cause and mend: its text says what came, what is allowed and what to do."""


class UsageError(ValueError):
    """Wrong input. The command line prints the sentence and ends with exit code 2."""


class NonFiniteError(ArithmeticError):
    """Training met a NaN or an infinity; the text names the epoch, the step and the tensor."""


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """A signal asked to stop; what was done stands, and `--resume` or the same command goes on from there."""

    number = 2  # of the signal
