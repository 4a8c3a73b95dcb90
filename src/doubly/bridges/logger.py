"""What the loggers share: they are checked before training, and one that fails later does not end it."""

import random
import warnings
from abc import abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import numpy as np

from doubly.callbacks import Callback
from doubly.errors import Interrupted, UsageError
from doubly.reading import read_tree
from doubly.rundir import RunDir
from doubly.seeding import forked
from doubly.text import printable


def warn(message: str) -> None:
    """Show a message as a Python warning."""
    warnings.warn(message, stacklevel=2)


class Logger(Callback):
    """Writes the rows of metrics elsewhere; subclasses have `write` and `finish`.

    An error in either is said once and ends the logging, not the training. Global random numbers that a library draws
    are given back, so that the trained weights have the same bits with and without a logger.
    """

    title = "the logger"
    say: Callable[[str], None] = staticmethod(warn)
    """where a failure is said; the command line prints it"""

    def __init__(self, folder: Path | str, run_dir: Path | str | None = None, config: dict[str, Any] | None = None):
        """Keep where to write.

        Args:
            folder: Where the files go; it is created with the first row.
            run_dir: The run directory, whose configuration and files are logged.
            config: The configuration, if there is no run directory.

        Raises:
            UsageError: If the package is missing, or a folder is no path.
        """
        self.check_installed()
        for value in (folder, run_dir or ""):
            if not isinstance(value, str | Path):
                raise UsageError(
                    f"the folder of {self.title} is a path, got {type(value).__name__}: pass text or a Path"
                )
        self.folder = Path(folder)
        self.run_dir = None if run_dir is None else RunDir(Path(run_dir))
        self.config, self.failed, self.last_epoch = config, False, -1

    @classmethod
    def check_installed(cls) -> None:
        """Raise UsageError if the package is missing; by default none is needed."""

    @classmethod
    def in_run_dir(cls, path: Path) -> Self:
        """Return a logger that writes into a run directory.

        Args:
            path: The run directory.

        Raises:
            UsageError: If the package is missing.
        """
        return cls(path / cls.title.lower(), path)

    def read_config(self) -> dict[str, Any]:
        """Return the configuration of the run as JSON has it; empty if there is none."""
        if self.config is None and self.run_dir is not None and self.run_dir.config.is_file():
            self.config = read_tree(self.run_dir.config)
        return self.config or {}

    @property
    def is_complete(self) -> bool:
        """Whether the last epoch of the configuration was logged; also if its number is not known."""
        return self.last_epoch + 1 >= int(self.read_config().get("epochs", 0))

    def artifacts(self) -> list[Path]:
        """Return the files of the run that are kept with it: configuration, metrics and the last weights."""
        if self.run_dir is None:
            return []
        weights = self.run_dir.checkpoints / "last"
        network = "ema" if (weights / "ema.safetensors").is_file() else "model"
        files = (
            self.run_dir.config,
            self.run_dir.environment,
            self.run_dir.metrics,
            weights / f"{network}.safetensors",
        )
        return [file for file in files if file.is_file()]

    def on_epoch(self, row: dict[str, Any]) -> None:
        """Write a `row` of metrics."""
        if not self.failed:
            self._guarded(lambda: self.write(row))
            self.last_epoch = row["epoch"]

    def close(self) -> None:
        """Finish what was begun; a later row begins anew."""
        self._guarded(self.finish)

    @abstractmethod
    def write(self, row: dict[str, Any]) -> None:
        """Write a `row` of metrics; may fail."""

    def finish(self) -> None:
        """Close what is open; may fail."""

    def _guarded(self, action: Callable[[], None]) -> None:
        python, arrays = random.getstate(), np.random.get_state()
        try:
            with forked():
                action()
        except Interrupted:
            raise
        except Exception as error:  # whatever a library raises must not end hours of training
            if not self.failed:
                reason = printable(f"{type(error).__name__}: {error}")[:200]
                self.failed = True
                self.say(f"{self.title} failed and is left out from here on ({reason}); training goes on")
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def require(module: str, title: str, extra: str) -> None:
    """Import a library.

    Args:
        module: Its name.
        title: What it is called in the message.
        extra: The extra of doubly that installs it.

    Raises:
        UsageError: If it cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the library's own code
            import_module(module)
    except ImportError as error:
        raise UsageError(f"{title} cannot be used ({error}): pip install 'doubly[{extra}]'") from None
