"""Import the package that a bridge leads to."""

import warnings
from importlib import import_module
from types import ModuleType

from doubly.errors import UsageError


def import_package(module: str, needed_by: str, distribution: str, extra: str) -> ModuleType:
    """Import a package of an extra.

    Args:
        module: The module to import.
        needed_by: What needs it, with its verb: "attacks foolbox:… need".
        distribution: What the package is called.
        extra: The extra of doubly that installs it.

    Raises:
        UsageError: If it is not installed, or cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about what the library imports
            return import_module(module)
    except ImportError as error:
        reason = "" if error.name == module.partition(".")[0] else f" (it lacks {error.name})"
        raise UsageError(
            f"{needed_by} the package {distribution}, which is not installed{reason}: pip install doubly[{extra}]"
        ) from None
