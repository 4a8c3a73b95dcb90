"""A run directory at the beginning of a run: lock it, and rewind it to its checkpoint."""

from contextlib import ExitStack

from doubly.checkpoints.files import load_checkpoint_or_previous
from doubly.checkpoints.load import config_difference
from doubly.config.environment import describe_environment
from doubly.config.run import Run
from doubly.config.serialize import to_json
from doubly.distributed import Communicator, on_rank_zero
from doubly.distributed.launch import job_id, was_restarted
from doubly.errors import UsageError
from doubly.files import write_json, write_text
from doubly.locks import DirectoryLock, lock_directory
from doubly.rundir import RunDir, truncate_metrics
from doubly.training.passes import describe_prediction
from doubly.training.snapshot import restore_checkpoint
from doubly.training.state import TrainState

SHARED_FOLDER = "let the output be a folder that all machines share"


def lock_run_dir(
    stack: ExitStack, run: Run, rundir: RunDir, resume: bool, communicator: Communicator, lock: bool = True
) -> DirectoryLock | None:
    """Keep other runs out of the directory, and check that it is empty or holds this run.

    Args:
        stack: Releases the lock at its end.
        run: The configuration.
        rundir: The directory.
        resume: Whether a run that is there may be continued; torchrun's restarts may always.
        communicator: The processes; the first one holds the lock.
        lock: Whether to lock it; False is for file systems without locks.

    Returns:
        The lock, on the first process.

    Raises:
        UsageError: If the directory is in use, holds something else, or is not shared by all machines.
    """
    restarted = was_restarted(communicator)
    locks: list[DirectoryLock] = []
    on_rank_zero(communicator, lambda: locks.append(_lock(stack, run, rundir, resume, restarted, lock)))
    lock_file = "exists" if (rundir.path / ".lock").exists() else "missing"
    communicator.require_equal("files", lock_file, SHARED_FOLDER)
    return locks[0] if locks else None


def _lock(stack: ExitStack, run: Run, rundir: RunDir, resume: bool, restarted: bool, lock: bool) -> DirectoryLock:
    held = stack.enter_context(lock_directory(rundir.path, lock))
    job_file = rundir.path / ".job"  # names torchrun's job, so that its restarts resume without --resume
    resume = resume or (restarted and job_file.is_file() and job_file.read_bytes() == job_id().encode())
    if rundir.config.exists():
        if not resume:
            raise UsageError(
                f"{rundir.path} already holds a run: add --resume to continue it (in Python resume=True), or "
                "choose another --output"
            )
        difference = config_difference(rundir.path, run)
        if difference:
            raise UsageError(
                f"{rundir.path} was begun with another configuration ({difference}): resume it without that change"
            )
    else:
        # Files that begin with a dot are ours, of a run that died at once.
        foreign = [path.name for path in rundir.path.iterdir() if not path.name.startswith(".")]
        if foreign:
            raise UsageError(f"{rundir.path} is not empty ({foreign[0]}): choose another --output")
    if job_id():
        write_text(job_file, job_id())
    return held


def restore_last_checkpoint(state: TrainState, rundir: RunDir) -> str:
    """Restore the last checkpoint if there is one, and bring the directory to the state it had then.

    Returns:
        A sentence about it; empty if there is none.
    """
    loaded = load_checkpoint_or_previous(rundir.checkpoints, "last")
    if loaded is not None:
        path, checkpoint, damage = loaded
        restore_checkpoint(state, checkpoint, path)
    position = f"epoch {state.epoch}, step {state.step}"
    state.communicator.require_equal("checkpoints", position, SHARED_FOLDER)
    on_rank_zero(state.communicator, lambda: _rewind(state, rundir))
    return "" if loaded is None else f"{f'{damage}; ' if damage else ''}continuing at {position}"


def _rewind(state: TrainState, rundir: RunDir) -> None:
    truncate_metrics(rundir.metrics, state.epoch)
    if state.epoch < state.run.epochs:  # an evaluation of an earlier epoch is outdated
        for file in (rundir.evaluation, rundir.predictions, rundir.gallery):
            file.unlink(missing_ok=True)
    if not rundir.config.exists():
        write_json(rundir.config, to_json(state.run))
    if not rundir.environment.exists():
        prediction = describe_prediction(state.run.method, state.data.train)
        write_json(rundir.environment, {**describe_environment(state.device), **prediction})
