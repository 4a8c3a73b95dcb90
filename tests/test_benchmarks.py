"""The page of the benchmarks follows from what was measured: aims, exponents, and not one number by hand."""

import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from doubly.rundir import read_json

ROOT = Path(__file__).parents[1]
CONDITIONS = {"rounds": 3, "quick": False, "machine": "a machine", "cores": 2, "threads": 2, "torch": "2", "date": "d"}
CONDITIONS |= {"took": 1.0, "load": 0.5, "commit": "c"}


@pytest.fixture
def of_page(monkeypatch):
    """Modules of benchmarks/, which are scripts and no package."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module


def result(outcome=None, **more):
    return {"title": "A part", "conditions": CONDITIONS, "outcome": outcome and asdict(outcome), **more}


def test_an_aim_is_judged_by_the_median(of_page):
    line = of_page("lines").Line
    assert line("a", (0.9, 1.0, 9.0), aim=1.0).verdict == "met"
    assert line("a", (0.1, 1.1, 1.2), aim=1.0).verdict == "MISSED"
    assert line("a", (1.7, 1.9, 1.9), aim=1.8, at_least=True).verdict == "met"
    assert line("a", (1.7, 1.7, 9.0), aim=1.8, at_least=True).verdict == "MISSED"
    assert line("a", (1.0,)).verdict == "" and line("a", aim=1.0).verdict == "not measured"


def test_a_ratio_is_taken_round_by_round(of_page):
    lines = of_page("lines")
    seconds = {"fast": [1.0, 3.0, 2.0], "slow": [2.0, 3.0, 8.0]}
    assert lines.ratio(seconds, "fast", "slow", 0.5).values == (0.5, 1.0, 0.25)
    missing = lines.ratio(seconds, "gone", "slow", 0.5, {"gone": "not installed"})
    assert missing.note == "not installed" and missing.verdict == "not measured"


def test_each_round_begins_with_another_contestant(of_page):
    order = []
    racing = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    assert of_page("lines").taking_turns(racing, 2) == {name: [1.0, 1.0] for name in "abc"}
    assert "".join(order) == "abcbca"


def test_the_exponent_is_that_of_the_upper_half(of_page):
    exponent = of_page("growth_figure").exponent
    x = [1, 2, 4, 8, 16, 32]
    assert exponent(x, [3.0 * v**1.7 for v in x]) == pytest.approx(1.7)
    assert exponent(x, [5.0, 5.0, 5.0, *(v**2 for v in x[3:])]) == pytest.approx(2.0)
    assert exponent(x, [4.0] * 6) == pytest.approx(0.0, abs=1e-9)


def test_the_page_has_every_line_and_says_what_is_missing(of_page, tmp_path):
    lines, page = of_page("lines"), of_page("page")
    measured = [
        lines.Line("fast / slow", (0.4, 0.45, 0.7), 0.5),
        lines.Line("slow / fast", (2.0,), 0.5),
        lines.Line("gone / slow", aim=0.5, note="not | installed"),
        lines.answer("it works", True),
    ]
    results = {"one": result(lines.Outcome(measured, "batch 8")), "two": result(problem="it broke")}
    page.write(results, tmp_path / "page.md")
    assert (tmp_path / "page" / "ratios.png").stat().st_size > 5_000
    text = (tmp_path / "page.md").read_text()
    assert "**2 of 4 aims met.** Missed: slow / fast (A part). Not measured: gone / slow" in text
    assert "| fast / slow | 0.450 | 0.400 to 0.700 | ≤ 0.5 | met |" in text
    assert "| slow / fast | 2.000 |  | ≤ 0.5 | MISSED |" in text
    assert "| gone / slow |  |  | ≤ 0.5 | not measured: not \\| installed |" in text
    assert "**Broke off:** it broke" in text and "| it works | yes |  | yes | met |" in text
    quick = {"one": {**results["one"], "conditions": {**CONDITIONS, "quick": True}}}
    assert "**0 of 1 aims met.**" in page.page(quick, "page") and "quick: not judged" in page.page(quick, "page")


def test_growth_is_drawn_and_tabled(of_page, tmp_path):
    x = [8, 16, 32, 64]
    curves = [
        {"along": "batch", "who": who, "quantity": quantity, "x": x, "y": list(np.power(x, power))}
        for who, power in (("AT", 1.0), ("DONE exact", 0.5))
        for quantity in ("seconds", "MiB")
    ]
    outcome = of_page("lines").Outcome([], curves=curves)
    of_page("page").write({"growth": result(outcome)}, tmp_path / "page.md")
    assert (tmp_path / "page" / "growth-seconds.png").stat().st_size > 10_000
    assert "| batch | 8 to 64 | 16 | DONE exact | 0.50 | 0.50 |" in (tmp_path / "page.md").read_text()


def test_the_stored_page_is_that_of_the_stored_results(of_page):
    stored = ROOT / "docs" / "benchmarks.md"
    page = of_page("page").page(read_json(ROOT / "docs" / "benchmarks" / "results.json"), "benchmarks")
    assert stored.read_text(encoding="utf-8") == page


def test_the_command_measures_one_part(tmp_path):
    words = ["--quick", "--only", "imports", "--rounds", "1", "--output", str(tmp_path / "page.md")]
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    values = read_json(tmp_path / "page" / "results.json")["imports"]
    assert "problem" not in values and len(values["outcome"]["lines"]) == 9
    assert "| `doubly --help` without importing torch | yes |" in (tmp_path / "page.md").read_text()


def test_every_part_can_be_imported(of_page):
    for name in {part.module or part.name for part in of_page("run").PARTS}:
        assert callable(of_page(name).measure), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning:foolbox")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:scipy")
def test_a_step_and_an_attack_are_measured(of_page):
    """Tiny, and on one network each: every contestant takes part, and AT takes the passes of a bare loop."""
    settings = of_page("lines").Settings("narrow_resnet", rounds=1, quick=True)
    lines = {line.what: line for line in of_page("step_cost").measure(settings).lines}
    assert lines["AT takes the passes of the bare loop"].verdict == "met"
    assert {"AT / bare loop", "AT / official loop", "DONE exact / AT", "DONE first_order / AT"} < lines.keys()
    assert of_page("pgd").measure(settings).lines[0].what == "ours / foolbox"
