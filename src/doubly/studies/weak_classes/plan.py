"""Which networks the study of weak classes trains, and what it measures of them.

All methods share budget and search: weights averaged, three trials of half the epochs, and then three seeds. The
held-out images are divided: part A drives methods that learn from held-out images and fits the class offsets, part B
selects. Test images select nothing; the first 4,000 of CIFAR-10 informed the design of the methods and score nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from doubly.config import Run
from doubly.config.serialize import suggestion, with_changes
from doubly.errors import UsageError
from doubly.recipes import recipe
from doubly.studies.weak_classes.measured_job import Measure, MeasuredJob

SEEDS = (11, 12, 13)
TRIAL_SEED = 1
HOLDOUT, DRIVER_SHARE = 0.2, 0.5
EMA_DECAY = 0.995
OURS = "done_class"
# In the order in which they are trained, so that a study that is stopped early has the most interesting ones.
METHODS = ("at", OURS, "at_balanced_loss", "cfol", "at_bsl", "trades", "dafa", "faal", "cfa", "done_pgd")
RATE = "optimizer.lr.peak"
# Three trials: the recipe, twice its learning rate, and another value of the method's main setting.
TRIALS: dict[str, tuple[dict[str, Any], ...]] = {
    method: ({}, {RATE: 0.2}, other)
    for method, other in {
        "at": {RATE: 0.05},
        "at_balanced_loss": {RATE: 0.05},
        "trades": {"method.beta": 3.0},
        "cfol": {"method.eta": 5e-5},
        "done_pgd": {"method.cap": 2.0},
        "at_bsl": {"method.tau": 1.5},
        "dafa": {"method.strength": 1.5},
        "faal": {"method.rho": 0.1},
        "cfa": {"method.beta": 3.0},
    }.items()
}
# What the ablation chose: classes by their margins. Its third trial has the loss that came second.
BY_MARGINS = {"method.score": "margin", "method.class_temperature.value": 0.2}
TRADES_LOSS = {"kind": "loss.trades", "beta": 6.0}
TRIALS[OURS] = (BY_MARGINS, {**BY_MARGINS, RATE: 0.2}, {**BY_MARGINS, "method.loss": TRADES_LOSS})
LATE = {"kind": "schedule.piecewise", "values": [1e9, 0.5], "boundaries": [0.625]}  # R
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # of the ablation: the recipe and what is changed in it
    "AT": ("at", {}),
    "balanced AT": ("at_balanced_loss", {}),
    "class weights, R = 0.5": (OURS, {}),
    "held-out errors": (OURS, {"method.driver": "holdout"}),
    "loss TRADES": (OURS, {"method.loss": TRADES_LOSS}),
    "R = 1": (OURS, {"method.class_temperature.value": 1.0}),
    "in the last 3/8 of training": (OURS, {"method.class_temperature": LATE}),
    "margins instead of errors": (OURS, BY_MARGINS),
    "gradient of one function": (OURS, {"method.mode": "gradient"}),
    "logit adjustment": (OURS, {"method.logit_adjustment": 1.0}),
    "sample weights, r = 1": (OURS, {"method.temperature.value": 1.0, "method.cap": 3.0, "method.floor": 0.3}),
}
PATH = (0.0, 0.25, 0.5, 0.75, 1.0)  # factors of the fitted offsets
BOTH = (0.0, 1.0)  # as trained, repaired
ON_B = Measure("selection", "validation", 0, 1000, "strong", BOTH)
ON_TEST = Measure("test", "test", 4000, 2000, "strong", BOTH)
PATH_ON_B = Measure("selection", "validation", 0, 1000, "margin", (0.0, 0.5, 1.0))
PATH_ON_TEST = Measure("path", "test", 4000, 2000, "margin", PATH)


@dataclass(frozen=True)
class StudyPlan:
    """The runs of the study, and what is measured of them.

    Attributes:
        output: Folder of the runs.
        root: Folder with the dataset's files.
        setting: Beginning of the names of the recipes.
        methods: Methods to compare; AT is the reference of the others.
        trials: Settings that are tried for each method, by dotted path.
        seeds: Seeds of the final networks.
        changes: Changes of all recipes by dotted path.
        on_b: What chooses, on part B.
        on_test: What scores, on test images.
        path_on_b: What judges the ablation.
        path_on_test: The path along the class offsets on test images.

    Raises:
        UsageError: If a method has no trials, or there is no seed.
    """

    output: Path
    root: str | None = None
    setting: str = "cifar10.imbalanced.small"
    methods: tuple[str, ...] = METHODS
    trials: Mapping[str, tuple[dict[str, Any], ...]] = field(default_factory=lambda: TRIALS)
    seeds: tuple[int, ...] = SEEDS
    changes: Mapping[str, Any] = field(default_factory=dict)
    on_b: Measure = ON_B
    on_test: Measure = ON_TEST
    path_on_b: Measure = PATH_ON_B
    path_on_test: Measure = PATH_ON_TEST

    def __post_init__(self) -> None:
        for name in self.methods:
            if name not in self.trials:
                raise UsageError(f"the study has no method '{name}'{suggestion(name, self.trials)}")
        if not self.seeds:
            raise UsageError("the study needs at least one seed")

    def run(self, method: str, changes: Mapping[str, Any], seed: int, epochs: float = 1.0) -> Run:
        """Return a run of the study.

        Args:
            method: Name of the method.
            changes: Changes of its recipe by dotted path.
            seed: Its seed.
            epochs: Share of the recipe's epochs.
        """
        run: Run = with_changes(recipe(f"{self.setting}.{method}"), {**self.changes, **changes})
        data = replace(run.data, root=self.root, train_images=None, holdout=HOLDOUT, driver_share=DRIVER_SHARE)
        number = max(1, round(run.epochs * epochs))
        validation = replace(run.validation, every=number)
        return replace(run, data=data, epochs=number, ema_decay=EMA_DECAY, seed=seed, validation=validation)

    def ablation_jobs(self) -> dict[str, MeasuredJob]:
        """Return the job of each variant: half the epochs, judged by its path on part B."""
        jobs = {}
        for name, (method, changes) in VARIANTS.items():
            run = self.run(method, changes, TRIAL_SEED, 0.5)
            jobs[name] = MeasuredJob(run, self.output / "ablation" / _slug(name), measures=(self.path_on_b,))
        return jobs

    def trial_jobs(self, method: str) -> list[MeasuredJob]:
        """Return the trials of a method, with half the epochs, judged on part B; none if there is nothing to choose."""
        folder = self.output / "trials"
        if len(self.trials[method]) == 1:
            return []
        return [
            MeasuredJob(
                self.run(method, changes, TRIAL_SEED, 0.5), folder / f"{method}-{number}", measures=(self.on_b,)
            )
            for number, changes in enumerate(self.trials[method])
        ]

    def final_jobs(self, method: str, trial: int) -> list[MeasuredJob]:
        """Return the networks of a method with the settings of a trial, one per seed."""
        measures = (self.on_b, self.on_test, self.path_on_test)
        folder, changes = self.output / "final", self.trials[method][trial]
        return [
            MeasuredJob(self.run(method, changes, seed), folder / f"{method}-s{seed}", measures=measures)
            for seed in self.seeds
        ]


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")
