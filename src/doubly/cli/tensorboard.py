"""The flag --tensorboard of train, search and reproduce."""

from pathlib import Path

from doubly.jobs.job import CallbackFactory


def tensorboard_factories(enabled: bool) -> tuple[CallbackFactory, ...]:
    """Return what makes a TensorBoard callback for a run directory; nothing if not enabled.

    Raises:
        UsageError: If the package is missing, before any run has begun.
    """
    if not enabled:
        return ()
    from doubly.bridges.tensorboard import TensorBoard

    TensorBoard(Path())  # only checks that the package can be imported
    return (TensorBoard.in_run_dir,)
