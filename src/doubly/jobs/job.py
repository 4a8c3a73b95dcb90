"""A job: one run to train, and how to evaluate it afterwards. Pickle can send it to another process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from doubly.callbacks import Callback
from doubly.checkpoints.load import config_difference
from doubly.config.run import Run
from doubly.errors import Interrupted, UsageError
from doubly.evaluation.api import evaluate_run, is_evaluated
from doubly.evaluation.config import EvalConfig
from doubly.rundir import RunDir, is_run, read_metrics
from doubly.training.loop import train_run

CallbackFactory = Callable[[Path], Callback]
"""Makes a callback for a run directory, in the process that does the job."""

WITHOUT_TRUST = EvalConfig(trust=False)  # the checks of trust are for `doubly evaluate`, on the runs that matter
MAX_ATTEMPTS = 3  # how often a job is started whose process dies


@dataclass(frozen=True)
class Job:
    """One run, its directory, and how it is evaluated.

    Attributes:
        run: What to train.
        output: The run directory.
        evaluate: How to evaluate the trained network on the test images; None does not evaluate it.
        attacks: Attacks of the evaluation, by name.
        callbacks: Factories of callbacks, called with the run directory, once for training and once for the
            evaluation. Pickle must be able to send them to another process: functions and classes of modules, such as
            `TensorBoard.in_run_dir`, and no lambdas.
    """

    run: Run
    output: Path
    evaluate: EvalConfig | None = WITHOUT_TRUST
    attacks: tuple[str, ...] = ("pgd", "margin")
    callbacks: tuple[CallbackFactory, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether the directory holds this run, trained and evaluated with these settings."""
        if not self.is_started:
            return False
        if self.evaluate is None:
            return self.epochs_done == self.run.epochs
        return is_evaluated(self.output, self.run, self.attacks, self.evaluate)

    @property
    def is_started(self) -> bool:
        """Whether the directory holds this run, complete or not."""
        try:
            return is_run(self.output) and self.conflict is None
        except UsageError:  # a config.json that cannot be read: training will say so
            return False

    @property
    def conflict(self) -> str | None:
        """The first difference between the run in the directory and this one; None if there is none, or no run."""
        return config_difference(self.output, self.run) if is_run(self.output) else None

    @property
    def epochs_done(self) -> int:
        """Number of epochs that metrics.jsonl records."""
        return len(read_metrics(RunDir(self.output).metrics))

    @property
    def status(self) -> str:
        """The progress of the job, in words."""
        if self.is_done:
            return "done"
        if not self.is_started:
            return "to do"
        epochs = self.epochs_done
        return f"stopped at epoch {epochs} of {self.run.epochs}" if epochs < self.run.epochs else "trained, to evaluate"

    def make_callbacks(self) -> list[Callback]:
        """Return new callbacks for the run directory."""
        return [factory(self.output) for factory in self.callbacks]

    def evaluate_trained(self, stop: Callable[[], bool]) -> None:
        """Evaluate the trained network of the directory.

        Args:
            stop: Called regularly; True means to save and stop.

        Raises:
            Interrupted: If `stop` returned True.
        """
        if self.evaluate is not None:
            callbacks = [*self.make_callbacks(), StopEvaluation(stop)]
            root = self.run.data.root
            evaluate_run(self.output, attacks=self.attacks, root=root, config=self.evaluate, callbacks=callbacks)


class StopEvaluation(Callback):
    """Ends an evaluation on request. AutoAttack takes hours; the next evaluation continues from its saved state."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        """Set the function that decides.

        Args:
            stop: Called after each chunk of images, and about once a second during AutoAttack; True ends it.
        """
        self.stop = stop

    def on_images(self, done: int, total: int) -> None:
        self._check()

    def on_time_left(self, seconds: float | None) -> None:
        self._check()

    def _check(self) -> None:
        if self.stop():
            raise Interrupted("stopped during the evaluation")


def run_job(job: Job, stop: Callable[[], bool]) -> str | None:
    """Train and evaluate one run in this process, from where it was stopped.

    Args:
        job: What to do.
        stop: Called regularly; True means to save and stop.

    Returns:
        Why the job failed, whatever the error was; None if it is done.
    """
    try:
        if not job.is_done:  # an earlier process may have finished it and died before it could say so
            train_run(job.run, job.output, resume=True, callbacks=job.make_callbacks(), stop=stop)
            job.evaluate_trained(stop)
    except Exception as error:  # one job that fails does not stop the others
        return f"{type(error).__name__}: {error}"
    return None


def unfinished_jobs(jobs: Sequence[Job], console: Console) -> list[Job]:
    """Return the jobs that are not done, and print how many are."""
    unfinished = [job for job in jobs if not job.is_done]
    if len(unfinished) < len(jobs):
        console.print(f"{len(jobs) - len(unfinished)} of {len(jobs)} runs are done already", highlight=False)
    return unfinished


def describe_crash(reason: str) -> str:
    """Return the message about a job whose process died in every attempt."""
    return (
        f"died {MAX_ATTEMPTS} times ({reason}): run fewer jobs at a time; the same command continues where it stopped"
    )
