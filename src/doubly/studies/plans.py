"""Which runs a table or figure of the paper takes, as jobs of ordinary run directories, and the report of them.

Plans share their runs: one folder per scale, so that figure 1 finds the runs of table 1 done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from doubly.config.serialize import suggestion, with_changes
from doubly.errors import UsageError
from doubly.evaluation.config import EvalConfig
from doubly.jobs.pool import Job
from doubly.recipes import recipe
from doubly.report import Report
from doubly.report.forms import show

_COMPARED = ("at", "mail", "gairat", "done_pgd", "done_adam")
_ALL = ("at", "fat", "wmmr", "mail", "gairat", "done_gd", "done_pgd", "done_adam")
_GALLERY: Mapping[str, tuple[str, ...]] = {"stl10": ("done_pgd",), "cifar10": ("done_pgd",)}


@dataclass(frozen=True)
class Plan:
    about: str
    settings: Mapping[str, tuple[str, ...]]  # DATASET[.imbalanced] -> methods
    autoattack: bool = False  # whether its numbers include RA-AA

    @property
    def methods(self) -> list[str]:
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
    """How large the runs are, and how they are measured."""

    part: str  # of the recipes' names
    measure: EvalConfig
    changes: Mapping[str, int] = field(default_factory=dict)  # of the recipes
    gpu: bool = False  # whether it needs one


SCALES = {
    "paper": Scale("", EvalConfig(curve_images=1000), gpu=True),
    # These are too short for the validation's usual rhythm to draw a learning curve.
    "small": Scale("small.", EvalConfig(images=2000, autoattack_images=200, curve_images=200), {"validation.every": 2}),
}


def jobs(
    plan: Plan,
    scale: Scale,
    seeds: int,
    output: Path,
    *,
    root: str | None = None,
    methods: Sequence[str] = (),
    autoattack: bool = True,
) -> list[Job]:
    """Seed by seed, so that a study that is cut short has whole tables. `methods`: only these."""
    unknown = [method for method in methods if method not in plan.methods]
    if unknown:
        raise UsageError(f"the plan has no method '{unknown[0]}'{suggestion(unknown[0], plan.methods)}")
    if seeds < 1:
        raise UsageError(f"seeds are at least 1, got {seeds}")
    attacks = ("pgd", "margin", *(("autoattack",) if plan.autoattack and autoattack else ()))
    runs = [
        replace(run, seed=seed, data=replace(run.data, root=root))
        for seed in range(seeds)
        for setting, named in plan.settings.items()
        for method in named
        if not methods or method in methods
        for run in [with_changes(recipe(f"{setting}.{scale.part}{method}"), scale.changes)]
    ]
    return [Job(run, output / f"{run.name}-s{run.seed}", scale.measure, attacks) for run in runs]


def check(found: Sequence[Job]) -> None:
    """Before any work: no directory holds another run."""
    for job in found:
        if changed := job.conflict:
            raise UsageError(
                f"{job.output} holds a run of another configuration ({changed}): move it away, or choose another "
                "--output"
            )


def reported(runs: Sequence[Path], output: Path, console: Console) -> Path:
    """The tables in the terminal, and the report; returns the page."""
    made = Report.of(runs)
    show(made.tables, console)
    return made.write(output)
