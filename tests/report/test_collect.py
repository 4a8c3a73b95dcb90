import math
import subprocess
import sys

import pytest

from doubly.errors import UsageError
from doubly.report.collect import collect, compare, mean_sd
from doubly.rundir import read_json, write_json


def test_a_folder_and_its_runs_are_the_same(make_run):
    runs = [make_run(seed=seed) for seed in (0, 1)]
    by_folder, by_name = collect([runs[0].parent]), collect([runs[0], str(runs[1]), runs[0] / "."])
    assert [r.path.name for r in by_folder] == [r.path.name for r in by_name] == [path.name for path in runs]
    assert by_folder[0].seconds == 12.0


def test_what_is_no_run_is_refused(make_run, tmp_path):
    (tmp_path / "empty").mkdir()
    for paths in ([tmp_path / "empty"], [tmp_path / "missing"], [], [make_run(), tmp_path / "empty"]):
        with pytest.raises(UsageError, match="run"):
            collect(paths)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("evaluation.json", None, "doubly evaluate"),
        ("evaluation.json", {"sa": 1}, "lacks ra_pgd"),
        ("evaluation.json", [], "list"),
        ("config.json", {"seed": 0}, "recipe"),
    ],
)
def test_a_broken_run_is_named(make_run, file, content, message):
    path = make_run()
    (path / file).unlink()
    if content is not None:
        write_json(path / file, content)
    with pytest.raises(UsageError, match=message):
        collect([path])


def test_an_unknown_schema_is_refused(make_run):
    path = make_run()
    write_json(path / "evaluation.json", read_json(path / "evaluation.json") | {"schema": 99})
    with pytest.raises(UsageError, match="schema 99"):
        collect([path])


def test_a_half_written_metrics_line_costs_only_itself(make_run):
    path = make_run()
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 6, "lo')
    assert len(collect([path])[0].metrics) == 6


def test_a_run_without_metrics_has_no_seconds(make_run):
    path = make_run()
    (path / "metrics.jsonl").unlink()
    assert math.isnan(collect([path])[0].seconds)


def test_seeds_share_a_row_and_the_baseline_heads_it(make_run):
    for name in ("done_pgd", "at", "trades"):
        for seed in (1, 0):
            path = make_run(f"digits.imbalanced.{name}", seed=seed)
    (comparison,) = compare(collect([path.parent]))
    assert list(comparison.methods) == ["AT", "DONE-PGD", "TRADES"]
    assert [[run.seed for run in runs] for runs in comparison.methods.values()] == [[0, 1]] * 3


def test_what_was_measured_differently_is_never_mixed(make_run):
    other = {"attack": "PGD", "steps": 10}
    runs = [
        make_run(),
        make_run(seed=1, protocol=other),
        make_run(seed=2, n=300),
        make_run("digits.at"),
        make_run(classes=5),
    ]
    assert [len(comparison.runs) for comparison in compare(collect(runs))] == [1] * 5


def test_another_setting_of_one_recipe_is_another_row(make_run):
    runs = [
        make_run(method={"cap": 5.0}),
        make_run(method={"cap": None}),
        make_run(seed=1, method={"cap": 5.0}, device="x"),
    ]
    (comparison,) = compare(collect(runs))
    assert {label: len(runs) for label, runs in comparison.methods.items()} == {"AT": 2, "AT, cap None": 1}


def test_the_deviation_is_that_of_a_sample():
    assert mean_sd([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert mean_sd([1.0]) == (1.0, None)


def test_the_report_does_not_import_torch():
    code = "import sys, doubly.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
