"""doubly reproduce."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from doubly.cli.options import parsed
from doubly.cli.tables import say
from doubly.errors import UsageError

SEEDS = 3
STUDIES = ("demo", "digits", "digits_done")
FOR_PLANS = (
    *("scale", "data_root", "methods", "images", "autoattack_images"),
    *("no_autoattack", "commands", "slurm", "ray"),
)


def reproduce(arguments: list[str], out: Console, err: Console) -> int:
    options = _options(arguments)  # first, so that --help comes at once
    from doubly.config.serialize import suggestion
    from doubly.studies.plans import PLANS

    if options.study not in (*PLANS, *STUDIES):
        raise UsageError(f"there is no study '{options.study}'{suggestion(options.study, [*PLANS, *STUDIES])}")
    jobs = 2 if options.jobs is None else options.jobs
    if jobs < 1 or options.seeds < 1:
        raise UsageError(f"jobs and seeds are at least 1, got {jobs} and {options.seeds}")
    if options.study in STUDIES:
        return _study(options, jobs, out)
    from doubly.cli.reproduce_plan import reproduce_plan

    return reproduce_plan(options, out, err)


def _options(arguments: list[str]) -> Any:
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Plan the runs, skip what is done, resume what was cut, and end in tables and a page.

        table1, …, table4, figure1, …, figure6: what the paper's table or figure takes; cifar10: our small study;
        demo: AT and DONE on digits in minutes; digits: every method; digits_done: DONE against AT, an hour each."""

        study: Annotated[str, tyro.conf.Positional]
        """which"""
        scale: str | None = None
        """paper: its own settings, on a cluster; small: minutes per run on two cores. small if not given"""
        seeds: int = SEEDS
        """seeds per method: 0, 1, …"""
        jobs: int | None = None
        """processes, each with its share of the cores; 2 if not given. Of a SLURM array or on Ray: runs at a time, as
        many as there is room for if not"""
        methods: tuple[str, ...] = ()
        """only these of the plan's methods"""
        output: Path | None = None
        """folder for the runs; runs/SCALE, which the plans share, or runs/STUDY if not given"""
        data_root: str | None = None
        """folder with the datasets' files"""
        images: int | None = None
        """measure on so many images, instead of what the scale says"""
        autoattack_images: int | None = None
        """AutoAttack on so many of them"""
        no_autoattack: bool = False
        """leave AutoAttack out"""
        dry_run: bool = False
        """show the runs, what is done of them, and how long the rest would take"""
        commands: bool = False
        """print a command per run that is not done, for a scheduler, and run nothing"""
        slurm: Path | None = None
        """write a SLURM array script of them, and run nothing"""
        ray: str | None = None
        """run them on a Ray cluster, host:port; auto: the one that runs here; local: start one. Needs doubly[ray]"""

    return parsed(Options, arguments, "reproduce")


def _study(options: Any, jobs: int, out: Console) -> int:
    """A study on digits, which has its own numbers."""
    defaults = {name: (() if name == "methods" else False) for name in FOR_PLANS}
    given = [name for name in FOR_PLANS if getattr(options, name) not in (defaults[name], None)]
    if given:
        flag = given[0].replace("_", "-")
        raise UsageError(f"--{flag} is for tables and figures: {options.study} has its own numbers, leave it out")
    if options.study != "demo" and options.seeds != SEEDS:
        raise UsageError(f"{options.study} has a seed per fold: leave --seeds out")
    output = options.output or Path("runs") / options.study
    if options.dry_run:
        for path in _runs_of_study(options.study, output, options.seeds):
            say(out, str(path))
        return 0
    if options.study == "demo":
        from doubly.studies.demo import demo

        page = demo(output, jobs, options.seeds, out)
    else:
        page = output / "results.md"
        page.write_text(_digits(options.study, output, jobs, out), encoding="utf-8")
    say(out, f"runs: {output}\npage: {page}")
    return 0


def _runs_of_study(name: str, output: Path, seeds: int) -> list[Path]:
    from doubly.studies import demo, digits_comparison, digits_study

    if name == "demo":
        return [job.output for job in demo.jobs(output, seeds)]
    study: Any = digits_study if name == "digits_done" else digits_comparison
    searches = study.searches(output)
    trials = [job for search in searches.values() for trial in search.jobs() for job in trial]
    rows = study.arms({name: {} for name in searches})  # what the searches will choose does not change the folders
    return [job.output for job in (*trials, *(job for row in rows for job in row.jobs(output)))]


def _digits(name: str, output: Path, jobs: int, out: Console) -> str:
    """As Markdown."""
    from doubly.report.study import comparison_markdown, study_markdown

    if name == "digits_done":
        from doubly.studies.digits_study import study

        return study_markdown(study(output, jobs, out))
    from doubly.studies.digits_comparison import comparison

    return comparison_markdown(comparison(output, jobs, out))
