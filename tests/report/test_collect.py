import json
import math

import pytest

from doubly.errors import UsageError
from doubly.report.collect import collect, compare, mean_sd
from doubly.rundir import read_json, read_metrics, write_json


def change(path, file="evaluation.json", **fields):
    write_json(path / file, read_json(path / file) | fields)
    return path


def with_autoattack(path, n=200, accuracy=0.4):
    settings = {"label": "RA-AA", "complete": True, "n": n, "epsilon": 0.15, "parts": ["apgd-ce"], "reference": "x 1"}
    return change(path, ra_aa=accuracy, autoattack=settings)


def test_a_folder_and_its_runs_are_the_same(make_run):
    runs = [make_run(seed=seed) for seed in (0, 1)]
    by_folder, by_name = collect([runs[0].parent]), collect([runs[0], str(runs[1]), runs[0] / "."])
    assert [r.path.name for r in by_folder] == [r.path.name for r in by_name] == [path.name for path in runs]
    assert by_folder[0].seconds == 12.0


def test_folders_without_runs_and_broken_files_are_refused(make_run, tmp_path):
    (tmp_path / "empty").mkdir()
    for paths in ([tmp_path / "empty"], [tmp_path / "missing"], [], [make_run(), tmp_path / "empty"]):
        with pytest.raises(UsageError, match="run"):
            collect(paths)
    for file, content, message in [
        ("evaluation.json", None, "doubly evaluate"),
        ("evaluation.json", {"sa": 1}, "lacks ra_pgd"),
        ("evaluation.json", {"tail": {"share": 0.2}}, "another --tail-share"),
        ("evaluation.json", [], "list"),
        ("config.json", {"seed": 0}, "recipe"),
        ("config.json", {"name": "x.at", "seed": "x"}, r"config\.json"),
    ]:
        path = make_run(epochs=0)
        (path / file).unlink()
        if content is not None:
            write_json(path / file, content)
        with pytest.raises(UsageError, match=message):
            collect([path])


def test_fields_of_another_type_and_unknown_schemas_are_refused(make_run):
    for key, value, message in [
        ("schema", 99, "schema 99"),
        ("ra_pgd", None, "ra_pgd is None"),
        ("ra_margin", "x", "ra_margin is 'x'"),
        ("worst_class", "cat", "worst_class is 'cat'"),
        ("worst_class", {"name": "cat"}, "worst_class does not hold"),
        ("per_class", ["cat"], "per_class is"),
        ("per_class", {"cat": 1}, "per_class does not hold"),
        ("protocol", "PGD", "protocol is"),
        ("curve", [], "curve is"),
        ("autoattack", None, "autoattack is"),
        ("tail", [], "tail is"),
        ("tail", {"share": "x", "ra_tail_30": 1}, "share of the tail is 'x'"),
        ("tail", {"pgd": 3}, "tail under 'pgd' is 3"),
        ("tail", {"pgd": {"value": "x"}}, "tail under 'pgd' is 'x'"),
        ("tail", {"pgd": {"classes": [1]}}, "classes of the tail under 'pgd'"),
        ("ra_pgd", [0.5], "ra_pgd is"),
        ("ra_pgd", True, "ra_pgd is True"),
        ("ra_pgd", 10**18, "ra_pgd is"),
        ("n", -1, "n is -1"),
        ("epoch", "last", "epoch is"),
        ("schema", [], "schema"),
        ("confusion", {"pgd": 1}, "confusion under 'pgd'"),
        ("confusion", {"pgd": [[1, 2]]}, "confusion under 'pgd'"),
        ("confusion", {"pgd": [["x"] * 10] * 10}, "confusion under 'pgd'"),
        ("curve", {"points": [{"epsilon": "x"}]}, "ε of a point"),
        ("weights", [3], "weights is"),
        ("weights", [{"r": 1.0, "quantiles_per_class": {"0": [1]}}], "quantiles"),
        ("ra_tail_30_classes", [[]], "ra_tail_30_classes is"),
        ("protocol", {"attack": {"threat": {"radius": "x"}}}, "protocol.attack.threat.radius"),
        ("trust", {"lines": 3}, "trust.lines is 3"),
    ]:
        with pytest.raises(UsageError, match=rf"evaluation\.json .*{message}"):
            collect([change(make_run(epochs=0), **{key: value})])
    for row in (
        '{"loss": 1.0}',
        '{"epoch": "1"}',
        '{"epoch": true}',
        f'{{"epoch": 0, "loss": {"9" * 400}}}',
        '{"epoch": 0, "validation": {"sa": "x"}}',
    ):
        path = make_run(epochs=0)
        (path / "metrics.jsonl").write_text(f"{row}\n")
        with pytest.raises(UsageError, match="line 1"):
            collect([path])
    for row in ('{"loss": 1.0}', '{"epoch": 0, "validation": null}', '{"epoch": 0, "seconds": "x"}'):
        path = make_run(epochs=0)
        (path / "metrics.jsonl").write_text(f"{row}\n")
        with pytest.raises(UsageError, match="line 1"):
            collect([path])


