"""The runs of a planned study on the terminal: their state, and how long they would take."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Column, Table

from doubly.cli.tables import print_line
from doubly.text import duration

if TYPE_CHECKING:
    from doubly.studies.planned import PlannedStudy


def show_study(study: "PlannedStudy", out: Console, err: Console) -> int:
    """Print the runs, and how long those that are not done would take."""
    estimates = study.estimates(lambda message: print_line(err, message))
    columns = Column("run", no_wrap=True), "state", "passes", "train", "evaluate"
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for job in study.jobs:
        cells = []
        if estimate := estimates.get(job.output):
            passes = f"{estimate.step_passes.forward:g} + {estimate.step_passes.backward:g}"
            cells = [passes, duration(estimate.train_seconds), duration(estimate.eval_seconds)]
        table.add_row(str(job.output.relative_to(study.output)), job.status, *cells)
    out.print(table)
    if not estimates:
        print_line(out, f"all {len(study.jobs)} runs are done")
        return 0
    total = duration(study.total_seconds(estimates))
    print_line(
        out, f"{len(estimates)} of {len(study.jobs)} runs to do: about {total} with {study.local_processes} jobs"
    )
    print_line(
        out, "passes of a step: forward + backward; AutoAttack is counted as if half of the images stayed robust"
    )
    return 0
