"""The one error a user can cause and mend: its text says what came, what is allowed and what to do."""


class UsageError(ValueError):
    """Wrong input. The command line prints the sentence and ends with exit code 2."""


class NonFiniteError(ArithmeticError):
    """Training met a NaN or an infinity; the text names the epoch, the step and the tensor."""
