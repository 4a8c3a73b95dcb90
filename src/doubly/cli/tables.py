"""Lines and tables in the terminal: an evaluation, and the comparison of two. Names come from data and are escaped."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from doubly.metric_names import attack_metric
from doubly.text import (
    TRUST_QUESTION,
    dead_classes_sentence,
    escape_terminal,
    format_percent,
    printable_lines,
    trust_answer,
)

if TYPE_CHECKING:
    from doubly.evaluation.comparison import Difference
    from doubly.evaluation.result import EvalResult
    from doubly.offsets.frontier import Frontier
    from doubly.offsets.result import RepairResult


def print_line(console: Console, text: str) -> None:
    """Print a text without markup, colors or line breaks of rich; control characters become question marks."""
    console.print(printable_lines(text), highlight=False, markup=False, soft_wrap=True)


def attack_label(attack: str, result: "EvalResult") -> str:
    """Return the column title of an attack; AutoAttack's says how much of it was run."""
    return str(result.label) if attack == result.ensemble else attack_metric(attack).label


def print_evaluation(result: "EvalResult", title: str, out: Console) -> None:
    """Print the accuracies of each class, of all classes and of the tail, then the checks of the evaluation."""
    summary = result.summary()
    out.print(_accuracies(result, summary, title))
    for attack in result.attacks:
        print_line(out, f"tail under {attack_label(attack, result)}: {result.tail(attack)}")
    if dead := [name for name, row in summary["per_class"].items() if row["n"] and row["sa"] == 0]:
        print_line(out, dead_classes_sentence(dead, len(summary["per_class"])))
    if result.autoattack:
        settings = result.autoattack
        parts = [
            f"{settings['label']}: {settings['reference']}, n = {summary['autoattack'].get('n', 0)}, "
            f"epsilon {settings['epsilon']:.6g}, {settings['norm']}",
            *settings["substitutions"],
        ]
        print_line(out, "; ".join(parts))
    for attack, found in summary.get("minimum_norm", {}).items():
        print_line(out, f"median radius under {attack}: {_medians(found)}")
    if result.curve:
        values = (f"{format_percent(point['accuracy'])} at {point['epsilon']:.3g}" for point in result.curve["points"])
        print_line(
            out, f"% under {result.curve.get('name', 'PGD')} by radius, n = {result.curve['n']}: {', '.join(values)}"
        )
    if result.corruptions:
        out.print(_corruptions(result.corruptions))
    if result.trust:
        out.print(_checks(result.trust))


def _medians(found: Mapping[str, Any]) -> str:
    """Return the median radius of all images and of each class, smallest first."""
    known = {name: value for name, value in found["per_class"].items() if value is not None}
    classes = ", ".join(f"{name} {known[name]:.3g}" for name in sorted(known, key=lambda name: known[name]))
    average = "none, most images were not broken" if found["median"] is None else f"{found['median']:.3g}"
    return f"{average}; by class {classes}" if classes else average


def _accuracies(result: "EvalResult", summary: Mapping[str, Any], title: str) -> Table:
    from doubly.evaluation.summary import key_of

    keys, intervals = {attack: key_of(result, attack) for attack in result.predictions}, summary["intervals"]
    columns = [attack_label(attack, result) + _count(attack, result) for attack in keys]
    from doubly.report.protocol import describe_attack  # with matplotlib, which takes half a second

    attack, images = describe_attack(result.protocol) or "no attack", _skipped(result.protocol)
    table = _table(f"{title}: {attack}, n = {result.n}{images}, % with 95 % intervals", "", "n", *columns)
    for name, row in summary["per_class"].items():
        cells = [_cell(row[key], row[f"{key}_interval"], 0) for key in keys.values()]
        table.add_row(escape_terminal(name), str(row["n"]), *cells)
    table.add_section()
    cells = [_cell(result.accuracy(attack), intervals[key]) for attack, key in keys.items()]
    table.add_row("all", str(result.n), *cells, style="bold")
    cells = [_cell(result.tail(attack)[0], result.interval(attack, "tail")[1:]) for attack in result.attacks]
    table.add_row(f"RA-Tail-{100 * result.tail_share:.0f}", "", "", *cells)
    cells = [_cell(result.worst(attack)[1], intervals[f"worst_{keys[attack]}"]) for attack in result.attacks]
    table.add_row("worst class", "", "", *cells)
    return table


def _corruptions(found: Mapping[str, Any]) -> Table:
    """Return the accuracy under each corruption and severity, with the tail over the classes."""
    table = _table(f"corruptions, n = {found['n']} of each severity, %", "", "1", "2", "3", "4", "5", "mean", "tail")
    for name, part in found["corruptions"].items():
        cells = [_percent(value) for value in (*part["severities"], part["accuracy"], part["tail"])]
        table.add_row(escape_terminal(name), *cells)
    table.add_section()
    table.add_row("all", *[""] * 5, _percent(found["accuracy"]), _percent(found["tail"]), style="bold")
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else format_percent(value)


def _count(attack: str, result: "EvalResult") -> str:
    """Return the number of samples of an attack that was not run on all of them, else nothing."""
    n = int((result.predictions[attack] >= 0).sum())
    return "" if n == result.n else f", n = {n}"


