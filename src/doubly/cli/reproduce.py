"""doubly reproduce: parse the flags of a study, run or show it, and print the outcome."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from doubly.cli.options import DataRoot, parse_options
from doubly.cli.study_flags import refuse_run_settings
from doubly.cli.study_table import show_study
from doubly.cli.tables import print_line
from doubly.errors import UsageError
from doubly.files import make_folder, write_text

if TYPE_CHECKING:
    from doubly.studies.planned import PlannedStudy

SEEDS, DEMO_SEEDS, DEFAULT_JOBS = 3, 5, 2
MAX_SEEDS = 1000  # each is hours of work
DIGITS_STUDIES = ("demo", "digits", "digits_done")
CLASS_STUDIES = ("weak_classes", "ablation")
PLAN_FLAGS = (
    *("scale", "data_root", "methods", "images", "autoattack_images"),
    *("no_autoattack", "commands", "slurm", "ray", "search"),
)


@dataclass(frozen=True)
class ReproduceOptions:
    """Run a study: runs that are done are skipped, runs that were stopped are resumed, and a report is written.

    table1 … table4, figure1 … figure6: the runs of a table or figure of the paper. cifar10: our small study of
    CIFAR-10. weak_classes: ten methods at equal search, as trained and repaired, under the strong attack, in about 18
    hours of two cores; ablation: the parts of DONE over classes, in two hours. On digits, which need no files: demo: AT
    and DONE, and repaired AT, in minutes; digits: every method, and digits_done: DONE against AT, an hour each.

    The runs of a study have the settings that its numbers are compared with, so --epochs, --lr and other settings of a
    run are those of doubly train; --scale, --seeds, --methods and --search are what a study takes."""

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
    search: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: no search)")] = None
    """first choose hyperparameters as the paper does: this many trials per method on a hold-out of 10 %; the winners
    are then trained on all training images"""
    methods: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME…", help_behavior_hint="(default: all methods of the study)")
    ] = ()
    """only these methods of the study"""
    output: Annotated[
        Path | None,
        tyro.conf.arg(
            metavar="DIR", help_behavior_hint="(default: runs/SCALE[-searchN] for tables and figures, else runs/STUDY)"
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

    @property
    def seed_count(self) -> int:
        """Number of seeds, also where none is given."""
        return (DEMO_SEEDS if self.study == "demo" else SEEDS) if self.seeds is None else self.seeds


def reproduce(arguments: list[str], out: Console, err: Console) -> int:
    """Run or show a study."""
    refuse_run_settings(arguments)
    options = parse_options(ReproduceOptions, arguments, "reproduce")
    from doubly.config.serialize import suggestion
    from doubly.studies.plans import PLANS

    studies = (*PLANS, *DIGITS_STUDIES, *CLASS_STUDIES)
    if options.study not in studies:
        raise UsageError(f"there is no study '{options.study}'{suggestion(options.study, studies)}")
    jobs = DEFAULT_JOBS if options.jobs is None else options.jobs
    if jobs < 1 or options.seed_count < 1:
        raise UsageError(f"jobs and seeds are at least 1, got {jobs} and {options.seed_count}")
    if options.seed_count > MAX_SEEDS:
        raise UsageError(f"a study has at most {MAX_SEEDS:,} seeds, got {options.seed_count!s:.20}: lower --seeds")
    if options.study in DIGITS_STUDIES:
        return _digits_study(options, jobs, out)
    if options.study in CLASS_STUDIES:
        return _class_study(options, jobs, out)
    return _planned_study(options, out, err)


def _refuse(options: ReproduceOptions, names: tuple[str, ...]) -> None:
    """Refuse flags that a study with settings of its own does not have."""
    misplaced = [name for name in names if getattr(options, name) not in (None, False, ())]
    if misplaced:
        flag = misplaced[0].replace("_", "-")
        raise UsageError(f"--{flag} is for tables and figures: {options.study} has its own settings, leave it out")


def _class_study(options: ReproduceOptions, jobs: int, out: Console) -> int:
    """Run or list the study of weak classes or its ablation."""
    takes = ("data_root", *(("methods", "search") if options.study == "weak_classes" else ()))
    _refuse(options, (*(name for name in PLAN_FLAGS if name not in takes), "tensorboard"))
    from doubly.studies.weak_classes.plan import METHODS, TRIALS, StudyPlan
    from doubly.studies.weak_classes.plan import SEEDS as STUDY_SEEDS
    from doubly.studies.weak_classes.study import WeakClassesStudy, run_ablation

    most = len(TRIALS[METHODS[0]])
    count = most if options.search is None else options.search
    if options.seed_count > len(STUDY_SEEDS) or not 1 <= count <= most:
        raise UsageError(
            f"{options.study} has {len(STUDY_SEEDS)} seeds and 1 to {most} trials, got "
            f"{options.seed_count} and {count}: lower --seeds or --search"
        )
    output = options.output or Path("runs") / "weak_classes"
    root = None if options.data_root is None else str(Path(options.data_root).resolve())
    trials = {method: settings[:count] for method, settings in TRIALS.items()}
    plan = StudyPlan(
        output, root, methods=options.methods or METHODS, trials=trials, seeds=STUDY_SEEDS[: options.seed_count]
    )
    study, is_ablation = WeakClassesStudy(plan, jobs), options.study == "ablation"
    if options.dry_run:
        variants = [job.output for job in plan.ablation_jobs().values()]
        for path in variants if is_ablation else study.directories():
            print_line(out, str(path))
        return 0
    page = run_ablation(plan, jobs, out) if is_ablation else study.run(out)
    print_line(out, f"runs: {output}\npage: {page}")
    return 0


def _digits_study(options: ReproduceOptions, jobs: int, out: Console) -> int:
    """Run or list a study on digits, which has settings of its own."""
    _refuse(options, PLAN_FLAGS)
    if options.study != "demo" and options.seed_count != SEEDS:
        raise UsageError(f"{options.study} has a seed per fold: leave --seeds out")
    output = options.output or Path("runs") / options.study
    from doubly.cli.loggers import logger_factories
    from doubly.studies.digits import run_digits_study, run_directories

    if options.dry_run:
        for path in run_directories(options.study, output, options.seed_count):
            print_line(out, str(path))
        return 0
    callbacks = logger_factories((), options.tensorboard)
    page = run_digits_study(options.study, output, jobs, options.seed_count, out, callbacks)
    print_line(out, f"runs: {output}\npage: {page}")
    return 0


def _planned_study(options: ReproduceOptions, out: Console, err: Console) -> int:
    from doubly.evaluation.io import check_folder

    study = _make_plan(options)
    if options.search is not None:
        return _searched_study(study, options.search, options, out, err)
    if options.commands:
        lines = [*(commands.line for commands in study.commands), f"# then: {study.report_command}"]
        out.out("\n".join(lines), highlight=False)
        return 0
    if options.dry_run:
        return show_study(study, out, err)
    check_folder(study.output)
    if options.slurm is not None:
        return _write_slurm(study, options.slurm, out, err)
    return _run_and_report(study, options.ray, out, err)


def _run_and_report(study: "PlannedStudy", ray: str | None, out: Console, err: Console) -> int:
    failures = study.run(out, ray)
    for path, error in failures.items():
        print_line(err, f"doubly: {path} failed: {error}")
    if page := study.report(out):
        print_line(out, f"runs: {study.output}\npage: {page}")
    return 2 if failures else 0


def _searched_study(study: "PlannedStudy", trials: int, options: ReproduceOptions, out: Console, err: Console) -> int:
    """Choose the settings of each method on a hold-out, and then run the study with them."""
    from doubly.evaluation.io import check_folder
    from doubly.studies.plan_search import plan_searches, trial_jobs, with_winners
    from doubly.studies.plans import check_directories

    if options.commands or options.slurm is not None:
        raise UsageError("--search decides the runs' settings while it runs: use it here or with --ray")
    searches = plan_searches(study.jobs, study.output, trials)
    search = replace(study, jobs=trial_jobs(searches))
    check_directories(search.jobs)
    is_searched = all(job.is_done for job in search.jobs)
    if options.dry_run:
        runs = with_winners(study.jobs, searches, study.output) if is_searched else study.jobs
        return show_study(replace(study, jobs=[*search.jobs, *runs]), out, err)
    check_folder(study.output)
    print_line(out, f"1. search: {trials} trials for each of {len(searches)} recipes, on a hold-out of 10 %")
    for path, error in search.run(out, options.ray).items():
        print_line(err, f"doubly: {path} failed and scores 0: {error}")
    study = replace(study, jobs=with_winners(study.jobs, searches, study.output))
    check_directories(study.jobs)
    print_line(out, f"2. the winners ({study.output / 'winners.json'}), trained on all training images")
    return _run_and_report(study, options.ray, out, err)


def _make_plan(options: ReproduceOptions) -> "PlannedStudy":
    from doubly.cli.loggers import logger_factories
    from doubly.config.serialize import suggestion
    from doubly.studies.planned import PlannedStudy
    from doubly.studies.plans import PLANS, SCALES, check_directories, plan_jobs

    name = options.scale or "small"
    if name not in SCALES:
        raise UsageError(f"there is no scale '{name}'{suggestion(name, SCALES)}")
    folder = name if options.search is None else f"{name}-search{options.search}"
    output = options.output or Path("runs") / folder
    changes = {key: getattr(options, key) for key in ("images", "autoattack_images")}
    config = replace(SCALES[name].evaluate, **{key: value for key, value in changes.items() if value is not None})
    scale = replace(SCALES[name], evaluate=config)
    jobs = plan_jobs(
        PLANS[options.study],
        scale,
        options.seed_count,
        output,
        root=None if options.data_root is None else str(Path(options.data_root).resolve()),
        methods=options.methods,
        autoattack=not options.no_autoattack,
    )
    if options.search is None:  # else the runs' settings are decided later
        check_directories(jobs)
    callbacks = logger_factories((), options.tensorboard)
    jobs = [replace(job, callbacks=callbacks) for job in jobs]
    flags = ("--tensorboard",) if options.tensorboard else ()
    return PlannedStudy(options.study, jobs, scale, output, options.jobs, flags)


def _write_slurm(study: "PlannedStudy", path: Path, out: Console, err: Console) -> int:
    if not study.unfinished:
        print_line(out, f"all {len(study.jobs)} runs are done; now: {study.report_command}")
        return 0
    text = study.slurm_script(lambda message: print_line(err, message))
    make_folder(study.output)  # for the logs
    write_text(path, text)
    runs = len(study.unfinished)
    print_line(out, f"wrote {path}, {runs} runs: submit it with `sbatch {path}`, and then {study.report_command}")
    return 0
