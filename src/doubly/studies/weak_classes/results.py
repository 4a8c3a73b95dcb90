"""What the study of weak classes found: comparisons of paths along class offsets, and of methods on test images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from doubly.evaluation.intervals import tail_accuracy, weakest_interval, wilson
from doubly.evaluation.metrics import Floats, per_class, tail
from doubly.report.frontier import area_above, tail_at
from doubly.studies.weak_classes.measured_job import Measure, Measured, MeasuredJob
from doubly.studies.weak_classes.plan import OURS
from doubly.studies.weak_classes.selection import STATISTICS, paired_difference

MAX_LOSS = 0.005  # of AT's average, where tails are compared along the offsets


def compare_paths(first: Measured, other: Measured) -> dict[str, Any]:
    """Return the points of a path, its tail at a bounded average, and its area above the first path."""
    (averages, tails), path = _path(first), _path(other)
    highest = tail_at(*path, averages[0] - MAX_LOSS)
    area = area_above(path, (averages, tails))
    return {
        "points": path_points(other),
        "tail_at_average": None if np.isnan(highest) else highest,
        "area_above_first": None if np.isnan(area) else area,
    }


def path_points(measured: Measured) -> list[dict[str, Any]]:
    """Return the points of a path, in the form of frontier.json."""
    return [_point(measured, index) for index in range(len(measured.scales))]


def _point(measured: Measured, index: int) -> dict[str, Any]:
    """Return a point of a path with 95 % intervals."""
    row, y = measured.correct[index], measured.y
    weakest = tail(per_class(row, y, int(y.max()) + 1))[1]
    return {
        "scale": measured.scales[index],
        "average": [float(row.mean()), *wilson(int(row.sum()), len(row))],
        "tail": list(weakest_interval(row, y, tail_accuracy, weakest)),
        "worst": STATISTICS["worst"](row, y),
    }


def _path(measured: Measured) -> tuple[Floats, Floats]:
    values = [[STATISTICS[key](row, measured.y) for row in measured.correct] for key in ("average", "tail")]
    return np.array(values[0]), np.array(values[1])


def compare_all_paths(done: Mapping[str, Sequence[MeasuredJob]], measure: Measure) -> list[dict[str, Any]]:
    """Return the path of each network along its offsets, compared with AT of the same seed."""
    base = {job.run.seed: job.read(measure) for job in done.get("at", ())}
    return [
        {"method": method, "seed": job.run.seed, **compare_paths(first, one)}
        for method, jobs in done.items()
        for job in jobs
        if (first := base.get(job.run.seed)) is not None and (one := job.read(measure)) is not None
    ]


def differences(
    done: Mapping[str, Sequence[MeasuredJob]], scales: Mapping[str, float], measure: Measure
) -> list[dict[str, Any]]:
    """Return ours minus every rival, and every method minus AT as trained, each over the seeds that both have."""
    compared = [(OURS, other, scales[other]) for other in done if OURS in done and other != OURS]
    compared += [(method, "at", 0.0) for method in done if "at" in done and (method, scales[method]) != ("at", 0.0)]
    rows = []
    for method, other, scale in dict.fromkeys(compared):
        shared = [job.run.seed for job in done[method] if job.run.seed in [rival.run.seed for rival in done[other]]]
        first, second = (
            read_all([job for job in done[name] if job.run.seed in shared], measure) for name in (method, other)
        )
        for key in ("average", "tail") if shared else ():
            difference = paired_difference(first, second, (scales[method], scale), key)
            about = {"method": method, "other": other, "other_scale": scale, "seeds": shared, "metric": key}
            rows.append(about | difference._asdict())
    return rows


def read_all(jobs: Sequence[MeasuredJob], measure: Measure) -> list[Measured]:
    """Return a measurement of each job that has it."""
    return [one for job in jobs if (one := job.read(measure)) is not None]
