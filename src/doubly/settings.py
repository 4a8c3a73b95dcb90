"""Checks by annotations, with a UsageError: the base of everything made of settings, and of functions of arrays."""

from typing import ClassVar

from doubly.bilevel.arguments import Checked, explaining
from doubly.errors import UsageError

explained = explaining(UsageError)


class Settings(Checked):
    """A dataclass of settings; one that does not fit its annotation is refused by a UsageError."""

    refusal: ClassVar[type[Exception]] = UsageError
