"""The digits studies as Markdown: a table per comparison, paired differences, and the results of the searches."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from doubly.metric_names import METRICS
from doubly.report.protocol import describe
from doubly.text import escape_markdown, format_mean_sd, format_percent

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
    """Return the page of the study of AT and DONE.

    Args:
        results: The contents of docs/results/digits.json, as `doubly reproduce digits_done` writes them.
    """
    about = f"*Tail of all images* {POOLED}."
    return _page(results, {name: title.format(**results) for name, title in TITLES.items()}, _table, about)


def comparison_markdown(results: Mapping[str, Any]) -> str:
    """Return the page of the comparison of all methods.

    Args:
        results: The contents of docs/results/digits_comparison.json, as `doubly reproduce digits` writes them.
    """
    tables = dict.fromkeys(row["table"] for row in results["rows"])
    about = f"*Margin*: the same attack on the logit margin. The tail in the differences {POOLED}."
    return _page(results, {table: f"{table.capitalize()} digits" for table in tables}, _methods, about)


def _page(results: Mapping[str, Any], titles: Mapping[str, str], table: Callable[[Rows], str], about: str) -> str:
    """Return a section for each table with the differences to its first row, and a section for the searches."""
    parts = []
    for name, title in titles.items():
        rows = [row for row in results["rows"] if row["table"] == name]
        differences = [d for d in results["differences"] if d["table"] == name]
        parts.append(f"### {title}\n\n{table(rows)}\n\n{_caption(rows, results)} {about}\n")
        parts += [
            f"`{row['label']}`, fold {fold}, ended with an alarm: {escape_markdown(sentence)}.\n"
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
    header = ("method", *(METRICS[key].label for key in metrics), "worst class", "epochs", "seconds")
    lines = []
    for row in rows:
        if row["failed"]:
            lines.append(_failed(row, 10))
            continue
        passes = f"{row['passes']['forward']:.1f} + {row['passes']['backward']:.1f}"
        numbers = [_spread(row["per_fold"][metric]) for metric in metrics]
        seconds = f"{statistics.mean(row['seconds']):.0f}"
        lines.append((row["label"], *numbers, _spread(row["worst_per_fold"]), str(row["epochs"]), seconds, passes))
    return markdown_lines((*header, "passes per step"), lines)


def _failed(row: Mapping[str, Any], width: int) -> tuple[str, ...]:
    """Return a row of `width` cells that says why there are no numbers."""
    reason = escape_markdown(row["failed"][0])
    return row["label"], f"failed in {len(row['failed'])} folds: {reason}", *[""] * (width - 2)


def markdown_lines(header: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int] = (0,)) -> str:
    """Return a Markdown table. The columns `texts` are aligned to the left, those of numbers to the right."""
    rule = ["---" if index in texts else "---:" for index in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def _spread(shares: Sequence[float]) -> str:
    return format_mean_sd(100 * statistics.mean(shares), 100 * statistics.stdev(shares))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    metrics = ("sa", "ra_pgd", "ra_tail_30")
    header = ("method", *(METRICS[key].label for key in metrics), "tail of all images", "worst class", "seconds")
    lines = []
    for row in rows:
        if row["failed"]:
            lines.append(_failed(row, 7))
            continue
        accuracies = [_spread(row["per_fold"][key]) for key in metrics]
        seconds = f"{statistics.mean(row['seconds']):.0f}"
        pooled = format_percent(row["pooled_tail"])
        lines.append((row["label"], *accuracies, pooled, _spread(row["worst_per_fold"]), seconds))
    return markdown_lines(header, lines)


def _caption(rows: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> str:
    example = next((row for row in rows if not row["failed"]), None)
    if example is None:
        return "No run of this table came to its end."
    return (
        f"Percent, mean ± sd over {results['folds']} stratified folds (seed = fold), n = {example['n']} in all; "
        f"{describe(example['protocol'])}."
    )


def _differences(rows: Sequence[Mapping[str, Any]]) -> str:
    labels = dict.fromkeys(row["label"] for row in rows)
    metrics = dict.fromkeys(row["metric"] for row in rows)
    cells = {
        (row["label"], row["metric"]): f"{100 * row['value']:+.1f} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"
        for row in rows
    }
    return markdown_lines(["", *metrics], [[label, *[cells[label, metric] for metric in metrics]] for label in labels])


def _searches(searches: Sequence[Mapping[str, Any]]) -> str:
    def changes(chosen: Mapping[str, Any]) -> str:
        return ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in chosen.items())

    return markdown_lines(
        ("recipe", "trials", "chosen", "score on the hold-outs (mean of RA-PGD and RA-Tail-30)"),
        [
            (
                f"`{s['recipe']}`",
                str(len(s["trials"])),
                changes(s["winner"]),
                f"{format_percent(max(t['score'] for t in s['trials']))} (median trial "
                f"{format_percent(statistics.median(t['score'] for t in s['trials']))})",
            )
            for s in searches
        ],
        texts=(0, 2),
    )
