"""The digits study as Markdown: a table per comparison, the paired differences, and what the searches chose."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from doubly.report.forms import escaped
from doubly.report.protocol import describe

Rows = Sequence[Mapping[str, Any]]
TITLES = {
    "imbalanced": "Imbalanced digits (classes 0–4 keep a fifth), each method at the numbers its search chose",
    "equal": "Imbalanced digits, every method at the rate, epochs and weight decay chosen for AT; r as in the paper",
    "balanced": "Balanced digits, each method at the numbers its search chose",
    "short": "Short budget on imbalanced digits: {short_epochs} epochs, learning rate 0.1, weight decay 5e-4, cap 5",
    "ablation": "Ablation on imbalanced digits, all at the numbers chosen for DONE-PGD",
}
POOLED = (
    "pools the folds before the weakest three classes are picked: a fold has 36 images per class, and picking the "
    "lowest of noisy classes biases its tail downwards"
)


def study_markdown(results: Mapping[str, Any]) -> str:
    about = f"*Tail of all images* {POOLED}."
    return _page(results, {name: title.format(**results) for name, title in TITLES.items()}, _table, about)


def comparison_markdown(results: Mapping[str, Any]) -> str:
    """Every method, table by table."""
    tables = dict.fromkeys(row["table"] for row in results["rows"])
    about = f"*Margin*: the same attack on the logit margin. The tail in the differences {POOLED}."
    return _page(results, {table: f"{table.capitalize()} digits" for table in tables}, _methods, about)


def _page(results: Mapping[str, Any], titles: Mapping[str, str], shown: Callable[[Rows], str], about: str) -> str:
    """A section per table, with the differences to its first row, and what the searches chose."""
    parts = []
    for name, title in titles.items():
        rows = [row for row in results["rows"] if row["table"] == name]
        differences = [d for d in results["differences"] if d["table"] == name]
        parts.append(f"### {title}\n\n{shown(rows)}\n\n{_caption(rows, results)} {about}\n")
        parts += [
            f"`{row['label']}`, fold {fold}, ended with an alarm: {escaped(sentence)}.\n"
            for row in rows
            for fold, sentences in enumerate(row.get("alarms", []))
            for sentence in sentences
        ]
        if differences:
            parts.append(f"Difference to `{rows[0]['label']}`, with 95 % intervals:\n\n{_differences(differences)}\n")
    parts.append(f"### What the searches chose\n\n{_searches(results['searches'])}\n")
    return "\n".join(parts)


def _methods(rows: Sequence[Mapping[str, Any]]) -> str:
    metrics = ("sa", "ra_pgd", "ra_tail_30", "ra_margin", "ra_margin_tail_30")
    header = ("method", "SA", "RA-PGD", "RA-Tail-30", "RA-margin", "margin tail", "worst class", "epochs", "seconds")
    found = []
    for row in rows:
        if row["failed"]:
            found.append(_failed(row, 11))
            continue
        passes = f"{row['passes']['forward']:.1f} + {row['passes']['backward']:.1f}"
        numbers = [_spread(row["per_fold"][metric]) for metric in metrics]
        seconds = f"{statistics.mean(row['seconds']):.0f}"
        found.append((row["label"], *numbers, _spread(row["worst_per_fold"]), str(row["epochs"]), seconds, passes))
    return _lines((*header, "passes per step"), found)


def _failed(row: Mapping[str, Any], width: int) -> tuple[str, ...]:
    """A row of that many cells that says why there are no numbers."""
    return row["label"], f"failed in {len(row['failed'])} folds: {escaped(row['failed'][0])}", *[""] * (width - 2)


def _lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def _spread(values: Sequence[float], factor: float = 100) -> str:
    return f"{factor * statistics.mean(values):.1f} ± {factor * statistics.stdev(values):.1f}"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ("method", "SA", "RA-PGD", "RA-Tail-30", "tail of all images", "worst class", "seconds")
    found = []
    for row in rows:
        if row["failed"]:
            found.append(_failed(row, 7))
            continue
        folds = row["per_fold"]
        accuracies = [_spread(folds[key]) for key in ("sa", "ra_pgd", "ra_tail_30")]
        pooled = f"{100 * row['pooled_tail']:.1f}"
        found.append(
            (
                row["label"],
                *accuracies,
                pooled,
                _spread(row["worst_per_fold"]),
                f"{statistics.mean(row['seconds']):.0f}",
            )
        )
    return _lines(header, found)


def _caption(rows: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> str:
    measured = next((row for row in rows if not row["failed"]), None)
    if measured is None:
        return "No run of this table came to its end."
    return (
        f"Percent, mean ± sd over {results['folds']} stratified folds (seed = fold), n = {measured['n']} in all; "
        f"{describe(measured['protocol'])}."
    )


def _differences(rows: Sequence[Mapping[str, Any]]) -> str:
    labels = dict.fromkeys(row["label"] for row in rows)
    metrics = dict.fromkeys(row["metric"] for row in rows)
    cells = {
        (row["label"], row["metric"]): f"{100 * row['value']:+.1f} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"
        for row in rows
    }
    return _lines(["", *metrics], [[label, *[cells[label, metric] for metric in metrics]] for label in labels])


def _searches(searches: Sequence[Mapping[str, Any]]) -> str:
    def changes(chosen: Mapping[str, Any]) -> str:
        return ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in chosen.items())

    return _lines(
        ("recipe", "trials", "chosen", "score on the hold-outs (mean of RA-PGD and RA-Tail-30)"),
        [
            (
                f"`{s['recipe']}`",
                str(len(s["trials"])),
                changes(s["winner"]),
                f"{100 * max(t['score'] for t in s['trials']):.1f} (median trial "
                f"{100 * statistics.median(t['score'] for t in s['trials']):.1f})",
            )
            for s in searches
        ],
    )
