"""The table of the demonstration: accuracies under the strong attack, and the differences of the tails to AT."""

from collections.abc import Sequence

import numpy as np
import rich.box
import rich.table

from doubly.evaluation.intervals import Interval, paired_seed_difference, tail_accuracy
from doubly.evaluation.io import read_result
from doubly.evaluation.metrics import Bools
from doubly.metric_names import attack_metric, tail_metric, worst_class_metric
from doubly.report import forms
from doubly.report.collect import BASELINE, Comparison, mean_sd
from doubly.report.run_result import RunResult
from doubly.report.tables import Cell, Column, Table

ATTACK = "strong"
RESAMPLES = 1000


def demo_table(comparison: Comparison) -> Table:
    """Return the table.

    Args:
        comparison: Runs of AT and of other methods with the same seeds, all evaluated under the strong attack.
    """
    average = attack_metric(ATTACK)
    metrics = {"SA": attack_metric("clean"), "average": average, "weakest 3": tail_metric(average)}
    metrics["worst class"] = worst_class_metric(average)
    correct = {label: _correct(runs) for label, runs in comparison.methods.items()}
    y = read_result(comparison.runs[0].path).y
    differences = {
        label: paired_seed_difference(rows, correct[BASELINE], y, tail_accuracy, RESAMPLES)
        for label, rows in correct.items()
        if label != BASELINE
    }
    rows = []
    for label, runs in comparison.methods.items():
        values = [[100 * float(metric.value(run.evaluation) or 0) for run in runs] for metric in metrics.values()]
        numbers = [Cell("", *mean_sd(of_seeds)) for of_seeds in values]
        difference = _text(differences[label]) if label in differences else ""
        rows.append((Cell(label), *numbers, Cell(difference)))
    columns = [Column("method", None), *map(Column, metrics), Column(f"weakest 3 minus {BASELINE}", None)]
    title = "Imbalanced digits: classes 0 to 4 keep a fifth of their training images"
    return Table(title, tuple(columns), tuple(rows), _notes(comparison, differences))


def terminal(table: Table) -> rich.table.Table:
    """Return the table for the terminal, narrow enough for 80 columns."""
    drawn = forms.terminal(table)
    drawn.box, drawn.show_edge, drawn.pad_edge = rich.box.SIMPLE_HEAD, False, False
    drawn.collapse_padding = True
    return drawn


def _correct(runs: Sequence[RunResult]) -> Bools:
    return np.stack([read_result(run.path).correct[ATTACK] for run in runs])


def _text(difference: Interval) -> str:
    value, low, high = (100 * number for number in difference)
    return f"{value:+.1f} ({low:+.1f}, {high:+.1f})"


def _notes(comparison: Comparison, differences: dict[str, Interval]) -> tuple[str, ...]:
    settings = comparison.protocol["attacks"][ATTACK]
    above = [label for label, part in differences.items() if part.low > 0]
    below = [label for label, part in differences.items() if part.high < 0]
    unclear = [label for label in differences if label not in (*above, *below)]
    kinds = {"clearly above": above, "clearly below": below, "not clearly different from": unclear}
    verdicts = [f"{kind} {BASELINE}: {', '.join(labels)}" for kind, labels in kinds.items() if labels]
    seeds = len(comparison.methods[BASELINE])
    return (
        f"Percent of n = {comparison.n} test images, mean ± sd over {seeds} seeds. SA: clean images. All others: the "
        f"strong attack (ε = {settings['threat']['radius']:g}, {settings['rounds']} rounds of "
        f"{settings['targets']} targets). Weakest 3: mean of the three weakest classes of a network.",
        f"Difference to {BASELINE}: same images, same seeds, 95 % interval over both. "
        f"On the weakest classes {'; '.join(verdicts)}.",
    )
