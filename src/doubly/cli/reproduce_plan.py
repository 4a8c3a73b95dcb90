"""doubly reproduce table1|…|figure6|cifar10: the runs of a plan, done here, shown, or handed to a scheduler."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from doubly.cli.tables import say
from doubly.errors import UsageError
from doubly.jobs.slurm import command, report_command, slurm, steps
from doubly.text import duration


def reproduce_plan(options: Any, out: Console, err: Console) -> int:
    from doubly.evaluation.output import check_folder

    study = _planned(options, out, err)
    if options.commands:
        out.out("\n".join([*study.commands, f"# then: {study.report_command}"]), highlight=False)
        return 0
    if options.dry_run:
        return study.show()
    check_folder(study.output)
    return study.run(options.ray) if options.slurm is None else study.write_slurm(options.slurm)


def _planned(options: Any, out: Console, err: Console) -> "_Study":
    from doubly.config.serialize import suggestion
    from doubly.studies.plans import PLANS, SCALES, check, jobs

    name = options.scale or "small"
    if name not in SCALES:
        raise UsageError(f"there is no scale '{name}'{suggestion(name, SCALES)}")
    scale, output = SCALES[name], options.output or Path("runs") / name
    given = {key: getattr(options, key) for key in ("images", "autoattack_images")}
    how = replace(scale.measure, **{key: value for key, value in given.items() if value is not None})
    found = jobs(
        PLANS[options.study],
        replace(scale, measure=how),
        options.seeds,
        output,
        root=None if options.data_root is None else str(Path(options.data_root).resolve()),
        methods=options.methods,
        autoattack=not options.no_autoattack,
    )
    check(found)
    return _Study(options.study, found, scale, output, options.jobs, out, err)


@dataclass(frozen=True)
class _Study:
    name: str
    jobs: list[Any]
    scale: Any
    output: Path
    asked: int | None  # processes
    out: Console
    err: Console

    @property
    def processes(self) -> int:
        return self.asked or 2

    @cached_property
    def waiting(self) -> list[Any]:
        return [job for job in self.jobs if not job.done]

    @property
    def page(self) -> Path:
        return self.output / f"report-{self.name}"

    @property
    def commands(self) -> list[str]:
        return [command(job, self.scale.changes) for job in self.waiting]

    @property
    def report_command(self) -> str:
        return report_command([job.output for job in self.jobs], self.page)

    @property
    def threads(self) -> int:
        """Of each process."""
        from doubly.jobs.pool import cores

        return max(1, cores() // self.processes)

    def run(self, ray: str | None) -> int:
        """Whatever fails is said, and the report is of the rest."""
        from doubly.jobs.cost import sizes
        from doubly.studies.plans import reported

        problems = sizes([job.run for job in self.waiting])[1]
        if problems:
            raise UsageError("; ".join(problems))
        failures = self.done_here() if ray is None else self.done_on_ray(ray)
        for path, problem in failures.items():
            say(self.err, f"doubly: {path} failed: {problem}")
        done = [job.output for job in self.jobs if job.done]
        if done:
            say(self.out, f"runs: {self.output}\npage: {reported(done, self.page, self.out)}")
        return 2 if failures else 0

    def done_here(self) -> dict[Path, str]:
        from doubly.jobs.pool import run_jobs

        return run_jobs(self.jobs, self.processes, self.out)

    def done_on_ray(self, address: str) -> dict[Path, str]:
        from doubly.jobs.ray import run_on_ray

        return run_on_ray(self.jobs, address, self.out, processes=self.asked, gpu=self.scale.gpu)

    def show(self) -> int:
        """The plan, and how long it would take."""
        estimates = dict(zip((job.output for job in self.waiting), self.estimates(), strict=True))
        columns = Column("run", no_wrap=True), "state", "passes", "train", "measure"
        table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
        for job in self.jobs:
            found = estimates.get(job.output)
            times = (duration(found.train), duration(found.measure)) if found else ()
            passes = f"{found.cost.forward:g} + {found.cost.backward:g}" if found else ""
            table.add_row(job.output.name, job.state, passes, *times)
        self.out.print(table)
        each = [found.train + found.measure for found in estimates.values()]
        if not each:
            say(self.out, f"all {len(self.jobs)} runs are done")
            return 0
        whole = max(sum(each) / self.processes, *each)
        say(self.out, f"{len(each)} of {len(self.jobs)} runs to do: about {duration(whole)} with {self.processes} jobs")
        say(self.out, "passes of a step: forward + backward; AutoAttack is counted as if half of the images stood")
        return 0

    def write_slurm(self, path: Path) -> int:
        lines = [steps(job, self.scale.changes) for job in self.waiting]
        if not lines:
            say(self.out, f"all {len(self.jobs)} runs are done; now: {self.report_command}")
            return 0
        hours = None if self.scale.gpu else max(found.train + found.measure for found in self.estimates()) / 3600
        text = slurm(self.name, lines, self.report_command, self.asked, hours, self.output)
        self.output.mkdir(parents=True, exist_ok=True)  # for the logs
        path.write_text(text, encoding="utf-8")
        say(
            self.out, f"wrote {path}, {len(lines)} runs: submit it with `sbatch {path}`, and then {self.report_command}"
        )
        return 0

    def estimates(self) -> list[Any]:
        """One per run that is not done; says what they rest on."""
        from doubly.jobs.cost import calibrated, estimate, published_size, sizes

        known, problems = sizes([job.run for job in self.waiting])
        for problem in problems:
            say(self.err, f"{problem} (estimated as if the published files were here)")
        paces: dict[Any, Any] = {}
        found = []
        for job in self.waiting:
            size = known[job.run.data] if job.run.data in known else published_size(job.run.data)
            key = (job.run.model, job.run.batch_size, size.shape, size.classes)
            if key not in paces:
                paces[key] = calibrated(job.run, size, self.threads)
                self.basis(paces[key], size)
            left = job.run.epochs - (job.epochs_done if job.holds else 0)
            found.append(estimate(job.run, size, paces[key], left, job.measure, job.attacks))
        return found

    def basis(self, pace: Any, size: Any) -> None:
        side = " x ".join(str(pixels) for pixels in size.shape[1:])
        seconds, threads = pace.batch * pace.update, f"{pace.threads} thread{'s' if pace.threads > 1 else ''}"
        say(self.err, f"from {seconds:.2g} s for a pass of {pace.batch} images of {side} pixels here, {threads}")
