"""Run the study of weak classes or its ablation, from where it stopped, and write what has been measured so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from doubly.errors import UsageError
from doubly.jobs.pool import run_jobs
from doubly.rundir import write_json
from doubly.studies.weak_classes.measured_job import MeasuredJob
from doubly.studies.weak_classes.plan import (
    ON_B,
    ON_TEST,
    PATH_ON_B,
    PATH_ON_TEST,
    SEEDS,
    TRIALS,
    ablation_jobs,
    check_methods,
    final_jobs,
    trial_jobs,
)
from doubly.studies.weak_classes.results import compare_all_paths, compare_paths, differences, read_all
from doubly.studies.weak_classes.selection import Candidate, candidates, choose, mean_and_sd

SHOWN = ("clean", "average", "tail", "worst")


@dataclass(frozen=True)
class WeakClassesStudy:
    """The study on one machine.

    Attributes:
        output: Folder of the runs.
        root: Folder with the dataset's files.
        methods: Methods to compare; all if empty.
        seeds: Number of seeds, at most three.
        processes: How many runs are trained at a time.
    """

    output: Path
    root: str | None = None
    methods: tuple[str, ...] = ()
    seeds: int = len(SEEDS)
    processes: int = 2

    def __post_init__(self) -> None:
        check_methods(self.methods)
        if not 1 <= self.seeds <= len(SEEDS):
            raise UsageError(f"the study has 1 to {len(SEEDS)} seeds, got {self.seeds}")

    @property
    def names(self) -> tuple[str, ...]:
        """The methods to compare, in order."""
        return check_methods(self.methods)

    def directories(self) -> list[Path]:
        """Return the run directories, before anything is run; they do not depend on what the trials choose."""
        trials = [job for method in self.names for job in trial_jobs(method, self.output, self.root)]
        return [job.output for job in (*trials, *self._finals({name: {} for name in self.names}))]

    def run(self, console: Console) -> Path:
        """Do what is not done, and write results.json and results.md.

        Returns:
            The page.

        Raises:
            UsageError: If a run failed.
            Interrupted: If a signal came; the runs are saved.
        """
        console.print(f"1. trials: {len(TRIALS['at'])} of each method, judged on part B", highlight=False)
        self._run([job for method in self.names for job in trial_jobs(method, self.output, self.root)], console)
        winners = {method: TRIALS[method][self._winner(method).trial] for method in self.names}
        console.print("2. the winners, three seeds", highlight=False)
        self._run(self._finals(winners), console)
        return self.write()

    def write(self) -> Path:
        """Write results.json and results.md of what is done, and return the page."""
        from doubly.report.weak_classes import study_page

        results = self.results()
        write_json(self.output / "results.json", results)
        page = self.output / "results.md"
        page.write_text(study_page(results), encoding="utf-8")
        return page

    def results(self) -> dict[str, Any]:
        """Return the results so far: the trials, a row per method whose networks are measured, and differences."""
        searched = {m: self._winner(m) for m in self.names if all(j.is_done for j in self._trials(m))}
        jobs = {
            m: final_jobs(m, TRIALS[m][best.trial], self._seeds, self.output, self.root) for m, best in searched.items()
        }
        done = {m: [job for job in finals if job.is_done] for m, finals in jobs.items()}
        rows = [self._row(method, finals, searched[method]) for method, finals in done.items() if finals]
        scales = {row["method"]: row["scale"] for row in rows}
        return {
            "methods": list(self.names),
            "trials": [
                {
                    "method": m,
                    "settings": list(TRIALS[m]),
                    "winner": best.trial,
                    "candidates": [c._asdict() for c in self._candidates(m)],
                }
                for m, best in searched.items()
            ],
            "rows": rows,
            "differences": differences(done, scales),
            "paths": compare_all_paths(done),
            "n": {measure.name: measure.count for measure in (ON_B, ON_TEST, PATH_ON_TEST)},
        }

    @property
    def _seeds(self) -> Sequence[int]:
        return SEEDS[: self.seeds]

    def _trials(self, method: str) -> list[MeasuredJob]:
        return trial_jobs(method, self.output, self.root)

    def _finals(self, winners: Mapping[str, Mapping[str, Any]]) -> list[MeasuredJob]:
        """Return the networks seed by seed, so that a study that is stopped early has whole tables."""
        by_method = [final_jobs(m, winners[m], self._seeds, self.output, self.root) for m in self.names]
        return [jobs[index] for index in range(self.seeds) for jobs in by_method]

    def _candidates(self, method: str) -> list[Candidate]:
        measured = {trial: job.read(ON_B) for trial, job in enumerate(self._trials(method))}
        return candidates({trial: [one] for trial, one in measured.items() if one is not None})

    def _winner(self, method: str) -> Candidate:
        return choose(self._candidates(method))

    def _run(self, jobs: Sequence[MeasuredJob], console: Console) -> None:
        failures = run_jobs(jobs, self.processes, console)
        if failures:
            raise UsageError("; ".join(f"{path}: {error}" for path, error in failures.items()))

    def _row(self, method: str, jobs: Sequence[MeasuredJob], winner: Candidate) -> dict[str, Any]:
        """Return what the tables show of a method: both forms on the test images, and the one chosen on part B."""
        chosen = choose(candidates({0: read_all(jobs, ON_B)})).scale
        parts = read_all(jobs, ON_TEST)
        forms = {
            name: {key: mean_and_sd(parts, scale, key) for key in SHOWN}
            for name, scale in (("as_trained", 0.0), ("repaired", 1.0))
        }
        return {
            "method": method,
            "seeds": [job.run.seed for job in jobs],
            "settings": dict(TRIALS[method][winner.trial]),
            "scale": chosen,
            **forms,
        }


def run_ablation(output: Path, root: str | None, processes: int, console: Console) -> Path:
    """Train the variants of DONE over classes, and write ablation.json and ablation.md.

    Args:
        output: Folder of the study.
        root: Folder with the dataset's files.
        processes: How many runs are trained at a time.
        console: Where progress is printed.

    Returns:
        The page.

    Raises:
        UsageError: If a run failed.
        Interrupted: If a signal came; the runs are saved.
    """
    failures = run_jobs(list(ablation_jobs(output, root).values()), processes, console)
    if failures:
        raise UsageError("; ".join(f"{path}: {error}" for path, error in failures.items()))
    return write_ablation(output, root)


def write_ablation(output: Path, root: str | None) -> Path:
    """Write ablation.json and ablation.md of the variants that are done, and return the page."""
    from doubly.report.weak_classes import ablation_page

    measured = {name: job.read(PATH_ON_B) for name, job in ablation_jobs(output, root).items()}
    paths = {name: one for name, one in measured.items() if one is not None}
    if not paths:
        raise UsageError(f"{output} has no variant that is done: run `doubly reproduce ablation` first")
    first = next(iter(paths.values()))
    rows = [{"variant": name, **compare_paths(first, one)} for name, one in paths.items()]
    results = {"rows": rows, "n": len(first.y), "attack": PATH_ON_B.attack}
    write_json(output / "ablation.json", results)
    page = output / "ablation.md"
    page.write_text(ablation_page(results), encoding="utf-8")
    return page
