"""Frontiers in numbers, in the report and as a picture."""

import math

import numpy as np
import pytest

from doubly.errors import UsageError
from doubly.report import Report, figures
from doubly.report.frontier import area_above, compare_frontiers, frontiers_of, read_frontier, tail_at
from doubly.rundir import RunDir, write_json

PROTOCOL = {"name": "margin", "n": 100, "seed": 0, "data_sha256": "ab"}


def frontier(points, **protocol):
    rows = [
        {"scale": k / 4, "average": [a, a - 0.05, a + 0.05], "tail": [t, t - 0.1, t + 0.1], "worst": [t, 0.0, 1.0]}
        for k, (a, t) in enumerate(points)
    ]
    return {"schema": 1, "points": rows, "protocol": {**PROTOCOL, **protocol}}


LOW = frontier([(0.5, 0.1), (0.49, 0.2), (0.46, 0.3)])
HIGH = frontier([(0.48, 0.2), (0.47, 0.35), (0.44, 0.4)])


def test_tail_at_an_average_lies_on_the_path():
    averages, tails = np.array([0.5, 0.48, 0.4]), np.array([0.1, 0.2, 0.3])
    assert tail_at(averages, tails, 0.5) == pytest.approx(0.1)
    assert tail_at(averages, tails, 0.49) == pytest.approx(0.15)
    assert tail_at(averages, tails, 0.3) == pytest.approx(0.3)
    assert math.isnan(tail_at(averages, tails, 0.6))
    assert tail_at(averages[::-1], tails[::-1], 0.49) == pytest.approx(0.15)


def test_area_is_that_between_two_straight_paths_and_signed():
    one = np.array([0.5, 0.4]), np.array([0.1, 0.2])
    other = np.array([0.6, 0.3]), np.array([0.1, 0.1])
    assert area_above(one, other) == pytest.approx(0.1 * 0.05, rel=1e-6)
    assert area_above(other, one) == pytest.approx(-0.1 * 0.05, rel=1e-6)
    assert math.isnan(area_above(one, (np.array([0.9, 0.8]), np.array([0.1, 0.1]))))


def test_comparison_is_with_the_first_as_trained():
    rows = compare_frontiers([LOW, HIGH])
    assert rows[0]["lowest_average"] == pytest.approx(0.495)
    assert rows[0]["tail_at_average"] == pytest.approx(0.15) and rows[0]["area_above_first"] == 0
    assert rows[1]["tail_at_average"] is None and rows[1]["area_above_first"] > 0
    assert compare_frontiers([LOW, HIGH], 0.03)[1]["tail_at_average"] == pytest.approx(0.35)


def test_a_report_shows_the_frontiers_of_its_runs(make_run, tmp_path):
    paths = [make_run("digits.imbalanced.at"), make_run("digits.imbalanced.cfol"), make_run("digits.imbalanced.mail")]
    for path, one in zip(paths, [LOW, HIGH, frontier([(0.9, 0.9), (0.8, 0.9)], n=7)], strict=True):
        write_json(RunDir(path).frontier, one)
    report = Report.of(paths)
    assert set(frontiers_of(report.comparisons[0].methods)) == {"AT", "CFOL"}  # another n does not compare
    page = report.write(tmp_path / "report").read_text(encoding="utf-8")
    assert "tail at an average of at least 49.5" in page and "area above AT" in page
    assert (tmp_path / "report" / "figures" / "digits.imbalanced-frontier.png").is_file()
    assert "average accuracy under" in (tmp_path / "report" / "figures" / "digits.imbalanced-frontier.svg").read_text()


def test_runs_without_a_frontier_have_neither_table_nor_picture(make_run, tmp_path):
    report = Report.of([make_run()])
    assert frontiers_of(report.comparisons[0].methods) == {} and not figures.frontier({}, tmp_path / "none")


@pytest.mark.parametrize(
    "damage",
    [{"schema": 9}, {"points": []}, {"points": [{"scale": 0}]}, {"protocol": None}, {"points": LOW["points"][1:]}],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    write_json(RunDir(tmp_path).frontier, {**LOW, **damage})
    with pytest.raises(UsageError, match="is damaged or of another version"):
        read_frontier(RunDir(tmp_path).frontier)
