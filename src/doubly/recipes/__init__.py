"""Recipes: named runs, DATASET[.imbalanced][.small].METHOD. Runs that differ in settings only are recipes, not code."""

from collections.abc import Callable
from functools import partial

from doubly.config import Run
from doubly.config.serialize import suggestion
from doubly.errors import UsageError
from doubly.recipes import digits as _digits
from doubly.recipes.digits import ALL
from doubly.recipes.literal import literal
from doubly.recipes.paper import SETTINGS, VARIANTS, paper_recipe, small_recipe

PREFIXES = {"": False, "imbalanced.": True}
RECIPES: dict[str, Callable[[], Run]] = {
    **{
        f"digits.{prefix}{method}": partial(_digits.digits, method, PREFIXES[prefix])
        for prefix in PREFIXES
        for method in ALL
    },
    **{
        f"{dataset}.{prefix}{method}": partial(paper_recipe, dataset, method, PREFIXES[prefix])
        for dataset in SETTINGS
        for prefix in PREFIXES
        for method in (*ALL, *VARIANTS)
    },
    **{
        f"{dataset}.{prefix}small.{method}": partial(small_recipe, dataset, method, PREFIXES[prefix])
        for dataset in SETTINGS
        for prefix in PREFIXES
        for method in ALL
    },
}

RECIPE_VARIANTS: dict[str, Callable[[Run], Run]] = {"literal": literal}
"""The variants of recipes by name."""


def recipe(name: str, variant: str | None = None) -> Run:
    """Return the run of a name.

    Args:
        name: DATASET[.imbalanced][.small].METHOD.
        variant: Name of a variant of the recipe; None for the recipe itself.

    Raises:
        UsageError: If there is no such recipe or variant; it suggests a similar name.
    """
    if name not in RECIPES:
        raise UsageError(f"there is no recipe '{name}'{suggestion(name, RECIPES)}")
    if variant is None:
        return RECIPES[name]()
    if variant not in RECIPE_VARIANTS:
        raise UsageError(f"there is no variant '{variant}'{suggestion(variant, RECIPE_VARIANTS)}")
    return RECIPE_VARIANTS[variant](RECIPES[name]())
