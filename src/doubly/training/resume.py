"""A run directory at the start of a run: whose it is, and how it is brought back to the checkpoint that stands."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from doubly.checkpoints import files as checkpoint
from doubly.checkpoints.load import other_configuration
from doubly.config.environment import environment
from doubly.config.run import Run
from doubly.config.serialize import to_json
from doubly.distributed import collectives as parallel
from doubly.distributed.launch import job, restarted
from doubly.distributed.rank_zero import first
from doubly.errors import UsageError
from doubly.rundir import RunDir, lock_run_dir, truncate_metrics, write_json
from doubly.training.passes import prediction
from doubly.training.state import Training


def claim(held: ExitStack, run: Run, rundir: RunDir, resume: bool) -> None:
    """Keep others out of the directory, and make sure that it is free for this run, or already holds it."""
    first(partial(_claim, held, run, rundir, resume, restarted()))
    seen = "there" if (rundir.path / ".lock").exists() else "missing"
    parallel.agree("files", seen, "let the output be a folder that all machines share")


def _claim(held: ExitStack, run: Run, rundir: RunDir, resume: bool, restart: bool) -> None:
    held.enter_context(lock_run_dir(rundir.path))
    mark = rundir.path / ".job"  # of torchrun, if that is who began it: what it starts anew goes on by itself
    resume = resume or (restart and mark.is_file() and mark.read_text() == job())
    if rundir.config.exists():
        if not resume:
            raise UsageError(
                f"{rundir.path} already holds a run: add --resume to continue it, or choose another --output"
            )
        changed = other_configuration(rundir.path, run)
        if changed:
            raise UsageError(
                f"{rundir.path} was begun with another configuration ({changed}): resume it without that change"
            )
        _sign(mark)
        return
    strangers = [p.name for p in rundir.path.iterdir() if not p.name.startswith(".")]  # ours may have died at once
    if strangers:
        raise UsageError(f"{rundir.path} is not empty ({strangers[0]}): choose another --output")
    _sign(mark)


def _sign(mark: Path) -> None:
    if job():
        mark.write_text(job())


def go_on(training: Training, rundir: RunDir) -> str:
    """Go on from the checkpoint, if one stands, and bring the directory back to it; else that is now ours.

    Returns what to say of it.
    """
    standing = checkpoint.find(rundir.checkpoints, "last")
    if standing is not None:
        training.restore(*checkpoint.load(standing), standing)
    here = f"epoch {training.epoch}, step {training.step}"
    parallel.agree("checkpoints", here, "let the output be a folder that all machines share")
    first(partial(_bring_back, training, rundir))
    return "" if standing is None else f"continuing at {here}"


def _bring_back(training: Training, rundir: RunDir) -> None:
    """The directory as it was at the checkpoint."""
    truncate_metrics(rundir.metrics, training.epoch)
    if training.epoch < training.run.epochs:  # what was measured of an earlier epoch is true no longer
        rundir.evaluation.unlink(missing_ok=True)
        rundir.predictions.unlink(missing_ok=True)
        rundir.gallery.unlink(missing_ok=True)
    if not rundir.config.exists():
        write_json(rundir.config, to_json(training.run))
    if not rundir.environment.exists():
        foreseen = prediction(training.run.method, training.images.train)
        write_json(rundir.environment, {**environment(training.device), **foreseen})
