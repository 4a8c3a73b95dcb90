"""Words of the command line as values."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any, TypeVar

from doubly.errors import UsageError

T = TypeVar("T")


def parsed(kind: type[T], arguments: Sequence[str], verb: str, default: T | None = None) -> T:
    """The arguments as a dataclass: a dotted flag for every field, and numbers also written as 8/255."""
    import tyro
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def fractions(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float] | None:
        return _number() if info.type is float else None

    def _number() -> PrimitiveConstructorSpec[float]:
        from doubly.config.serialize import parse_number

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="NUMBER",
            instance_from_str=lambda words: parse_number(words[0]),
            is_instance=lambda value: isinstance(value, float | int),
            str_from_instance=lambda value: [repr(value)],
        )

    settings: Any = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)
    said = StringIO()
    try:
        with registry, redirect_stderr(said):
            found: T = tyro.cli(kind, prog=f"doubly {verb}", args=arguments, default=default, config=settings)  # type: ignore[assignment]
    except SystemExit as end:
        problem: BaseException | None = end
        while problem is not None and not isinstance(problem, UsageError):
            problem = problem.__context__
        if problem is not None:  # a value that a dataclass refuses: its sentence says enough
            raise problem from None
        sys.stderr.write(said.getvalue())
        raise
    return found


def taken(arguments: list[str], flag: str) -> list[str]:
    """Remove every `flag VALUE` and `flag=VALUE` from the arguments and return the values."""
    values, kept, words = [], [], iter(arguments)
    for word in words:
        if word == flag:
            value = next(words, None)
            if value is None:
                raise UsageError(f"{flag} needs a value")
            values.append(value)
        elif word.startswith(f"{flag}="):
            values.append(word.removeprefix(f"{flag}="))
        else:
            kept.append(word)
    arguments[:] = kept
    return values
