import json
import math
import subprocess
import sys

import pytest

from doubly.errors import UsageError
from doubly.report.collect import collect, compare, mean_sd
from doubly.rundir import read_json, read_metrics, write_json


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


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("evaluation.json", "ra_pgd", None),
        ("evaluation.json", "worst_class", "cat"),
        ("evaluation.json", "worst_class", {"name": "cat"}),
        ("evaluation.json", "per_class", ["cat"]),
        ("evaluation.json", "per_class", {"cat": 1}),
        ("evaluation.json", "protocol", "PGD"),
        ("evaluation.json", "curve", []),
        ("evaluation.json", "autoattack", None),
        ("config.json", "seed", "x"),
    ],
)
def test_a_field_of_another_kind_is_refused_in_one_sentence(make_run, file, key, value):
    path = make_run()
    write_json(path / file, read_json(path / file) | {key: value})
    with pytest.raises(UsageError, match=file):
        collect([path])


@pytest.mark.parametrize("row", ['{"loss": 1.0}', '{"epoch": 0, "validation": null}', '{"epoch": 0, "seconds": "x"}'])
def test_a_row_of_metrics_of_another_kind_is_refused(make_run, row):
    path = make_run(epochs=0)
    (path / "metrics.jsonl").write_text(f"{row}\n")
    with pytest.raises(UsageError, match="line 1"):
        collect([path])


def test_other_training_data_and_another_tail_are_kept_apart(make_run):
    runs = [make_run(data={"imbalance": {"ratio": ratio}, "root": str(ratio)}) for ratio in (0.2, 0.7)]
    assert [c.apart for c in compare(collect(runs))] == [("data.imbalance.ratio",)] * 2
    tailed = make_run("digits.at"), make_run("digits.mail")
    tail = {"share": 0.3, "rounding": "floor"}
    write_json(tailed[1] / "evaluation.json", read_json(tailed[1] / "evaluation.json") | {"tail": tail})
    assert [c.apart for c in compare(collect(tailed))] == [("tail.rounding",)] * 2


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
    found = compare(collect(runs))
    assert [len(comparison.runs) for comparison in found] == [1] * 5
    assert {"images", "classes", "attack.threat.radius"} < set(found[0].apart)
    assert found[3].apart == ()  # alone in its setting


def test_another_setting_of_one_recipe_is_another_row(make_run):
    runs = [
        make_run(method={"cap": 5.0}),
        make_run(method={"cap": None}),
        make_run(seed=1, method={"cap": 5.0}, device="x"),
    ]
    (comparison,) = compare(collect(runs))
    assert {label: len(runs) for label, runs in comparison.methods.items()} == {"AT": 2, "AT, cap None": 1}


def with_autoattack(path, n=200, accuracy=0.4):
    about = {"label": "RA-AA", "complete": True, "n": n, "epsilon": 0.15, "parts": ["apgd-ce"], "reference": "x 1"}
    write_json(path / "evaluation.json", read_json(path / "evaluation.json") | {"ra_aa": accuracy, "autoattack": about})
    return path


def test_two_ways_of_autoattack_are_never_mixed_but_a_run_may_lack_it(make_run):
    alike = [with_autoattack(make_run()), with_autoattack(make_run(seed=1)), make_run("digits.imbalanced.done_pgd")]
    assert [len(comparison.runs) for comparison in compare(collect(alike))] == [3]
    other = with_autoattack(make_run("digits.imbalanced.trades"), n=100)
    apart = compare(collect([*alike, other]))
    assert [len(comparison.runs) for comparison in apart] == [2, 1, 1]
    assert "autoattack.n" in apart[0].apart


def test_the_fast_setting_has_a_table_of_its_own(make_run):
    runs = [make_run("cifar10.at"), make_run("cifar10.fast_at"), make_run("cifar10.done_fast")]
    assert {c.setting: list(c.methods) for c in compare(collect(runs))} == {
        "cifar10": ["AT"],
        "cifar10.fast": ["Fast-AT", "DONE-FAST"],
    }


def test_a_pause_does_not_count_as_training(make_run):
    path = make_run(epochs=3)
    metrics = path / "metrics.jsonl"
    rows = [row | cost for row, cost in zip(read_metrics(metrics), COST, strict=True)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = collect([path])
    assert run.seconds == 6.0 and run.passes == (4.0, 6.0) and run.peak_memory == 3e6


COST = [
    {"seconds": 2.0, "passes_forward": 4.0, "passes_backward": 4.0, "peak_memory": 2e6},
    {"seconds": 900.0, "passes_forward": 4.0, "passes_backward": 8.0, "peak_memory": 3e6},
    {"seconds": 2.0},
]


def test_the_deviation_is_that_of_a_sample():
    assert mean_sd([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert mean_sd([1.0]) == (1.0, None)


def test_the_report_does_not_import_torch():
    code = "import sys, doubly.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
