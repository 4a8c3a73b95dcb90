"""The studies on digits by name: which run directories they write, and how each becomes a page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from doubly.jobs.search import Search
from doubly.report.study import comparison_markdown, study_markdown
from doubly.studies import digits_comparison, digits_study
from doubly.studies.demo import demo_jobs, run_demo
from doubly.studies.folds import StudyRow


class SearchedStudy(NamedTuple):
    """A study that searches settings, retrains the winners on every fold, and writes a page of tables."""

    searches: Callable[[Path], dict[str, Search]]
    rows: Callable[[Mapping[str, Mapping[str, Any]]], list[StudyRow]]
    run: Callable[[Path, int, Console], dict[str, Any]]
    page: Callable[[Mapping[str, Any]], str]


SEARCHED_STUDIES = {
    "digits": SearchedStudy(
        digits_comparison.plan_searches,
        digits_comparison.plan_rows,
        digits_comparison.run_comparison,
        comparison_markdown,
    ),
    "digits_done": SearchedStudy(
        digits_study.plan_searches, digits_study.plan_rows, digits_study.run_study, study_markdown
    ),
}


def run_directories(name: str, output: Path, seeds: int) -> list[Path]:
    """Return the run directories of a study, before it is run.

    Args:
        name: demo, digits or digits_done.
        output: Folder of the study.
        seeds: Runs per method of the demonstration; the others have one per fold.
    """
    if name == "demo":
        return [job.output for job in demo_jobs(output, seeds)]
    study = SEARCHED_STUDIES[name]
    searches = study.searches(output)
    trials = [job for search in searches.values() for trial in search.jobs() for job in trial]
    rows = study.rows({recipe: {} for recipe in searches})  # directories do not depend on the winners
    return [job.output for job in (*trials, *(job for row in rows for job in row.jobs(output)))]


def run_digits_study(name: str, output: Path, processes: int, seeds: int, console: Console) -> Path:
    """Run a study and write its page.

    Args:
        name: demo, digits or digits_done.
        output: Folder of the study.
        processes: How many runs are trained at a time.
        seeds: Runs per method of the demonstration.
        console: Where progress is printed.

    Returns:
        The page.
    """
    if name == "demo":
        return run_demo(output, processes, seeds, console)
    study, page = SEARCHED_STUDIES[name], output / "results.md"
    page.write_text(study.page(study.run(output, processes, console)), encoding="utf-8")
    return page
