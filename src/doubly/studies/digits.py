"""The studies on digits by name: which run directories they write, and how each becomes a page."""

from pathlib import Path

from rich.console import Console

from doubly.files import write_text
from doubly.jobs.job import CallbackFactory
from doubly.report.study import comparison_markdown, study_markdown
from doubly.studies import digits_comparison, digits_study
from doubly.studies.demo import demo_directories, run_demo

PLANS = {  # study -> its searches, and its rows given the winners
    "digits": (digits_comparison.plan_searches, digits_comparison.plan_rows),
    "digits_done": (digits_study.plan_searches, digits_study.plan_rows),
}


def run_directories(name: str, output: Path, seeds: int) -> list[Path]:
    """Return the run directories of a study, before it is run.

    Args:
        name: demo, digits or digits_done.
        output: Folder of the study.
        seeds: Runs per method of the demonstration; the others have one per fold.
    """
    if name == "demo":
        return demo_directories(output, seeds)
    plan_searches, plan_rows = PLANS[name]
    searches = plan_searches(output)
    trials = [job for search in searches.values() for trial in search.jobs() for job in trial]
    rows = plan_rows({recipe: {} for recipe in searches})  # directories do not depend on the winners
    return [job.output for job in (*trials, *(job for row in rows for job in row.jobs(output)))]


def run_digits_study(
    name: str,
    output: Path,
    processes: int,
    seeds: int,
    console: Console,
    callbacks: tuple[CallbackFactory, ...] = (),
) -> Path:
    """Run a study and write its page.

    Args:
        name: demo, digits or digits_done.
        output: Folder of the study.
        processes: How many runs are trained at a time.
        seeds: Runs per method of the demonstration.
        console: Where progress is printed.
        callbacks: Factories of callbacks for every run; see `Job`.

    Returns:
        The page.
    """
    if name == "demo":
        return run_demo(output, processes, seeds, console, callbacks)
    if name == "digits":
        text = comparison_markdown(digits_comparison.run_comparison(output, processes, console, callbacks))
    else:
        text = study_markdown(digits_study.run_study(output, processes, console, callbacks))
    page = output / "results.md"
    write_text(page, text)
    return page