def test_runs_that_were_measured_or_trained_on_other_data_are_never_mixed(make_run):
    other = {"attack": "PGD", "steps": 10}
    runs = [
        make_run(),
        make_run(seed=1, protocol=other),
        make_run(seed=2, n=300),
        make_run("digits.at"),
        make_run(classes=5),
    ]
    comparisons = compare(collect(runs))
    assert [len(comparison.runs) for comparison in comparisons] == [1] * 5
    assert {"images", "classes", "attack.threat.radius"} < set(comparisons[0].differences)
    assert comparisons[3].differences == ()  # the only one of its setting
    by_data = [make_run("a.at", data={"imbalance": {"ratio": ratio}, "root": str(ratio)}) for ratio in (0.2, 0.7)]
    assert [c.differences for c in compare(collect(by_data))] == [("data.imbalance.ratio",)] * 2
    by_age = [make_run("a.at", data={"root": "x"}), make_run("a.mail", data={"driver_share": None})]
    assert len(compare(collect(by_age))) == 1  # a setting that an older version did not have
    by_tail = [make_run("b.at"), change(make_run("b.mail"), tail={"share": 0.3, "rounding": "floor"})]
    assert [c.differences for c in compare(collect(by_tail))] == [("tail.rounding",)] * 2


def test_different_autoattacks_are_never_mixed_but_a_run_may_lack_it(make_run):
    alike = [with_autoattack(make_run()), with_autoattack(make_run(seed=1)), make_run("digits.imbalanced.done_pgd")]
    assert [len(comparison.runs) for comparison in compare(collect(alike))] == [3]
    other = with_autoattack(make_run("digits.imbalanced.trades"), n=100)
    comparisons = compare(collect([*alike, other]))
    assert [len(comparison.runs) for comparison in comparisons] == [2, 1, 1]
    assert "autoattack.n" in comparisons[0].differences


def test_seeds_share_a_row_and_the_baseline_heads_it(make_run):
    for name in ("done_pgd", "at", "trades"):
        for seed in (1, 0):
            path = make_run(f"digits.imbalanced.{name}", seed=seed)
    (comparison,) = compare(collect([path.parent]))
    assert list(comparison.methods) == ["AT", "DONE-PGD", "TRADES"]
    assert [[run.seed for run in runs] for runs in comparison.methods.values()] == [[0, 1]] * 3


def test_other_settings_of_one_recipe_are_another_row(make_run):
    runs = [
        make_run(method={"cap": 5.0}),
        make_run(method={"cap": None}),
        make_run(seed=1, method={"cap": 5.0}, device="x"),
    ]
    (comparison,) = compare(collect(runs))
    assert {label: len(runs) for label, runs in comparison.methods.items()} == {"AT": 2, "AT, cap None": 1}


def test_label_and_table_come_from_the_config(make_run):
    runs = [
        make_run("cifar10.at"),
        make_run("cifar10.fast_at", label="Fast-AT", table="fast"),
        make_run("cifar10.done_fast", label="", table="fast"),
        make_run("cifar10.small.fast_at", label="Fast-AT", table="fast"),
    ]
    assert {c.setting: list(c.methods) for c in compare(collect(runs))} == {
        "cifar10": ["AT"],
        "cifar10.fast": ["Fast-AT", "DONE-FAST"],
        "cifar10.fast.small": ["Fast-AT"],
    }


def test_costs_ignore_pauses_missing_values_and_a_half_written_line(make_run):
    path = make_run(epochs=3)
    costs = [
        {"seconds": 2.0, "passes_forward": 4.0, "passes_backward": 4.0, "peak_memory": 2e6},
        {"seconds": 900.0, "passes_forward": 4.0, "passes_backward": 8.0, "peak_memory": 3e6},
        {"seconds": 2.0},
    ]
    rows = [row | cost for row, cost in zip(read_metrics(path / "metrics.jsonl"), costs, strict=True)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"epoch": 3, "lo')
    (run,) = collect([path])
    assert run.seconds == 6.0 and run.passes == (4.0, 6.0) and run.peak_memory == 3e6 and len(run.metrics) == 3
    (path / "metrics.jsonl").unlink()
    (run,) = collect([path])
    assert math.isnan(run.seconds) and math.isnan(run.passes[0]) and math.isnan(run.peak_memory)


def test_the_deviation_is_that_of_a_sample():
    assert mean_sd([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert mean_sd([1.0]) == (1.0, None)
