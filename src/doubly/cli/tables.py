"""Tables in the terminal for an evaluation and for the comparison of two. Names come from data and are escaped."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from doubly.metric_names import attack_metric
from doubly.text import escape_terminal, format_percent


def say(out: Console, text: str) -> None:
    """Print a line as it is, without markup or line breaks of rich."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def label(attack: str, result: Any) -> str:
    """Return the column title of an attack; AutoAttack's says how much of it was run."""
    return str(result.label) if attack == result.ensemble else attack_metric(attack).label


def show(result: Any, title: str, out: Console) -> None:
    """Print the accuracies of each class, of all classes and of the tail, then the checks of the evaluation."""
    from doubly.evaluation.summary import key_of

    found, keys = result.summary(), {attack: key_of(result, attack) for attack in result.predictions}
    heads = [label(attack, result) + _less(attack, result) for attack in keys]
    table = _table(f"{title}, % with 95 % intervals", "", "n", *heads)
    for name, row in found["per_class"].items():
        table.add_row(
            escape_terminal(name), str(row["n"]), *(_cell(row[k], row[f"{k}_interval"], 0) for k in keys.values())
        )
    table.add_section()
    ends = found["intervals"]
    cells = [_cell(result.accuracy(attack), ends[key]) for attack, key in keys.items()]
    table.add_row("all", str(result.n), *cells, style="bold")
    cells = [_cell(result.tail(attack)[0], result.interval(attack, "tail")[1:]) for attack in result.attacks]
    table.add_row(f"RA-Tail-{100 * result.tail_share:.0f}", "", "", *cells)
    cells = [_cell(result.worst(attack)[1], ends[f"worst_{keys[attack]}"]) for attack in result.attacks]
    table.add_row("worst class", "", "", *cells)
    out.print(table)
    for attack in result.attacks:
        say(out, f"tail under {label(attack, result)}: {', '.join(result.tail(attack)[1])}")
    if result.autoattack:
        about = result.autoattack
        n = found["autoattack"].get("n", 0)
        said = "".join(f"; {text}" for text in about["substitutions"])
        say(
            out,
            f"{about['label']}: {about['reference']}, n = {n}, epsilon {about['epsilon']:.6g}, {about['norm']}{said}",
        )
    if result.curve:
        values = (f"{format_percent(point['accuracy'])} at {point['epsilon']:.3g}" for point in result.curve["points"])
        say(out, f"% under PGD by radius, n = {result.curve['n']}: {', '.join(values)}")
    if result.trust:
        _panel(result.trust, out)


def _less(attack: str, result: Any) -> str:
    """Return the number of samples of an attack that was not run on all of them, else nothing."""
    n = int((result.predictions[attack] >= 0).sum())
    return "" if n == result.n else f", n = {n}"


def _panel(trust: Any, out: Console) -> None:
    table = Table("check", "verdict", "what was found", title=f"can it be trusted? {trust['verdict']}")
    for line in trust["lines"]:
        style = {"suspicious": "red", "not measured": "dim"}.get(line["verdict"])
        table.add_row(line["name"], line["verdict"], escape_terminal(line["text"]), style=style)
    out.print(table)


def show_differences(rows: Iterable[Any], result: Any, title: str, out: Console) -> None:
    """Print the paired differences of two evaluations with their intervals and McNemar's test."""
    table = _table(title, "", "", "n", "points, 95 %", "first", "second", "p")
    for row in rows:
        for what, interval in (("average", row.average), ("tail", row.tail), ("worst class", row.worst)):
            value = f"{100 * interval.value:+.1f} ({100 * interval.low:+.1f}, {100 * interval.high:+.1f})"
            first = what == "average"
            test = [str(row.test.first_only), str(row.test.second_only), f"{row.test.p:.2g}"] if first else []
            table.add_row(label(row.attack, result) if first else "", what, str(row.n) if first else "", value, *test)
        table.add_section()
    out.print(table)
    say(out, "first, second: samples that only this one gets right; p: McNemar's exact test of these")


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=escape_terminal(title), box=box.SIMPLE_HEAD, pad_edge=False)


def _cell(value: float | None, ends: Any, digits: int = 1) -> str:
    if value is None:
        return "–"
    return f"{format_percent(value, digits)} ({format_percent(ends[0], 0)}–{format_percent(ends[1], 0)})"