def _checks(trust: Mapping[str, Any]) -> Table:
    table = Table("check", "verdict", "result", title=f"{TRUST_QUESTION} {trust_answer(trust['verdict'])}")
    for check in trust["lines"]:
        style = {"suspicious": "red", "unclear": "yellow", "not measured": "dim"}.get(check["verdict"])
        table.add_row(check["name"], check["verdict"], escape_terminal(check["text"]), style=style)
    return table


def print_differences(rows: Iterable["Difference"], result: "EvalResult", title: str, out: Console) -> None:
    """Print the paired differences of two evaluations with their intervals and McNemar's test.

    Args:
        rows: The differences, one per attack.
        result: The first evaluation.
        title: Title of the table.
        out: Where it is printed.
    """
    table = _table(title, "", "", "n", "points, 95 %", "first", "second", "p")  # short: 80 columns
    for row in rows:
        counts = [str(row.test.first_only), str(row.test.second_only), f"{row.test.p:.2g}"]
        table.add_row(attack_label(row.attack, result), "average", str(row.n), _points(row.average), *counts)
        table.add_row("", "tail", "", _points(row.tail))
        table.add_row("", "worst class", "", _points(row.worst))
        table.add_section()
    out.print(table)
    print_line(out, "first, second: images that only this network classifies correctly; p: McNemar's exact test")


def print_repair(result: "RepairResult", title: str, out: Console) -> None:
    """Print the offset of each class, and its accuracies before and after on images that were not used for the fit."""
    before, after = result.before.summary(), result.after.summary()
    keys = {attack: attack_metric(attack).key for attack in result.before.predictions}
    columns = [f"{attack_label(attack, result.before)} {when}" for attack in keys for when in ("before", "after")]
    table = _table(f"{title}, held-out images that were not used for the fit, % with 95 % intervals", "", "n", "offset")
    for column in columns:
        table.add_column(column)
    for index, (name, row) in enumerate(before["per_class"].items()):
        other = after["per_class"].get(name, row)
        cells = [_cell(one[key], one[f"{key}_interval"], 0) for key in keys.values() for one in (row, other)]
        offset = f"{float(result.offsets[index]):+.2f}" if index < len(result.offsets) else "–"
        table.add_row(escape_terminal(name), str(row["n"]), offset, *cells)
    table.add_section()
    pairs = [(attack, one) for attack in keys for one in (result.before, result.after)]
    for label, of in (
        ("all", "average"),
        (f"RA-Tail-{100 * result.before.tail_share:.0f}", "tail"),
        ("worst class", "worst"),
    ):
        cells = [_interval_cell(one.interval(attack, of)) for attack, one in pairs]
        table.add_row(label, str(result.before.n) if of == "average" else "", "", *cells)
    out.print(table)


def print_frontiers(
    frontiers: Sequence["Frontier"], rows: Sequence[Mapping[str, Any]], names: Sequence[str], out: Console
) -> None:
    """Print the points of frontiers, and how they compare with the first one.

    Args:
        frontiers: The frontiers.
        rows: What `compare_runs` returned for them.
        names: Names of the runs.
        out: Where it is printed.
    """
    first = frontiers[0].summary["protocol"]
    images = f"{first['n']} {first.get('split', 'test')} images{_skipped(first)}"
    title = f"accuracy under {first['name']}, {images}, % with 95 % intervals"
    table = _table(title, "", "offsets", "average", "tail", "worst class", "SA")
    for name, frontier in zip(names, frontiers, strict=True):
        for index, point in enumerate(frontier.summary["points"]):
            cells = [_cell(point[key][0], point[key][1:]) for key in ("average", "tail", "worst", "sa")]
            table.add_row(escape_terminal(name) if index == 0 else "", f"x {point['scale']:g}", *cells)
        table.add_section()
    out.print(table)
    if len(frontiers) == 1:
        return
    lowest = format_percent(rows[0]["lowest_average"])
    table = _table(
        "compared with the first", "", f"tail at an average >= {lowest}", "points, 95 %", "area above, points²"
    )
    for name, row in zip(names, rows, strict=True):
        tail, area, difference = row["tail_at_average"], row["area_above_first"], row["difference"]
        cells = ["–" if tail is None else format_percent(tail), "–" if difference is None else _range(difference)]
        table.add_row(escape_terminal(name), *cells, "–" if area is None else f"{1e4 * area:+.1f}")
    out.print(table)


def _skipped(protocol: Mapping[str, Any]) -> str:
    return f" without the first {protocol['skip_images']:,}" if "skip_images" in protocol else ""


def _range(values: Sequence[float]) -> str:
    return "{:+.1f} ({:+.1f}, {:+.1f})".format(*(100 * value for value in values))


def _interval_cell(interval: Any) -> str:
    return _cell(interval.value, (interval.low, interval.high))


def _points(interval: Any) -> str:
    return f"{100 * interval.value:+.1f} ({100 * interval.low:+.1f}, {100 * interval.high:+.1f})"


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=escape_terminal(title), box=box.SIMPLE_HEAD, pad_edge=False)


def _cell(value: float | None, ends: Any, digits: int = 1) -> str:
    if value is None:
        return "–"
    return f"{format_percent(value, digits)} ({format_percent(ends[0], 0)}–{format_percent(ends[1], 0)})"
