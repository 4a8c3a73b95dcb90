"""An evaluation, and the comparison of two, as tables in the terminal. Names come from data, and are escaped."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape as unmarked
from rich.table import Table

from doubly.rundir import duration as duration
from doubly.rundir import printable


def escape(name: str) -> str:
    """Neither rich's markup, nor anything that steers a terminal."""
    return unmarked(printable(name))


LABELS = {"clean": "SA", "pgd": "RA-PGD", "margin": "RA-margin"}


def say(out: Console, text: str) -> None:
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def label(attack: str, result: Any) -> str:
    return result.label if attack == result.ensemble else LABELS.get(attack, f"RA-{attack}")


def show(result: Any, title: str, out: Console) -> None:
    """Per class, on all, on the tail; then whether to believe it."""
    from doubly.evaluation.summary import key_of

    found, keys = result.summary(), {attack: key_of(result, attack) for attack in result.predictions}
    heads = [label(attack, result) + _less(attack, result) for attack in keys]
    table = _table(f"{title}, % with 95 % intervals", "", "n", *heads)
    for name, row in found["per_class"].items():
        table.add_row(escape(name), str(row["n"]), *(_cell(row[k], row[f"{k}_interval"], 0) for k in keys.values()))
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
        values = (f"{100 * point['accuracy']:.1f} at {point['epsilon']:.3g}" for point in result.curve["points"])
        say(out, f"% under PGD by radius, n = {result.curve['n']}: {', '.join(values)}")
    if result.trust:
        _panel(result.trust, out)


def _less(attack: str, result: Any) -> str:
    """n of an attack that was not run on all samples."""
    n = int((result.predictions[attack] >= 0).sum())
    return "" if n == result.n else f", n = {n}"


def _panel(trust: Any, out: Console) -> None:
    table = Table("check", "verdict", "what was found", title=f"can it be trusted? {trust['verdict']}")
    for line in trust["lines"]:
        style = {"suspicious": "red", "not measured": "dim"}.get(line["verdict"])
        table.add_row(line["name"], line["verdict"], escape(line["text"]), style=style)
    out.print(table)


def show_differences(rows: Iterable[Any], result: Any, title: str, out: Console) -> None:
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
    return Table(*columns, title=escape(title), box=box.SIMPLE_HEAD, pad_edge=False)


def _cell(value: float | None, ends: Any, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} ({100 * ends[0]:.0f}–{100 * ends[1]:.0f})"
