"""Parse the arguments of a verb: a dataclass by its fields, and flags that may be repeated."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from doubly.cli.help import ShortHelp
from doubly.errors import UsageError
from doubly.text import parse_number

T = TypeVar("T")
DataRoot = Annotated[
    str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: where doubly data fetch puts them)")
]
"""The option --data-root: the folder with the files of the datasets."""
OwnWeights = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: as M:F returns it)")]
Numbers = Annotated[
    tuple[float, ...], tyro.conf.arg(metavar="NUMBER…", help_behavior_hint="(default: it takes images in [0, 1])")
]
"""The options --mean and --std of a network that expects normalized images."""


@dataclass(frozen=True)
class NetworkOptions:
    """Options of the verbs that attack a network: of a run directory, or of the user's own."""

    norm: Annotated[
        str | None,
        tyro.conf.arg(metavar="NAME", aliases=["--threat"], help_behavior_hint="(default: that of the run, or linf)"),
    ] = None
    """norm of the perturbations: linf, l2, l1, or another name from `doubly list kinds threat`"""
    epsilon: Annotated[
        str | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="(default: that of the run, or of the norm)")
    ] = None
    """largest perturbation, such as 8/255"""
    checkpoint: Literal["last", "best"] = "last"
    """checkpoint of a run: that of the last epoch, or of the best on the hold-out"""
    device: str = "auto"
    """auto takes CUDA where there is one; or cpu, cuda, cuda:1, …"""
    model: Annotated[
        str | None, tyro.conf.arg(metavar="M:F", help_behavior_hint="(default: the network of the run)")
    ] = None
    """package.module:function that builds your network, or hf:ORG/NAME, hf:./folder, timm:NAME, torchvision:NAME,
    robustbench:NAME"""
    weights: OwnWeights = None
    """weights of your network: safetensors, or a state dict saved by torch"""
    mean: Numbers = ()
    """mean of the channels, of pixels in [0, 1], if your network expects normalized images"""
    std: Numbers = ()
    """standard deviation of the channels, with --mean"""
    trust_code: bool = False
    """run the code that the run directory names; without it, a run from somebody else cannot execute anything"""
    data_root: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="DIR", help_behavior_hint="(default: that of the run, or where doubly data fetch puts them)"
        ),
    ] = None
    """folder with the dataset's files"""


_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float] | None:
    """Let a float also be written as a fraction, such as 8/255."""
    if info.type is not float:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="NUMBER",
        instance_from_str=lambda words: parse_number(words[0]),
        is_instance=lambda value: isinstance(value, float | int),
        str_from_instance=lambda value: [repr(value)],
    )


def parse_options(
    kind: type[T],
    arguments: Sequence[str],
    verb: str,
    default: T | None = None,
    short_help: ShortHelp | None = None,
) -> T:
    """Parse arguments into a dataclass, with a dotted flag for every field.

    Args:
        kind: The dataclass; its docstring and the strings below its fields are the help.
        arguments: The words of the command line after the verb.
        verb: Name of the verb, for help and messages.
        default: Values of fields that are not given.
        short_help: What --help shows; by default everything, as --help-all does.

    Raises:
        UsageError: If a dataclass refuses a value.
        SystemExit: After --help (0), or after a message about an unknown flag or a value of the wrong type (2).
    """
    if short_help is not None and {"-h", "--help"} & set(arguments):
        sys.stdout.write(short_help.text(kind() if default is None else default) + "\n")
        raise SystemExit(0)
    arguments = ["--help" if word == "--help-all" else word for word in arguments]
    settings: Any = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)
    message = StringIO()
    try:
        with _REGISTRY, redirect_stderr(message):
            options: T = tyro.cli(kind, prog=f"doubly {verb}", args=arguments, default=default, config=settings)  # type: ignore[assignment]
    except SystemExit as end:
        error: BaseException | None = end
        while error is not None and not isinstance(error, UsageError):
            error = error.__context__
        if error is not None:  # what a dataclass refuses is one sentence; tyro would print it in a box with a usage
            raise error from None
        sys.stderr.write(message.getvalue())
        raise
    return options


def pop_flag(arguments: list[str], flag: str) -> list[str]:
    """Remove every `flag VALUE` and `flag=VALUE` from the arguments.

    Returns:
        The values, in their order.

    Raises:
        UsageError: If the value of the last one is missing.
    """
    values, remaining, words = [], [], iter(arguments)
    for word in words:
        if word == flag:
            value = next(words, None)
            if value is None:
                raise UsageError(f"{flag} needs a value")
            values.append(value)
        elif word.startswith(f"{flag}="):
            values.append(word.removeprefix(f"{flag}="))
        else:
            remaining.append(word)
    arguments[:] = remaining
    return values
