"""The study of weak classes as Markdown and a picture, from results.json and ablation.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from doubly.report.figures import frontier
from doubly.report.study import markdown_lines
from doubly.text import format_mean_sd, method_label

FORMS = {0.0: ("as_trained", "as trained"), 1.0: ("repaired", "repaired")}
COLUMNS = {"clean": "SA", "average": "average", "tail": "tail-30", "worst": "worst class"}


def study_page(results: Mapping[str, Any]) -> str:
    """Return the page of the study.

    Args:
        results: The contents of results.json, as `doubly reproduce weak_classes` writes them.
    """
    parts = [_state(results)]
    if results["part_b"]:
        measure = results["measures"]["selection"]
        parts += [
            f"On part B, n = {measure['n']:,}, attack {measure['attack']}: average / tail-30 / worst class, in %.\n",
            _table(
                ("method", "seed", *(name for _, name in FORMS.values())),
                [(method_label(row["method"]), str(row["seed"]), *_forms(row)) for row in results["part_b"]],
            ),
            "",
        ]
    if results["rows"]:
        parts += [
            "### Each method in the form chosen on part B\n",
            _table(("method", "form", "seeds", *COLUMNS.values()), [_chosen(row) for row in results["rows"]]),
            f"\nPercent, mean ± sd over seeds, {_protocol(results)}; *repaired* has class offsets fitted on part A.\n",
            "### As trained and repaired\n",
            _table(
                ("method", *(f"{label}, {name}" for _, name in FORMS.values() for label in ("average", "tail-30"))),
                [
                    (
                        method_label(row["method"]),
                        *(_cell(row[key][c]) for key, _ in FORMS.values() for c in ("average", "tail")),
                    )
                    for row in results["rows"]
                ],
            ),
        ]
    if results["differences"]:
        parts += [
            "\n### Differences, with 95 % intervals over images and seeds\n",
            _differences(results["differences"]),
        ]
    if results["paths"]:
        parts += [
            "\n### Along the class offsets\n",
            "Margin PGD-20. *Tail*: the highest along the path where the average is at most 0.5 points below that of "
            "AT as trained with the same seed. *Area*: above AT's path, in points squared.\n",
            _table(
                ("method", "seed", "tail", "area"),
                [(method_label(p["method"]), str(p["seed"]), *_path_cells(p)) for p in results["paths"]],
            ),
        ]
    if results["trials"]:
        parts += ["\n### What the trials chose\n", _trials(results["trials"])]
    return "\n".join(parts) + "\n"


def ablation_page(results: Mapping[str, Any]) -> str:
    """Return the table of the ablation.

    Args:
        results: The contents of ablation.json, as `doubly reproduce ablation` writes them.
    """
    rows = []
    for row in results["rows"]:
        ends = [point for point in row["points"] if point["scale"] in FORMS]
        cells = [f"{100 * point[key][0]:.1f}" for point in ends for key in ("average", "tail")]
        rows.append((row["variant"], *cells, *_path_cells(row)))
    header = (
        "variant",
        "average",
        "tail-30",
        "repaired: average",
        "tail-30",
        "tail at AT's average − 0.5",
        "area above AT",
    )
    note = f"Percent, one seed, {results['attack']} attack, n = {results['n']:,} held-out images of part B."
    return f"{_table(header, rows)}\n\n{note}\n"


def draw_paths(results: Mapping[str, Any], path: Path) -> bool:
    """Draw average against tail along the class offsets of every network.

    Args:
        results: The contents of results.json.
        path: Path of the figure, without ending.
    """
    measure = results["measures"]["path"]
    protocol = {**results["path_protocol"], "name": measure["attack"], "n": measure["n"]}
    by_method: dict[str, list[dict[str, Any]]] = {}
    for one in results["paths"]:
        by_method.setdefault(method_label(one["method"]), []).append({**one, "protocol": protocol})
    return frontier(by_method, path)


def _forms(row: Mapping[str, Any]) -> list[str]:
    """Return average, tail and worst class of a network as trained and repaired."""
    points = [(*(point[key][0] for key in ("average", "tail")), point["worst"]) for point in row["points"]]
    return [" / ".join(f"{100 * value:.1f}" for value in values) for values in points]


def _state(results: Mapping[str, Any]) -> str:
    seeds = {row["method"]: len(row["seeds"]) for row in results["rows"]}
    missing = [method_label(m) for m in results["methods"] if m not in seeds]
    done = ", ".join(f"{method_label(m)} ({n})" for m, n in seeds.items()) or "none"
    unfinished = f" Not finished: {', '.join(missing)}." if missing else ""
    return f"Methods with finished networks (seeds): {done}.{unfinished}\n"


def _protocol(results: Mapping[str, Any]) -> str:
    measure = results["measures"]["test"]
    return f"n = {measure['n']:,} test images from number {measure['first']:,} on, attack {measure['attack']}"


def _chosen(row: Mapping[str, Any]) -> tuple[str, ...]:
    key, name = FORMS[row["scale"]]
    seeds = ", ".join(map(str, row["seeds"]))
    return method_label(row["method"]), name, seeds, *(_cell(row[key][column]) for column in COLUMNS)


def _cell(value: Sequence[float | None]) -> str:
    mean, sd = value
    assert mean is not None
    return format_mean_sd(100 * mean, None if sd is None else 100 * sd)


def _path_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    highest, area = row["tail_at_average"], row["area_above_first"]
    return "–" if highest is None else f"{100 * highest:.1f}", "–" if area is None else f"{10_000 * area:+.1f}"


def _differences(rows: Sequence[Mapping[str, Any]]) -> str:
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        other = f"{method_label(row['other'])} {FORMS[row['other_scale']][1]}"
        key = method_label(row["method"]), other, str(len(row["seeds"]))
        text = f"{100 * row['value']:+.1f} [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}]"
        cells.setdefault(key, {})[row["metric"]] = text
    return _table(
        ("method", "minus", "seeds", "average", "tail-30"), [(*k, v["average"], v["tail"]) for k, v in cells.items()]
    )


def _trials(trials: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for row in trials:
        for number, settings in enumerate(row["settings"]):
            text = ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in settings.items()) or "the recipe"
            forms = [c for c in row["candidates"] if c["trial"] == number]
            cells = [f"{100 * c[key]:.1f}" for c in forms for key in ("average", "tail")]
            mark = "chosen" if number == row["winner"] else ""
            rows.append((method_label(row["method"]), text, *cells, mark))
    return _table(("method", "settings", "average", "tail-30", "repaired: average", "tail-30", ""), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_lines(header, rows, texts=range(len(header)))
