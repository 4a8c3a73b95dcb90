"""Run the study of weak classes or its ablation, from where it stopped, and write what has been measured so far."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from doubly.errors import UsageError
from doubly.files import make_folder, write_json, write_text
from doubly.jobs.pool import finish_jobs
from doubly.reading import read_tree
from doubly.report.weak_classes import ablation_page, draw_paths, study_page
from doubly.studies.weak_classes.measured_job import Measure, MeasuredJob
from doubly.studies.weak_classes.plan import StudyPlan
from doubly.studies.weak_classes.results import compare_all_paths, compare_paths, differences, path_points, read_all
from doubly.studies.weak_classes.selection import Candidate, candidates, choose, mean_and_sd

SHOWN = ("clean", "average", "tail", "worst")


@dataclass(frozen=True)
class WeakClassesStudy:
    """The study on one machine.

    Attributes:
        plan: Its runs.
        processes: How many runs are trained at a time.
    """

    plan: StudyPlan
    processes: int = 2

    def directories(self) -> list[Path]:
        """Return the run directories, before anything is run; they do not depend on what the trials choose."""
        return [job.output for job in (*self._trials(), *self._finals(dict.fromkeys(self.plan.methods, 0)))]

    def run(self, console: Console) -> Path:
        """Do what is not done, and write results.json, results.md and the picture of the paths.

        Returns:
            The page.

        Raises:
            UsageError: If a run failed.
            Interrupted: If a signal came; the runs are saved.
        """
        console.print("1. the trials of each method, judged on part B", highlight=False)
        finish_jobs(self._trials(), self.processes, console)
        console.print(f"2. the winners, {len(self.plan.seeds)} seeds", highlight=False)
        winners = {method: self._winner(method) for method in self.plan.methods}
        finish_jobs(self._finals(winners), self.processes, console)
        return self.write()

    def write(self) -> Path:
        """Write results.json, results.md and the picture of what is done, and return the page."""
        results, output = self.results(), self.plan.output
        make_folder(output)
        write_json(output / "results.json", results)
        page = output / "results.md"
        write_text(page, study_page(results))
        draw_paths(results, output / "paths")
        return page

    def results(self) -> dict[str, Any]:
        """Return the results so far: the trials, a row per method whose networks are measured, and differences."""
        plan = self.plan
        searched = {m: self._winner(m) for m in plan.methods if all(job.is_done for job in plan.trial_jobs(m))}
        finals = {m: [job for job in plan.final_jobs(m, best) if job.is_done] for m, best in searched.items()}
        done = {method: jobs for method, jobs in finals.items() if jobs}
        rows = [self._row(method, jobs, searched[method]) for method, jobs in done.items()]
        trials = [
            {
                "method": method,
                "settings": list(plan.trials[method]),
                "winner": best,
                "candidates": [candidate._asdict() for candidate in self._candidates(method)],
            }
            for method, best in searched.items()
            if len(plan.trials[method]) > 1
        ]
        measures = (plan.on_b, plan.on_test, plan.path_on_test)
        return {
            "methods": list(plan.methods),
            "trials": trials,
            "part_b": [
                {"method": method, "seed": job.run.seed, "points": path_points(measured)}
                for method, best in searched.items()
                for job in plan.final_jobs(method, best)
                if (measured := job.read(plan.on_b)) is not None
            ],
            "rows": rows,
            "differences": differences(done, {row["method"]: row["scale"] for row in rows}, plan.on_test),
            "paths": compare_all_paths(done, plan.path_on_test),
            "path_protocol": _protocol(done, plan.path_on_test),
            "measures": {m.name: {"attack": m.attack, "first": m.first, "n": m.count} for m in measures},
        }

    def _trials(self) -> list[MeasuredJob]:
        return [job for method in self.plan.methods for job in self.plan.trial_jobs(method)]

    def _finals(self, winners: dict[str, int]) -> list[MeasuredJob]:
        """Return the networks seed by seed, so that a study that is stopped early has whole tables."""
        by_method = [self.plan.final_jobs(method, winners[method]) for method in self.plan.methods]
        return [job for jobs in zip(*by_method, strict=True) for job in jobs]

    def _candidates(self, method: str) -> list[Candidate]:
        measured = {trial: job.read(self.plan.on_b) for trial, job in enumerate(self.plan.trial_jobs(method))}
        return candidates({trial: [one] for trial, one in measured.items() if one is not None})

    def _winner(self, method: str) -> int:
        """Return the number of the trial that was chosen; the only setting needs none."""
        return choose(self._candidates(method)).trial if len(self.plan.trials[method]) > 1 else 0

    def _row(self, method: str, jobs: Sequence[MeasuredJob], winner: int) -> dict[str, Any]:
        """Return what the tables show of a method: both forms on the test images, and the one chosen on part B."""
        parts = read_all(jobs, self.plan.on_test)
        return {
            "method": method,
            "seeds": [job.run.seed for job in jobs],
            "settings": dict(self.plan.trials[method][winner]),
            "scale": choose(candidates({winner: read_all(jobs, self.plan.on_b)})).scale,
            "as_trained": {key: mean_and_sd(parts, 0.0, key) for key in SHOWN},
            "repaired": {key: mean_and_sd(parts, 1.0, key) for key in SHOWN},
        }


def _protocol(done: dict[str, list[MeasuredJob]], measure: Measure) -> dict[str, Any]:
    """Return the protocol of a measurement, as its first file has it."""
    jobs = [job for method_jobs in done.values() for job in method_jobs]
    return read_tree(jobs[0].output / f"{measure.name}.json")["protocol"] if jobs else {}


def run_ablation(plan: StudyPlan, processes: int, console: Console) -> Path:
    """Train the variants of DONE over classes, and write ablation.json and ablation.md.

    Args:
        plan: The runs.
        processes: How many are trained at a time.
        console: Where progress is printed.

    Returns:
        The page.

    Raises:
        UsageError: If a run failed.
        Interrupted: If a signal came; the runs are saved.
    """
    finish_jobs(list(plan.ablation_jobs().values()), processes, console)
    return write_ablation(plan)


def write_ablation(plan: StudyPlan) -> Path:
    """Write ablation.json and ablation.md of the variants that are done, and return the page.

    Raises:
        UsageError: If none is.
    """
    measured = {name: job.read(plan.path_on_b) for name, job in plan.ablation_jobs().items()}
    paths = {name: one for name, one in measured.items() if one is not None}
    if not paths:
        raise UsageError(f"{plan.output} has no variant that is done: run `doubly reproduce ablation` first")
    first = next(iter(paths.values()))
    rows = [{"variant": name, **compare_paths(first, one)} for name, one in paths.items()]
    results = {"rows": rows, "n": len(first.y), "attack": plan.path_on_b.attack}
    write_json(plan.output / "ablation.json", results)
    page = plan.output / "ablation.md"
    write_text(page, ablation_page(results))
    return page
