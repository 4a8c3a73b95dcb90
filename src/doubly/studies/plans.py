"""The runs of each table and figure of the paper, as jobs of ordinary run directories, and their report.

Plans share their runs: there is one folder per scale, so figure 1 uses the runs of table 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from doubly.config.serialize import suggestion, with_changes
from doubly.errors import UsageError
from doubly.evaluation.config import EvalConfig
from doubly.jobs.job import Job
from doubly.recipes import recipe
from doubly.report import Report
from doubly.report.forms import show

_COMPARED = ("at", "mail", "gairat", "done_pgd", "done_adam")
_ALL = ("at", "fat", "wmmr", "mail", "gairat", "done_gd", "done_pgd", "done_adam")
_GALLERY: Mapping[str, tuple[str, ...]] = {"stl10": ("done_pgd",), "cifar10": ("done_pgd",)}


@dataclass(frozen=True)
class Plan:
    """The runs of a table or figure.

    Attributes:
        title: What it shows.
        settings: Methods by setting; a setting is the first part of recipe names, DATASET or DATASET.imbalanced.
        autoattack: Whether the runs are evaluated with AutoAttack too.
    """

    title: str
    settings: Mapping[str, tuple[str, ...]]
    autoattack: bool = False

    @property
    def methods(self) -> list[str]:
        """Names of all methods."""
        return list(dict.fromkeys(method for methods in self.settings.values() for method in methods))


PLANS = {
    "table1": Plan("CIFAR-10, balanced and imbalanced", {"cifar10": _ALL, "cifar10.imbalanced": _ALL}, True),
    "table2": Plan("SVHN, balanced and imbalanced", {"svhn": _COMPARED, "svhn.imbalanced": _COMPARED}, True),
    "table3": Plan("STL-10 and GTSRB", {"stl10": _COMPARED, "gtsrb": _COMPARED}, True),
    "table4": Plan("the fast setting, on CIFAR-10", {"cifar10": ("fast_at", "fast_at_ga", "fast_bat", "done_fast")}),
    "figure1": Plan(
        "robust accuracy per class, AT and DONE-GD",
        {"cifar10": ("at", "done_gd"), "cifar10.imbalanced": ("at", "done_gd")},
    ),
    "figure2": Plan("learning curves of DONE-ADAM", {"cifar10": ("done_adam",)}),
    "figure3": Plan("confusion matrices", dict.fromkeys(("svhn", "gtsrb", "cifar10", "stl10"), ("done_pgd",))),
    "figure4": Plan("images with small weights", _GALLERY),
    "figure5": Plan("weights per class", dict.fromkeys(("cifar10", "stl10", "svhn"), ("done_pgd",))),
    "figure6": Plan("images with large weights", _GALLERY),
    "cifar10": Plan(
        "our own small study",
        {"cifar10.imbalanced": ("at", "trades", "mail", "gairat", "cfol", "done_pgd"), "cifar10": ("at", "done_pgd")},
        True,
    ),
}


@dataclass(frozen=True)
class Scale:
    """Size of the runs of a plan, and how they are evaluated.

    Attributes:
        infix: What recipe names have between the setting and the method.
        evaluate: How the runs are evaluated.
        changes: Changes of the recipes by dotted path.
        needs_gpu: Whether a run needs a GPU.
    """

    infix: str
    evaluate: EvalConfig
    changes: Mapping[str, int] = field(default_factory=dict)
    needs_gpu: bool = False


SCALES = {
    "paper": Scale("", EvalConfig(curve_images=1000), needs_gpu=True),
    # These runs are short: validated as rarely as usual, their learning curves would have too few points.
    "small": Scale("small.", EvalConfig(images=2000, autoattack_images=200, curve_images=200), {"validation.every": 2}),
}


def plan_jobs(
    plan: Plan,
    scale: Scale,
    seeds: int,
    output: Path,
    *,
    root: str | None = None,
    methods: Sequence[str] = (),
    autoattack: bool = True,
) -> list[Job]:
    """Return the jobs of a plan, seed by seed, so that a study that is stopped early has whole tables.

    Args:
        plan: Which runs.
        scale: How large they are.
        seeds: Runs per method.
        output: Folder for the run directories.
        root: Folder with the datasets' files.
        methods: Only these methods; all of the plan if empty.
        autoattack: Whether AutoAttack is run if the plan has it.

    Raises:
        UsageError: If the plan does not have a method, or there is no seed.
    """
    unknown = [method for method in methods if method not in plan.methods]
    if unknown:
        raise UsageError(f"the plan has no method '{unknown[0]}'{suggestion(unknown[0], plan.methods)}")
    if seeds < 1:
        raise UsageError(f"seeds are at least 1, got {seeds}")
    attacks = ("pgd", "margin", *(("autoattack",) if plan.autoattack and autoattack else ()))
    runs = [
        replace(run, seed=seed, data=replace(run.data, root=root))
        for seed in range(seeds)
        for setting, names in plan.settings.items()
        for method in names
        if not methods or method in methods
        for run in [with_changes(recipe(f"{setting}.{scale.infix}{method}"), scale.changes)]
    ]
    return [Job(run, output / f"{run.name}-s{run.seed}", scale.evaluate, attacks) for run in runs]


def check_directories(jobs: Sequence[Job]) -> None:
    """Check before any work that no directory holds another run.

    Raises:
        UsageError: If one does.
    """
    for job in jobs:
        if difference := job.conflict:
            raise UsageError(
                f"{job.output} holds a run of another configuration ({difference}): move it away, or choose another "
                "--output"
            )


def show_report(runs: Sequence[Path], output: Path, console: Console) -> Path:
    """Print the tables of some runs, and write their report into a folder.

    Returns:
        The page.
    """
    report = Report.of(runs)
    show(report.tables, console)
    return report.write(output)
