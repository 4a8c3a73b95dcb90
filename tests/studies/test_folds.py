"""Rows of a table over folds, from files with known predictions."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from doubly.data import Digits
from doubly.evaluation.intervals import bootstrap_difference
from doubly.recipes.digits import digits
from doubly.rundir import RunDir, append_metrics, write_json
from doubly.studies import folds
from doubly.studies.folds import METRIC_KEYS, StudyRow, compare_rows, summarize_row

IMAGES = 400
LABELS = np.arange(IMAGES) % 10
ROWS = [StudyRow(table, label, digits("at", True)) for table in ("one", "two") for label in ("at", "done a", "done b")]


def correct(row):
    """For each image whether it is right, clean and under PGD; another pattern in each row."""
    draw = np.random.default_rng(ROWS.index(row))
    clean = draw.random(IMAGES) < 0.9 - 0.03 * ROWS.index(row)
    return {"clean": clean, "pgd": clean & (draw.random(IMAGES) < 0.2 + 0.05 * LABELS)}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder of a study with two folds, whose files are written by hand."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folds, "FOLDS", 2)
        patch.setattr(folds, "bootstrap_difference", partial(bootstrap_difference, resamples=50))
        for row in ROWS:
            for fold, job in enumerate(row.jobs(folder)):
                write_fold(row, fold, RunDir(job.output))
        yield folder


def write_fold(row, fold, files):
    files.path.mkdir(parents=True)
    ids = np.random.default_rng(0).permutation(IMAGES)[fold::2]
    predictions = {name: np.where(right, LABELS, (LABELS + 1) % 10)[ids] for name, right in correct(row).items()}
    np.savez(files.predictions, ids=ids, y=LABELS[ids], **predictions)
    worst = {"worst_class": {"ra_pgd": 0.01 * fold}, "protocol": {"seed": 0, "data_sha256": str(fold)}}
    write_json(files.evaluation, {**dict.fromkeys(METRIC_KEYS, 0.1 * fold), **worst})
    for epoch in range(2):
        append_metrics(files, {"epoch": epoch, "seconds": 1.5, "alarms": [f"alarm {fold}"] if epoch else []})


def tail(right):
    return float(np.mean(sorted(right[k == LABELS].mean() for k in range(10))[:3]))


def test_a_row_has_a_job_per_fold_that_tests_other_images():
    jobs = StudyRow("a table", "a label", digits("at", True)).jobs(Path("study"))
    assert [job.output for job in jobs] == [Path(f"study/a_table/a_label/fold-{fold}") for fold in range(5)]
    assert [job.run.data.source for job in jobs] == [Digits(fold, 5) for fold in range(5)]
    assert [job.run.seed for job in jobs] == list(range(5)) and all(job.evaluate for job in jobs)
    splits = [job.run.data.source.load() for job in jobs]
    assert sorted(id for part in splits for id in part.test.ids.tolist()) == list(range(1797))
    assert all(sorted(part.train.ids.tolist() + part.test.ids.tolist()) == list(range(1797)) for part in splits)


def test_a_summary_has_the_folds_and_all_images_pooled(output):
    for row in ROWS:
        summary, right = summarize_row(row, output, {}), correct(row)["pgd"]
        assert (summary["table"], summary["label"], summary["failed"]) == (row.table, row.label, [])
        assert summary["n"] == IMAGES and summary["protocol"] == {"seed": 0}
        assert summary["per_fold"] == {key: [0.0, 0.1] for key in METRIC_KEYS} and summary["worst_per_fold"] == [
            0.0,
            0.01,
        ]
        assert summary["seconds"] == [3.0, 3.0] and summary["alarms"] == [["alarm 0"], ["alarm 1"]]
        assert summary["pooled_tail"] == pytest.approx(tail(right))
        assert summary["pooled_per_class"] == pytest.approx([right[k == LABELS].mean() for k in range(10)])


def test_rows_are_compared_with_the_first_of_their_table_on_the_same_images(output):
    differences = {(d["table"], d["label"], d["metric"]): d for d in compare_rows(ROWS, output, {})}
    assert len(differences) == 4 * 3
    for row in ROWS:
        base = correct(ROWS[0] if row.table == "one" else ROWS[3])
        if row.label == "at":
            continue
        right = correct(row)
        expected = {
            "SA": right["clean"].mean() - base["clean"].mean(),
            "RA-PGD": right["pgd"].mean() - base["pgd"].mean(),
            "RA-Tail-30": tail(right["pgd"]) - tail(base["pgd"]),
        }
        for metric, value in expected.items():
            assert differences[row.table, row.label, metric]["value"] == pytest.approx(value, abs=1e-12)
        interval = bootstrap_difference(right["pgd"], base["pgd"], LABELS, lambda right, y: right.mean(), resamples=50)
        ends = [differences[row.table, row.label, "RA-PGD"][key] for key in ("low", "high")]
        assert ends == pytest.approx(interval[1:], abs=1e-12)


def test_a_failed_row_has_no_numbers_and_is_not_compared(output):
    failures = {ROWS[1].jobs(output)[0].output: "the losses: 3 of 3 values are NaN or infinite"}
    failed = {"table": "one", "label": "done a", "failed": ["the losses: 3 of 3 values are NaN or infinite"]}
    assert summarize_row(ROWS[1], output, failures) == failed
    assert {d["label"] for d in compare_rows(ROWS[:3], output, failures)} == {"done b"}
    assert compare_rows(ROWS[:3], output, {ROWS[0].jobs(output)[1].output: "gone"}) == []
