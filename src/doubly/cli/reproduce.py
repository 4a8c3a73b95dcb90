"""doubly reproduce: parse the flags of a study, run or show it, and print the outcome."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Column, Table

from doubly.cli.options import DataRoot, parse_options
from doubly.cli.tables import print_line
from doubly.errors import UsageError
from doubly.text import duration

if TYPE_CHECKING:
    from doubly.studies.planned import PlannedStudy

SEEDS, DEMO_SEEDS, DEFAULT_JOBS = 3, 5, 2
DIGITS_STUDIES = ("demo", "digits", "digits_done")
PLAN_FLAGS = (
    *("scale", "data_root", "methods", "images", "autoattack_images"),
    *("no_autoattack", "commands", "slurm", "ray"),
)


@dataclass(frozen=True)
class ReproduceOptions:
    """Run a study: runs that are done are skipped, runs that were stopped are resumed, and a report is written.

    table1 … table4, figure1 … figure6: the runs of a table or figure of the paper. cifar10: our small study of
    CIFAR-10. On digits, which need no files: demo: AT, repaired AT and DONE, in minutes; digits: every method, and
    digits_done: DONE against AT, in about an hour each."""

    study: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")]
    """name of the study"""
    scale: Annotated[str | None, tyro.conf.arg(metavar="{paper,small}", help_behavior_hint="(default: small)")] = None
    """paper: the paper's settings, for a cluster; small: minutes per run on two cores"""
    seeds: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=f"(default: {SEEDS}, of demo {DEMO_SEEDS})")
    ] = None
    """number of seeds per method"""
    jobs: Annotated[
        int | None,
        tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 2; on a cluster as many as it has room for)"),
    ] = None
    """number of runs at a time; on one machine they share the cores"""
    methods: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME…", help_behavior_hint="(default: all methods of the study)")
    ] = ()
    """only these methods of the study"""
    output: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="DIR", help_behavior_hint="(default: runs/SCALE for tables and figures, else runs/STUDY)"
        ),
    ] = None
    """folder for the runs; tables and figures of one scale share their runs"""
    data_root: DataRoot = None
    """folder with the datasets' files"""
    images: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: that of the scale)")] = (
        None
    )
    """number of images to evaluate on"""
    autoattack_images: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: that of the scale)")
    ] = None
    """number of these images to run AutoAttack on"""
    no_autoattack: bool = False
    """do not run AutoAttack"""
    tensorboard: bool = False
    """also write curves for TensorBoard into each run directory; needs the extra doubly[tensorboard]"""
    dry_run: bool = False
    """list the runs, with their state and estimated time (of a study on digits only their folders); run nothing"""
    commands: bool = False
    """print a shell command for each run that is not done, for a scheduler; run nothing"""
    slurm: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """write a SLURM array script of the runs that are not done; run nothing"""
    ray: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """run on a Ray cluster at host:port; auto: the cluster that runs here; local: start one; needs doubly[ray]"""


def reproduce(arguments: list[str], out: Console, err: Console) -> int:
    """Run or show a study."""
    options = parse_options(ReproduceOptions, arguments, "reproduce")
    from doubly.config.serialize import suggestion
    from doubly.studies.plans import PLANS

    if options.study not in (*PLANS, *DIGITS_STUDIES):
        raise UsageError(f"there is no study '{options.study}'{suggestion(options.study, [*PLANS, *DIGITS_STUDIES])}")
    jobs = DEFAULT_JOBS if options.jobs is None else options.jobs
    usual_seeds = DEMO_SEEDS if options.study == "demo" else SEEDS
    seeds = usual_seeds if options.seeds is None else options.seeds
    if jobs < 1 or seeds < 1:
        raise UsageError(f"jobs and seeds are at least 1, got {jobs} and {seeds}")
    if options.study in DIGITS_STUDIES:
        return _digits_study(options, jobs, seeds, out)
    return _planned_study(options, seeds, out, err)


def _digits_study(options: ReproduceOptions, jobs: int, seeds: int, out: Console) -> int:
    """Run or list a study on digits, which has settings of its own."""
    misplaced = [name for name in PLAN_FLAGS if getattr(options, name) not in (None, False, ())]
    if misplaced:
        flag = misplaced[0].replace("_", "-")
        raise UsageError(f"--{flag} is for tables and figures: {options.study} has its own settings, leave it out")
    if options.study != "demo" and options.seeds not in (None, SEEDS):
        raise UsageError(f"{options.study} has a seed per fold: leave --seeds out")
    output = options.output or Path("runs") / options.study
    from doubly.cli.tensorboard import tensorboard_factories
    from doubly.studies.digits import run_digits_study, run_directories

    if options.dry_run:
        for path in run_directories(options.study, output, seeds):
            print_line(out, str(path))
        return 0
    callbacks = tensorboard_factories(options.tensorboard)
    page = run_digits_study(options.study, output, jobs, seeds, out, callbacks)
    print_line(out, f"runs: {output}\npage: {page}")
    return 0


def _planned_study(options: ReproduceOptions, seeds: int, out: Console, err: Console) -> int:
    from doubly.evaluation.io import check_folder

    study = _make_plan(options, seeds)
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
        print_line(err, f"doubly: {path} failed: {error}")
    if page := study.report(out):
        print_line(out, f"runs: {study.output}\npage: {page}")
    return 2 if failures else 0


def _make_plan(options: ReproduceOptions, seeds: int) -> "PlannedStudy":
    from doubly.cli.tensorboard import tensorboard_factories
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
        seeds,
        output,
        root=None if options.data_root is None else str(Path(options.data_root).resolve()),
        methods=options.methods,
        autoattack=not options.no_autoattack,
    )
    check_directories(jobs)
    callbacks = tensorboard_factories(options.tensorboard)
    jobs = [replace(job, callbacks=callbacks) for job in jobs]
    flags = ("--tensorboard",) if options.tensorboard else ()
    return PlannedStudy(options.study, jobs, scale, output, options.jobs, flags)


def _show(study: "PlannedStudy", out: Console, err: Console) -> int:
    """Print the runs, and how long those that are not done would take."""
    estimates = study.estimates(lambda message: print_line(err, message))
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


def _write_slurm(study: "PlannedStudy", path: Path, out: Console, err: Console) -> int:
    if not study.unfinished:
        print_line(out, f"all {len(study.jobs)} runs are done; now: {study.report_command}")
        return 0
    text = study.slurm_script(lambda message: print_line(err, message))
    study.output.mkdir(parents=True, exist_ok=True)  # for the logs
    path.write_text(text, encoding="utf-8")
    runs = len(study.unfinished)
    print_line(out, f"wrote {path}, {runs} runs: submit it with `sbatch {path}`, and then {study.report_command}")
    return 0
