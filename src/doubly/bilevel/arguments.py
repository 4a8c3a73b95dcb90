"""Checks of arguments by their annotations, and sentences for what torch says about tensors that do not fit."""

import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, ParamSpec, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
_OUT_OF_MEMORY = (  # torch has no class of its own for these
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "backend out of memory",
)
_PACKAGE = str(Path(__file__).parent.parent)
_MISFITS = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
)  # what Python and torch raise for wrong tensors


class Checked:
    """A dataclass whose settings are compared with their annotations before they are stored."""

    refusal: ClassVar[type[Exception]] = TypeError
    """error for a setting that does not fit"""
    checks_itself: ClassVar[tuple[str, ...]] = ()
    """settings that the class checks in its own words"""

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:
        """Compare the settings with their annotations, and return a new object."""
        names = _parameters(cls)  # type: ignore[arg-type]  # classes are hashable
        given = {**dict(zip(names, arguments, strict=False)), **settings}
        check_arguments(cls, {k: v for k, v in given.items() if k not in cls.checks_itself}, cls.refusal)
        return super().__new__(cls)

    @classmethod
    def accepts(cls, value: object) -> bool:
        """Return whether a value can stand where this class is asked for."""
        return isinstance(value, cls)


def check_arguments(
    owner: Callable[..., Any], arguments: Mapping[str, Any], error: type[Exception] = TypeError
) -> None:
    """Compare arguments with the annotations of a class or function.

    Args:
        owner: The class or function.
        arguments: Its arguments by their names; those without an annotation are not looked at.
        error: What to raise.
    """
    hints, defaults = _hints(owner), _parameters(owner)
    for name, value in arguments.items():
        if name in hints and value is not defaults.get(name, ...) and not fits(value, hints[name]):
            raise error(
                f"{owner.__name__}: {name} must be {describe(hints[name])}, got {show(value)}: "
                f"help({owner.__name__}) says what it takes"
            )


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is what an annotation asks for; an annotation that says too little fits anything."""
    return _predicate(hint)(value)


@cache
def _predicate(hint: Any) -> Callable[[Any], bool]:
    """Return the function that tells whether a value fits an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    kind = origin or hint
    if origin in (Union, types.UnionType):
        parts = [_predicate(argument) for argument in arguments]
        return lambda value: any(part(value) for part in parts)
    if origin is Literal:
        return lambda value: any(type(value) is type(allowed) and value == allowed for allowed in arguments)
    if origin is tuple:
        return lambda value: isinstance(value, tuple | list) and _entries_fit(value, arguments)
    if kind is float:
        return lambda value: isinstance(value, Real) and not isinstance(value, bool)
    if kind is int:
        return lambda value: isinstance(value, Integral) and not isinstance(value, bool)
    if kind is None or kind is type(None):
        return lambda value: value is None
    if kind is Callable:  # int, str, … are functions for Python only
        return lambda value: callable(value) and not (isinstance(value, type) and value.__module__ == "builtins")
    if hint is Any or not isinstance(kind, type):
        return lambda value: True
    if issubclass(kind, Checked):
        return kind.accepts
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        is_function = "__call__" in vars(kind)
        return lambda value: not is_function or (callable(value) and not isinstance(value, type))
    return lambda value: isinstance(value, kind)


def _entries_fit(values: Sequence[Any], hints: tuple[Any, ...]) -> bool:
    if hints[-1] is ...:
        hints = hints[:1] * len(values)
    return len(values) == len(hints) and all(fits(v, hint) for v, hint in zip(values, hints, strict=True))


def describe(hint: Any) -> str:
    """Return an annotation in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return f"a tuple, each entry {describe(arguments[0])}"
    names = {float: "a number", int: "a whole number", bool: "True or False", str: "text", type(None): "None"}
    kind = origin or hint
    if kind is Callable:
        return "a function"
    return names.get(kind) or f"of type {getattr(kind, '__name__', kind)}"


def show(value: Any) -> str:
    """Return a value as messages name it: tensors by dtype and shape, anything else by its type and text."""
    if isinstance(value, Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        layout = "" if value.layout is torch.strided else " sparse"
        return f"a{layout} tensor of {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}"
    if isinstance(value, int | float | str | None):
        return f"{value!r:.40}"
    return f"an object of type {type(value).__name__}"


def explaining(refusal: type[Exception]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator for functions of tensors: tensors that do not fit are answered by one sentence.

    Nothing is checked before the call, so that calls that work cost nothing. For functions that call no code of the
    user, whose errors are not ours to explain.

    Args:
        refusal: What to raise.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*arguments: P.args, **settings: P.kwargs) -> T:
            try:
                return function(*arguments, **settings)
            except _MISFITS as error:
                if is_out_of_memory(error) or (isinstance(error, (refusal, NotImplementedError)) and _is_ours(error)):
                    raise
                given = {**dict(zip(_parameters(function), arguments, strict=False)), **settings}
                raise refusal(_misfit(function, given, error)) from error

        return call

    return decorate


explained = explaining(ValueError)


def _misfit(function: Callable[..., Any], given: dict[str, Any], error: Exception) -> str:
    """Return the sentence about arguments that made a function fail."""
    hints, given = _hints(function), {name: value for name, value in given.items() if name != "self"}
    wrong = [name for name, value in given.items() if name in hints and not fits(value, hints[name])]
    allowed = "".join(f"; {name} must be {describe(hints[name])}" for name in wrong)
    got = ", ".join(f"{name} = {show(value)}" for name, value in given.items())
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.120}"
    name = function.__qualname__
    return f"{name} cannot use {got}{allowed} ({reason}): help({name}) says which types and shapes it takes"


def _is_ours(error: Exception) -> bool:
    """Return whether an error was raised by a statement of this package, whose messages need no explanation."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(_PACKAGE) and (not last.line or last.line.startswith("raise"))


def check_rows(values: Any, name: str, allow_empty: bool = False) -> None:
    """Check that values are a tensor of floating-point numbers with one row per sample.

    Args:
        values: What was given.
        name: Its name, for the message.
        allow_empty: Whether there may be no row.

    Raises:
        TypeError: If it is no such tensor.
        ValueError: If there is no row, or the tensor has no values.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.layout is not torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor of floating-point numbers, one row per sample, got {show(values)}"
        )
    if values.dim() == 0 or not (allow_empty or values.numel()) or values.is_meta:
        raise ValueError(f"{name} must hold at least one row with values, (B, ...), got {show(values)}")


def at_step(schedule: Callable[[int], float], number: int, name: str) -> float:
    """Return a schedule at a step.

    Raises:
        TypeError: If it is not a function of one argument, the number of the step, that returns a number.
    """
    try:
        signature(schedule).bind(number)
    except TypeError as error:
        raise TypeError(f"{name} must be a function of the step alone ({error}): write lambda step: 0.1") from None
    except ValueError:  # a function of C, which does not say what it takes
        pass
    value = schedule(number)
    if not fits(value, float) and not (isinstance(value, Tensor) and value.numel() == 1):
        raise TypeError(f"{name} must return a number, got {show(value)} at step {number}: write lambda step: 0.1")
    return value


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the memory of the device or of the machine ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)
    )


@cache
def _hints(owner: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a class or function; none where a name in them is not known."""
    try:
        return get_type_hints(owner)
    except NameError:
        return {}


@cache
def _parameters(owner: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of a class or function, each with its default."""
    return {name: parameter.default for name, parameter in signature(owner).parameters.items()}
