"""A plan of the paper's runs as one study: run it here or on Ray, estimate it, or write it down for a scheduler."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from doubly.errors import UsageError
from doubly.jobs.cost import DataSize, Estimate, PassTimes, data_sizes, estimate_run, measure_passes, published_size
from doubly.jobs.job import Job
from doubly.jobs.pool import core_count, run_jobs
from doubly.jobs.ray import run_on_ray
from doubly.jobs.slurm import JobCommands, job_commands, report_command, slurm_script
from doubly.studies.plans import Scale, show_report

DEFAULT_PROCESSES = 2


@dataclass(frozen=True)
class PlannedStudy:
    """The jobs of a plan at one scale.

    Attributes:
        name: Name of the plan.
        jobs: All jobs, also those that are done.
        scale: How large they are.
        output: Folder of the run directories.
        processes: How many jobs run at a time; None takes two here, and as many as there is room for on a cluster.
        train_flags: Further flags of the commands that train.
    """

    name: str
    jobs: list[Job]
    scale: Scale
    output: Path
    processes: int | None = None
    train_flags: tuple[str, ...] = ()

    @cached_property
    def unfinished(self) -> list[Job]:
        """The jobs that were not done when this was first read."""
        return [job for job in self.jobs if not job.is_done]

    @property
    def local_processes(self) -> int:
        """Number of jobs that run at a time on this machine."""
        return self.processes or DEFAULT_PROCESSES

    @property
    def report_folder(self) -> Path:
        """Folder of the report."""
        return self.output / f"report-{self.name}"

    @property
    def report_command(self) -> str:
        """The command that writes the report."""
        return report_command([job.output for job in self.jobs], self.report_folder)

    @property
    def commands(self) -> list[JobCommands]:
        """The commands of the jobs that are not done."""
        return [job_commands(job, self.scale.changes, self.train_flags) for job in self.unfinished]

    def run(self, console: Console, ray: str | None = None) -> dict[Path, str]:
        """Do the jobs that are not done.

        Args:
            console: Where progress is printed.
            ray: Address of a Ray cluster; None runs them here.

        Returns:
            For each job that failed its directory and the reason.

        Raises:
            UsageError: If data are missing, or the cluster cannot be used.
            Interrupted: If a signal came; the jobs that were running are saved.
        """
        _, errors = data_sizes(job.run for job in self.unfinished)
        if errors:
            raise UsageError("; ".join(errors))
        if ray is None:
            return run_jobs(self.jobs, self.local_processes, console)
        return run_on_ray(self.jobs, ray, console, processes=self.processes, gpu=self.scale.needs_gpu)

    def report(self, console: Console) -> Path | None:
        """Print the tables of the jobs that are done and write their report.

        Returns:
            The page; None if no job is done.
        """
        done = [job.output for job in self.jobs if job.is_done]
        return show_report(done, self.report_folder, console) if done else None

    def estimates(self, on_message: Callable[[str], None]) -> dict[Path, Estimate]:
        """Estimate the jobs that are not done, from passes that are timed on this machine.

        Args:
            on_message: Called with what the estimates are based on.

        Returns:
            The estimates by run directory.

        Raises:
            UsageError: If data are missing that were never published.
        """
        sizes, errors = data_sizes(job.run for job in self.unfinished)
        for error in errors:
            on_message(f"{error} (estimated as if the published files were here)")
        threads = max(1, core_count() // self.local_processes)
        times: dict[object, PassTimes] = {}
        estimates = {}
        for job in self.unfinished:
            run = job.run
            size = sizes[run.data] if run.data in sizes else published_size(run.data)
            key = (run.model, run.batch_size, size.shape, size.classes)
            if key not in times:
                times[key] = measure_passes(run, size, threads)
                on_message(_describe(times[key], size))
            epochs = run.epochs - (job.epochs_done if job.is_started else 0)
            estimates[job.output] = estimate_run(run, size, times[key], epochs, job.evaluate, job.attacks)
        return estimates

    def total_seconds(self, estimates: dict[Path, Estimate]) -> float:
        """Return how long estimated jobs take together on this machine."""
        seconds = [estimate.seconds for estimate in estimates.values()]
        return max(sum(seconds) / self.local_processes, *seconds)

    def slurm_script(self, on_message: Callable[[str], None]) -> str:
        """Return a SLURM array script of the jobs that are not done.

        Args:
            on_message: Called with what the requested time is based on.
        """
        hours = None
        if not self.scale.needs_gpu:
            hours = max(estimate.seconds for estimate in self.estimates(on_message).values()) / 3600
        return slurm_script(
            self.name, self.commands, self.report_command, limit=self.processes, hours=hours, logs=self.output
        )


def _describe(times: PassTimes, size: DataSize) -> str:
    pixels = " x ".join(str(edge) for edge in size.shape[1:])
    seconds, threads = times.batch_size * times.update, f"{times.threads} thread{'s' * (times.threads > 1)}"
    return f"estimated from {seconds:.2g} s for a pass of {times.batch_size} images of {pixels} pixels, {threads}"
