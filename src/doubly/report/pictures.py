"""The figures of a report with their captions. A figure whose data the runs do not hold is left out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from doubly.report import figures
from doubly.report.collect import BASELINE, Comparison
from doubly.report.frontier import frontiers_of
from doubly.report.protocol import describe
from doubly.report.run_result import RunResult
from doubly.rundir import RunDir

Wanted = tuple[str, str, str, Callable[[Path], bool]]  # name of the file, title, caption, function that draws
WIDE = ("per_class", "confusion", "weights", "curves", "margins")
MAIN_METHOD = "DONE"  # beginning of the labels that are shown where there is no room for all methods


@dataclass(frozen=True)
class Picture:
    """A figure of the page: title, caption and SVG file."""

    title: str
    caption: str
    path: Path
    wide: bool = False  # takes the whole width of the page


def section_pictures(comparison: Comparison, stem: Path) -> list[Picture]:
    """Draw the figures of one setting.

    Args:
        comparison: The runs.
        stem: Path of the files without the name of the figure and the ending.
    """
    return _draw([*_accuracy_figures(comparison), *_sample_figures(comparison)], stem)


def overview_pictures(sides: dict[str, Comparison], stem: Path) -> list[Picture]:
    """Draw the classes of settings side by side, for the methods that all of them have (figure 1 of the paper)."""
    shared = [label for label in next(iter(sides.values())).methods if all(label in s.methods for s in sides.values())]
    settings = {name: {label: side.methods[label] for label in shared} for name, side in sides.items()}
    caption = f"Accuracy of each class for the methods that all settings have; {_protocol(sides.values())}."
    draw = partial(figures.per_class_panels, settings)
    return _draw([("per_class", "Each class under attack", caption, draw)], stem) if shared else []


def _accuracy_figures(comparison: Comparison) -> list[Wanted]:
    """Return the figures of accuracies: by class, by cost and by size of the perturbation."""
    methods = comparison.methods
    several = len(methods) > 1  # one point shows nothing
    seeds = (
        "mean over seeds, error bars of one standard deviation" if len(comparison.runs) > len(methods) else "one seed"
    )
    wanted = [
        (
            "per_class",
            "Each class under attack",
            f"Accuracy of each class under {_protocol([comparison])}; {seeds}.",
            partial(figures.per_class, methods),
        ),
        (
            "pareto",
            "Weakest classes against average",
            "RA-Tail-30 against RA-PGD; upper right is better.",
            partial(figures.pareto, methods),
        ),
        (
            "frontier",
            "Weakest classes against average along class offsets",
            "Each line begins at the network as trained (hollow mark) and adds more and more of the class offsets that "
            "were fitted on held-out images; crosses are 95 % intervals; upper right is better.",
            partial(figures.frontier, frontiers_of(methods)),
        ),
        (
            "cost",
            "Accuracy against cost of training",
            "Each line joins RA-PGD and RA-Tail-30 of a method; upper left is better.",
            partial(figures.cost, methods),
        ),
        (
            "epsilon",
            "Larger perturbations",
            "Accuracy against ε; the step size of the attack is proportional to ε.",
            partial(figures.epsilon_curve, methods),
        ),
    ]
    return [figure for figure in wanted if several or figure[0] not in ("pareto", "cost")]


def _sample_figures(comparison: Comparison) -> list[Wanted]:
    """Return the figures of predictions, weights and training, and single images of one run."""
    methods, run = comparison.methods, example_run(comparison)
    run_name = f"{_label(comparison, run)}, seed {run.seed}"
    return [
        (
            "margins",
            "Logit margins under attack",
            "Share of the test images by logit margin under the margin attack, of all seeds together; on the right in "
            "units of the standard deviation of the network's clean margins.",
            partial(figures.margin_histograms, methods),
        ),
        (
            "margin",
            "Weight against margin",
            f"One point per test image; {run_name}.",
            partial(figures.weight_against_margin, run),
        ),
        (
            "confusion",
            "Confusion matrices under attack",
            "Counts, summed over seeds. Rows are true classes, columns are predictions.",
            partial(figures.confusion, {**_main_methods(methods), **methods}),
        ),
        (
            "weights",
            "Weights of KL-DRO on the test images",
            "Boxes span 25 to 75 % of the images of a class, whiskers 5 to 95 %; line: the paper's threshold, 0.001.",
            partial(figures.weights, _main_methods(methods)),
        ),
        (
            "curves",
            "Learning curves",
            "Mean over seeds with a band of one standard deviation. Accuracies are measured on a part of the "
            f"{_validated_on(comparison)} images.",
            partial(figures.learning_curves, methods),
        ),
        (
            "hard",
            "Hardest images",
            f"The images with the largest weights; {run_name}.",
            partial(figures.gallery, run, kind="hard"),
        ),
        (
            "easy",
            "Easiest images",
            f"The images with the smallest weights; {run_name}.",
            partial(figures.gallery, run, kind="easy"),
        ),
    ]


def _draw(wanted: Sequence[Wanted], stem: Path) -> list[Picture]:
    pictures = []
    for name, title, caption, draw in wanted:
        path = stem.with_name(f"{stem.name}-{name}")
        if draw(path):
            pictures.append(Picture(title, caption, path.with_name(f"{path.name}.svg"), name in WIDE))
    return pictures


def _protocol(comparisons: Iterable[Comparison]) -> str:
    """Return attack, ε and n, which every accuracy needs beside it."""
    return " / ".join(dict.fromkeys(f"{describe(c.protocol).split(' (')[0]}, n = {c.n}" for c in comparisons))


def _validated_on(comparison: Comparison) -> str:
    parts = [
        row["validation"].get("on", "test") for run in comparison.runs for row in run.metrics if "validation" in row
    ]
    return " and ".join(dict.fromkeys("hold-out" if part == "holdout" else "test" for part in parts))


def _main_methods(methods: figures.ByMethod) -> figures.ByMethod:
    """Return the baseline and the variants of DONE if there are at least two, else all methods."""
    main = {label: runs for label, runs in methods.items() if label == BASELINE or label.startswith(MAIN_METHOD)}
    return main if len(main) > 1 else methods


def example_run(comparison: Comparison) -> RunResult:
    """Return the run whose single images are shown: if possible one with a gallery, and one of DONE."""
    return min(
        comparison.runs,
        key=lambda run: (not RunDir(run.path).gallery.is_file(), not run.method.startswith(MAIN_METHOD)),
    )


def _label(comparison: Comparison, run: RunResult) -> str:
    return next(label for label, runs in comparison.methods.items() if run in runs)
