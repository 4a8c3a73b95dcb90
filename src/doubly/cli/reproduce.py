"""doubly reproduce: parse the flags of a study, run or show it, and print the outcome."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from doubly.cli.options import parsed
from doubly.cli.tables import say
from doubly.errors import UsageError
from doubly.text import duration

if TYPE_CHECKING:
    from doubly.studies.planned import PlannedStudy

SEEDS = 3
DIGITS_STUDIES = ("demo", "digits", "digits_done")
PLAN_FLAGS = (
    *("scale", "data_root", "methods", "images", "autoattack_images"),
    *("no_autoattack", "commands", "slurm", "ray"),
)


def reproduce(arguments: list[str], out: Console, err: Console) -> int:
    """Run the verb; return the exit code."""
    options = _options(arguments)  # before the imports, so that --help comes at once
    from doubly.config.serialize import suggestion
    from doubly.studies.plans import PLANS

    if options.study not in (*PLANS, *DIGITS_STUDIES):
        raise UsageError(f"there is no study '{options.study}'{suggestion(options.study, [*PLANS, *DIGITS_STUDIES])}")
    jobs = 2 if options.jobs is None else options.jobs
    if jobs < 1 or options.seeds < 1:
        raise UsageError(f"jobs and seeds are at least 1, got {jobs} and {options.seeds}")
    if options.study in DIGITS_STUDIES:
        return _digits_study(options, jobs, out)
    return _planned_study(options, out, err)


def _options(arguments: list[str]) -> Any:
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Plan the runs, skip what is done, resume what was stopped, and end in tables and a page.

        table1, …, table4, figure1, …, figure6: the runs of the paper's table or figure; cifar10: our small study;
        demo: AT and DONE on digits in minutes; digits: every method; digits_done: DONE against AT, an hour each."""

        study: Annotated[str, tyro.conf.Positional]
        """which study"""
        scale: str | None = None
        """paper: the paper's settings, for a cluster; small (default): minutes per run on two cores"""
        seeds: int = SEEDS
        """seeds per method: 0, 1, …"""
        jobs: int | None = None
        """processes that share the cores; 2 if not given. With --slurm or --ray: runs at a time, by default as many as
        there is room for"""
        methods: tuple[str, ...] = ()
        """only these of the plan's methods"""
        output: Path | None = None
        """folder for the runs; by default runs/SCALE, which the plans share, or runs/STUDY"""
        data_root: str | None = None
        """folder with the datasets' files"""
        images: int | None = None
        """number of images to evaluate on, instead of that of the scale"""
        autoattack_images: int | None = None
        """number of these images to run AutoAttack on"""
        no_autoattack: bool = False
        """do not run AutoAttack"""
        dry_run: bool = False
        """show the runs, which of them are done, and how long the others would take"""
        commands: bool = False
        """print a command per run that is not done, for a scheduler, and run nothing"""
        slurm: Path | None = None
        """write a SLURM array script of the runs that are not done, and run nothing"""
        ray: str | None = None
        """run them on a Ray cluster, host:port; auto: the one that runs here; local: start one. Needs doubly[ray]"""

    return parsed(Options, arguments, "reproduce")


def _digits_study(options: Any, jobs: int, out: Console) -> int:
    """Run or list a study on digits, which has settings of its own."""
    unfit = [name for name in PLAN_FLAGS if getattr(options, name) not in (None, False, ())]
    if unfit:
        flag = unfit[0].replace("_", "-")
        raise UsageError(f"--{flag} is for tables and figures: {options.study} has its own settings, leave it out")
    if options.study != "demo" and options.seeds != SEEDS:
        raise UsageError(f"{options.study} has a seed per fold: leave --seeds out")
    output = options.output or Path("runs") / options.study
    from doubly.studies.digits import run_digits_study, run_directories

    if options.dry_run:
        for path in run_directories(options.study, output, options.seeds):
            say(out, str(path))
        return 0
    page = run_digits_study(options.study, output, jobs, options.seeds, out)
    say(out, f"runs: {output}\npage: {page}")
    return 0


def _planned_study(options: Any, out: Console, err: Console) -> int:
    from doubly.evaluation.io import check_folder

    study = _make_plan(options)
    if options.commands:
        lines = [*(commands.line for commands in study.commands), f"# then: {study.report_command}"]
        out.out("\n".join(lines), highlight=False)
        return 0
    if options.dry_run:
        return _show(study, out, err)
    check_folder(study.output)
    if options.slurm is not None:
        return _write_slurm(study, options.slurm, out, err)
    failures = study.run(out, options.ray)
    for path, error in failures.items():
        say(err, f"doubly: {path} failed: {error}")
    if page := study.report(out):
        say(out, f"runs: {study.output}\npage: {page}")
    return 2 if failures else 0


def _make_plan(options: Any) -> "PlannedStudy":
    from doubly.config.serialize import suggestion
    from doubly.studies.planned import PlannedStudy
    from doubly.studies.plans import PLANS, SCALES, check_directories, plan_jobs

    name = options.scale or "small"
    if name not in SCALES:
        raise UsageError(f"there is no scale '{name}'{suggestion(name, SCALES)}")
    output = options.output or Path("runs") / name
    changes = {key: getattr(options, key) for key in ("images", "autoattack_images")}
    config = replace(SCALES[name].evaluate, **{key: value for key, value in changes.items() if value is not None})
    scale = replace(SCALES[name], evaluate=config)
    jobs = plan_jobs(
        PLANS[options.study],
        scale,
        options.seeds,
        output,
        root=None if options.data_root is None else str(Path(options.data_root).resolve()),
        methods=options.methods,
        autoattack=not options.no_autoattack,
    )
    check_directories(jobs)
    return PlannedStudy(options.study, jobs, scale, output, options.jobs)


def _show(study: "PlannedStudy", out: Console, err: Console) -> int:
    """Print the runs, and how long those that are not done would take."""
    estimates = study.estimates(lambda message: say(err, message))
    columns = Column("run", no_wrap=True), "state", "passes", "train", "evaluate"
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for job in study.jobs:
        cells = []
        if estimate := estimates.get(job.output):
            passes = f"{estimate.step_passes.forward:g} + {estimate.step_passes.backward:g}"
            cells = [passes, duration(estimate.train_seconds), duration(estimate.eval_seconds)]
        table.add_row(job.output.name, job.status, *cells)
    out.print(table)
    if not estimates:
        say(out, f"all {len(study.jobs)} runs are done")
        return 0
    total = duration(study.total_seconds(estimates))
    say(out, f"{len(estimates)} of {len(study.jobs)} runs to do: about {total} with {study.local_processes} jobs")
    say(out, "passes of a step: forward + backward; AutoAttack is counted as if half of the images stayed robust")
    return 0


def _write_slurm(study: "PlannedStudy", path: Path, out: Console, err: Console) -> int:
    if not study.unfinished:
        say(out, f"all {len(study.jobs)} runs are done; now: {study.report_command}")
        return 0
    text = study.slurm_script(lambda message: say(err, message))
    study.output.mkdir(parents=True, exist_ok=True)  # for the logs
    path.write_text(text, encoding="utf-8")
    runs = len(study.unfinished)
    say(out, f"wrote {path}, {runs} runs: submit it with `sbatch {path}`, and then {study.report_command}")
    return 0
