"""Which pictures a report has, and what is said under each. A picture whose data the runs do not hold is left out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from doubly.report import figures
from doubly.report.collect import Comparison
from doubly.report.protocol import describe
from doubly.report.run_result import RunResult
from doubly.rundir import RunDir

Draw = Callable[[Path], bool]
WIDE = ("per_class", "confusion", "weights", "curves")


@dataclass(frozen=True)
class Picture:
    """A figure, as an SVG file beside the page."""

    title: str
    about: str
    path: Path
    wide: bool = False  # takes the whole width of the page


def of_section(comparison: Comparison, stem: Path) -> list[Picture]:
    """Of one setting: the classes, training, trade-offs; and single images of one run."""
    methods, run = comparison.methods, _looked_into(comparison)
    whose = f"{_label(comparison, run)}, seed {run.seed}"
    seeds = "mean over seeds, bars of one sd" if len(comparison.runs) > len(methods) else "one seed"
    wanted: list[tuple[str, str, str, Draw]] = [
        (
            "per_class",
            "Each class under attack",
            f"Robust accuracy, {_protocol([comparison])}; {seeds}.",
            partial(figures.per_class, methods),
        ),
        ("pareto", "Weakest classes against average", "Upper right is better.", partial(figures.pareto, methods)),
        ("cost", "What robustness costs", "Upper left is better.", partial(figures.cost, methods)),
        (
            "epsilon",
            "Stronger attackers",
            "Accuracy as the attacker is allowed more; the size of the attack's steps grows with it.",
            partial(figures.epsilon_curve, methods),
        ),
        (
            "margin",
            "Weight against margin",
            f"One point per test image, {whose}.",
            partial(figures.weight_against_margin, run),
        ),
        (
            "confusion",
            "What attacked images are taken for",
            "Counts, summed over seeds; a row per true class.",
            partial(figures.confusion, _done_first(methods)),
        ),
        (
            "weights",
            "Weights that KL-DRO gives to the test images",
            "Middle half and 5 to 95 % of each class; the line is the paper's threshold of 0.001.",
            partial(figures.weights, _few(methods)),
        ),
        (
            "curves",
            "Training",
            f"Bands of one sd over seeds. Accuracies are of a validation of the {_probed(comparison)} images.",
            partial(figures.learning_curves, methods),
        ),
        ("hard", "Hardest images", f"Largest weights, {whose}.", partial(figures.gallery, run, which="hard")),
        ("easy", "Easiest images", f"Smallest weights, {whose}.", partial(figures.gallery, run, which="easy")),
    ]
    return _drawn(wanted, stem)


def of_overview(sides: dict[str, Comparison], stem: Path) -> list[Picture]:
    """Of settings side by side: the classes of the methods that all of them have (figure 1)."""
    shared = [label for label in next(iter(sides.values())).methods if all(label in s.methods for s in sides.values())]
    settings = {name: {label: side.methods[label] for label in shared} for name, side in sides.items()}
    about = f"Robust accuracy of the methods that were run on each; {_protocol(sides.values())}."
    draw = partial(figures.per_class_panels, settings)
    return _drawn([("per_class", "Each class under attack", about, draw)], stem) if shared else []


def _drawn(wanted: Sequence[tuple[str, str, str, Draw]], stem: Path) -> list[Picture]:
    found = []
    for name, title, about, draw in wanted:
        path = stem.with_name(f"{stem.name}-{name}")
        if draw(path):
            found.append(Picture(title, about, path.with_name(f"{path.name}.svg"), name in WIDE))
    return found


def _protocol(comparisons: Iterable[Comparison]) -> str:
    """ε and n, which no accuracy is without."""
    return " / ".join(dict.fromkeys(f"{describe(c.protocol).split(' (')[0]}, n = {c.n}" for c in comparisons))


def _probed(comparison: Comparison) -> str:
    found = [
        row["validation"].get("on", "test") for run in comparison.runs for row in run.metrics if "validation" in row
    ]
    return " and ".join(dict.fromkeys("hold-out" if on == "holdout" else "test" for on in found))


def _done_first(methods: figures.ByMethod) -> figures.ByMethod:
    """AT and the variants of DONE before the others, since not all may be drawn."""
    return {**_few(methods), **methods}


def _few(methods: figures.ByMethod) -> figures.ByMethod:
    """AT and the variants of DONE, where they are; the others else."""
    found = {label: runs for label, runs in methods.items() if label == "AT" or label.startswith("DONE")}
    return found if len(found) > 1 else methods


def _looked_into(comparison: Comparison) -> RunResult:
    """The run whose single images are shown: of DONE where there is one, and one that kept its images."""
    ranked = sorted(comparison.runs, key=lambda run: (not _has_images(run), not run.method.startswith("DONE")))
    return ranked[0]


def _has_images(run: RunResult) -> bool:
    return RunDir(run.path).gallery.is_file()


def _label(comparison: Comparison, run: RunResult) -> str:
    return next(label for label, runs in comparison.methods.items() if run in runs)
