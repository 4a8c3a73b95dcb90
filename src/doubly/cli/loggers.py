"""The flags --log and --tensorboard of train, search and reproduce."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from doubly.bridges.logger import Logger
from doubly.errors import UsageError

LOGGERS = {
    "csv": ("csv", "CSV"),
    "mlflow": ("mlflow", "MLflow"),
    "tensorboard": ("tensorboard", "TensorBoard"),
    "wandb": ("wandb", "WandB"),
}
"""Name on the command line -> module of doubly.bridges and its class."""


def logger_factories(names: Sequence[str], tensorboard: bool = False) -> tuple[Callable[[Path], Logger], ...]:
    """Return what makes the loggers of a run directory.

    Args:
        names: Loggers by their names in LOGGERS.
        tensorboard: Whether --tensorboard was given.

    Raises:
        UsageError: If there is no such logger, or its package is missing, before any run has begun.
    """
    factories = []
    for name in dict.fromkeys((*names, *(["tensorboard"] if tensorboard else []))):
        if name not in LOGGERS:
            raise UsageError(f"there is no logger '{name}': --log takes {', '.join(LOGGERS)}")
        module, kind = LOGGERS[name]
        logger = getattr(import_module(f"doubly.bridges.{module}"), kind)
        logger.check_installed()
        factories.append(logger.in_run_dir)
    return tuple(factories)
