"""An evaluation for people at a prompt or in a notebook: one line, a table, a picture."""

from typing import TYPE_CHECKING, Any

import numpy as np

from doubly.text import escape_html, format_percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from doubly.evaluation.result import EvalResult


def one_line(result: "EvalResult") -> str:
    """Return the accuracies, and the tail under the first attack."""
    accuracies = [f"{name} {format_percent(result.accuracy(name))} %" for name in result.predictions]
    tail = ""
    if result.attacks:
        weakest = result.tail(result.attacks[0])
        tail = f", tail of {result.attacks[0]} {format_percent(weakest.value)} %: {weakest}"
    return f"EvalResult(n={result.n}, {len(result.classes)} classes: {', '.join(accuracies)}{tail})"


def table_rows(result: "EvalResult") -> list[dict[str, Any]]:
    """Return one row per class and one for all: name, number of images, accuracy without and under each attack."""
    counts = np.bincount(result.y, minlength=len(result.classes))
    accuracies = {name: result.per_class(name) for name in result.predictions}
    rows = [
        {"class": name, "n": int(counts[index]), **{key: float(values[index]) for key, values in accuracies.items()}}
        for index, name in enumerate(result.names)
    ]
    return [*rows, {"class": "all", "n": result.n, **{name: result.accuracy(name) for name in result.predictions}}]


def table(result: "EvalResult") -> Any:
    """Return `table_rows` as a pandas DataFrame with the classes as its index, or as they are without pandas."""
    rows = table_rows(result)
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]  # no dependency of ours
    except ImportError:
        return rows
    return pandas.DataFrame(rows).set_index("class")


def html(result: "EvalResult") -> str:
    """Return the table as HTML, for notebooks; accuracies in percent."""
    rows = table_rows(result)
    head = "".join(f"<th>{escape_html(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row.values())}</tr>" for row in rows)
    return f"<p>{escape_html(one_line(result))}</p><table><tr>{head}</tr>{body}</table>"


def plot(result: "EvalResult") -> "Figure":
    """Return a figure: bars of the accuracy of each class, without and under each attack."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.0, 0.25 * len(result.classes) * len(result.predictions)), 3.2), layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(result.predictions)
    for number, name in enumerate(result.predictions):
        positions = np.arange(len(result.classes)) + (number - (len(result.predictions) - 1) / 2) * width
        axes.bar(positions, 100 * np.nan_to_num(result.per_class(name)), width, label=name)
    axes.set_xticks(np.arange(len(result.classes)), result.names, rotation=45, ha="right")
    axes.set(ylabel="accuracy in %", ylim=(0, 100))
    axes.legend(title=f"n = {result.n}")
    return figure


def _cell(value: Any) -> str:
    return format_percent(value) if isinstance(value, float) else escape_html(str(value))
