"""The demonstration of `make demo`: AT, the paper's DONE, DONE over classes and repaired AT on imbalanced digits.

All train on the same images for 120 epochs, in which the radius grows over the first fifth. By then the networks fit
more than 98 % of the attacked training images, and on the hold-out AT was no better after 240 epochs (one seed). A
fifth of the training images is held out, which repair needs. The number of seeds follows from the time that it takes.

Settings of AT and of the paper's DONE are those of their recipes, each the best of 12 trials on hold-outs. Those of
DONE over classes (`OURS`) are the best of six on a hold-out, by the same score, the mean of RA-PGD and RA-Tail-30: R =
0.2 or 0.5, from the start or in the last 3/8 of training, by errors on training or on held-out images. Six trials
before, of 60 epochs and with the full radius from the start, did not converge, as AT with balanced loss does not; hence
the growing radius, for all methods alike. Test images have chosen nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from doubly.config.serialize import with_changes
from doubly.evaluation.api import evaluate_run, is_evaluated
from doubly.files import write_text
from doubly.jobs.job import WITHOUT_TRUST, CallbackFactory, Job
from doubly.jobs.pool import finish_jobs
from doubly.offsets.api import repair_run
from doubly.offsets.config import RepairConfig
from doubly.recipes.digits import digits
from doubly.report import Report, forms
from doubly.rundir import is_run
from doubly.studies.demo_table import demo_table, terminal

EPOCHS = 120
SHARED: dict[str, Any] = {"epochs": EPOCHS, "data.holdout": 0.2, "warm_up": 0.2, "validation.every": 40}
ATTACKS = ("pgd", "margin", "strong")
OURS = {
    "optimizer.weight_decay": 0.002,
    "method.class_temperature": {"kind": "schedule.piecewise", "values": [1e9, 0.2], "boundaries": [0.625]},
}
SETTINGS: dict[str, dict[str, Any]] = {"at": {}, "done_pgd": {}, "done_class": OURS}  # changes of the recipes
REPAIR = RepairConfig(fit_share=0.8)  # the test images judge, so few of the held-out images have to


def demo_jobs(output: Path, seeds: int, callbacks: tuple[CallbackFactory, ...] = ()) -> list[Job]:
    """Return a job per method and seed, with directories below `output`."""
    return [
        Job(replace(run, seed=seed), output / f"{method}-s{seed}", attacks=ATTACKS, callbacks=callbacks)
        for method, changes in SETTINGS.items()
        for run in [with_changes(digits(method, True), {**SHARED, **changes})]
        for seed in range(seeds)
    ]


def demo_directories(output: Path, seeds: int) -> list[Path]:
    """Return all run directories: those that are trained, and those of the repaired networks."""
    jobs = demo_jobs(output, seeds)
    return [job.output for job in jobs] + [_repaired(job) for job in jobs if _is_baseline(job)]


def run_demo(
    output: Path, processes: int, seeds: int, console: Console, callbacks: tuple[CallbackFactory, ...] = ()
) -> Path:
    """Train, repair, evaluate, print the table and write the page.

    Args:
        output: Folder for the runs and the page.
        processes: How many runs are trained at a time.
        seeds: Runs per method.
        console: Where progress and the table are printed.
        callbacks: Factories of callbacks for every run; see `Job`.

    Returns:
        The page.

    Raises:
        UsageError: If a run failed.
    """
    jobs = demo_jobs(output, seeds, callbacks)
    finish_jobs(jobs, processes, console)
    _repair(list(filter(_is_baseline, jobs)), console)
    report = Report.of(demo_directories(output, seeds))
    table = demo_table(report.comparisons[0])
    console.print(terminal(table))
    write_text(output / "demo.md", forms.markdown(table))
    return report.write(output)


def _repair(jobs: Sequence[Job], console: Console) -> None:
    """Repair the networks of the jobs and evaluate the repaired ones; what is done already is not done again."""
    for number, job in enumerate(jobs, 1):
        folder = _repaired(job)
        if not is_run(folder):
            repair_run(job.output, folder, device="cpu", config=REPAIR)
        if not is_evaluated(folder, job.run, ATTACKS, WITHOUT_TRUST):
            evaluate_run(folder, attacks=ATTACKS, config=WITHOUT_TRUST)
            console.print(f"{number} of {len(jobs)} networks repaired", highlight=False)


def _is_baseline(job: Job) -> bool:
    return job.run.name.endswith(".at")


def _repaired(job: Job) -> Path:
    return job.output.with_name(f"{job.output.name}-repaired")
