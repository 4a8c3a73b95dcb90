"""The weakest classes of an evaluation, as tuples with names; classes that are equally weak are named as well."""

from typing import NamedTuple

import numpy as np

from doubly.evaluation.metrics import Floats, Rounding, tail, worst_class


class _Tail(NamedTuple):
    value: float
    classes: list[str]


class Tail(_Tail):
    """The mean accuracy of the weakest classes and their names, weakest first: `value, classes = result.tail("pgd")`.

    Attributes:
        value: The mean accuracy.
        classes: Names of the classes, weakest first.
        tied: Names of further classes that are as weak as the last of these; which of them count is arbitrary.
    """

    tied: list[str]

    def __new__(cls, value: float, classes: list[str], tied: list[str]) -> "Tail":
        self = super().__new__(cls, value, classes)
        self.tied = tied
        return self

    def __str__(self) -> str:
        return ", ".join(self.classes) + (f" (equally weak: {', '.join(self.tied)})" if self.tied else "")


class _Worst(NamedTuple):
    name: str
    value: float


class Worst(_Worst):
    """The weakest class and its accuracy: `name, value = result.worst("pgd")`.

    Attributes:
        name: Name of the class.
        value: Its accuracy.
        tied: Names of further classes with the same accuracy.
    """

    tied: list[str]

    def __new__(cls, name: str, value: float, tied: list[str]) -> "Worst":
        self = super().__new__(cls, name, value)
        self.tied = tied
        return self

    def __str__(self) -> str:
        return ", ".join([self.name, *self.tied])


def named_tail(accuracies: Floats, names: list[str], share: float, rounding: Rounding) -> Tail:
    """Return the tail of the accuracies of the classes; see `metrics.tail`."""
    value, weakest = tail(accuracies, share, rounding)
    as_weak = np.flatnonzero(accuracies == accuracies[weakest[-1]])
    return Tail(value, [names[k] for k in weakest], [names[k] for k in as_weak if k not in weakest])


def named_worst(accuracies: Floats, names: list[str]) -> Worst:
    """Return the weakest class; see `metrics.worst_class`."""
    index, value = worst_class(accuracies)
    return Worst(names[index], value, [names[k] for k in np.flatnonzero(accuracies == value) if k != index])
