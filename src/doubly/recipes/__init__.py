"""Recipes: named runs, DATASET[.imbalanced][.small].METHOD. A difference in numbers is a recipe, not code."""

from collections.abc import Callable
from functools import partial

from doubly.errors import UsageError
from doubly.recipes import digits as _digits
from doubly.runs import Run
from doubly.runs.saved_config import nearest

RECIPES: dict[str, Callable[[], Run]] = {
    f"digits.{prefix}{method}": partial(_digits.digits, method, bool(prefix))
    for prefix in ("", "imbalanced.")
    for method in (*_digits.METHODS, *_digits.FAST)
}


def recipe(name: str) -> Run:
    if name not in RECIPES:
        raise UsageError(f"there is no recipe '{name}'{nearest(name, RECIPES)}")
    return RECIPES[name]()
