"""Damaged configurations, evaluations, metrics, arrays and results, through every verb that reads them."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.damage import damage_file
from tests.chaos.outcomes import Outcome, judge_call, judge_cli
from tests.chaos.prepared import AUTOATTACK, EVALUATE

import doubly
import doubly.report.pictures

READERS = {  # file -> the calls that read it; DIR is the damaged run, OTHER an intact one
    "evaluated/config.json": (
        "watch DIR --once", "report DIR", "load", "train --config DIR/config.json --dry-run", "compare DIR OTHER",
        "train --resume --output DIR --dry-run", f"evaluate DIR {' '.join(EVALUATE)}", "repair DIR --output new",
        "search --config DIR/config.json --trials 0 --output new", "export DIR --output w.safetensors",
    ),
    "evaluated/evaluation.json": (*("report DIR", "compare DIR OTHER") * 3, "compare OTHER DIR", "watch DIR --once"),
    "evaluated/evaluation.npz": ("report DIR", "compare DIR OTHER", "compare OTHER DIR"),
    "evaluated/gallery.npz": ("report DIR",),
    "evaluated/metrics.jsonl": (*("watch DIR --once", "report DIR") * 4, "train --resume --output DIR"),
    "evaluated/environment.json": ("report DIR", "watch DIR --once", "train --resume --output DIR --dry-run"),
    "repaired/repair.json": ("report DIR", "watch DIR --once", "load", "compare DIR OTHER", "report DIR OTHER"),
    "frontier/comparison.json": ("report DIR", "report OTHER DIR", "frontier OTHER --scales 0 1 --output DIR"),
    "attacked/autoattack": (f"evaluate DIR {' '.join(AUTOATTACK)}",),
}  # fmt: skip
WEIGHTS = (5, 8, 5, 2, 5, 1, 3, 1, 1)
DRAWN = 0.01  # share of the reports whose figures are drawn, which takes seconds


def damaged_files(base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Damage a file of a run, and read it by a verb."""
    draw, draw_figures = random.Random(seed), doubly.report.pictures._draw
    for _ in range(count):
        (name,) = draw.choices(list(READERS), WEIGHTS)
        for left in ("DIR", "new", "out"):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(base / Path(name).parent, "DIR")
        target = Path("DIR") / Path(name).name
        if target.is_dir():
            target = draw.choice(sorted(path for path in target.rglob("*") if path.is_file()))
        note = damage_file(target, draw)
        words = draw.choice(READERS[name]).replace("OTHER", str(base / "evaluated")).split()
        is_drawn = draw.random() < DRAWN
        doubly.report.pictures._draw = draw_figures if is_drawn else _without_figures
        if words == ["load"]:
            yield judge_call(lambda: doubly.load("DIR"), note)[0]
        else:
            output = ["--output", "out"] if words[0] == "report" else []
            yield judge_cli([*words, *output], note)[0]


def _without_figures(wanted: object, stem: Path) -> list[doubly.report.pictures.Picture]:
    return []
