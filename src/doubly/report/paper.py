"""The tables of the paper: the settings side by side in each, and the numbers printed there.

A printed number is shown beside ours only where the setting is the paper's: network, epochs, batch size, attack and
images. The paper gives no deviations and does not say over how many runs it averages.
"""

from collections.abc import Mapping
from typing import Any

from doubly.metric_names import METRICS
from doubly.report.protocol import flatten
from doubly.report.run_result import RunResult

COLUMNS = tuple(key for key, metric in METRICS.items() if metric.is_main)
# Number of the table -> (title, setting -> name of its columns).
TABLES: dict[int, tuple[str, dict[str, str]]] = {
    1: ("CIFAR-10", {"cifar10": "balanced", "cifar10.imbalanced": "imbalanced"}),
    2: ("SVHN", {"svhn": "balanced", "svhn.imbalanced": "imbalanced"}),
    3: ("STL-10 and GTSRB", {"stl10": "STL-10", "gtsrb": "GTSRB"}),
    4: ("CIFAR-10, fast setting", {"cifar10.fast": "fast"}),
}
# Setting -> label of the method -> the numbers of `COLUMNS` in percent.
PRINTED: dict[str, dict[str, tuple[float, ...]]] = {
    "cifar10": {
        "AT": (82.1, 49.29, 28.35, 45.22),
        "FAT": (86.21, 46.59, 27.12, 43.71),
        "WMMR": (81.6, 49.53, 31.24, 40.9),
        "MAIL": (83.47, 55.12, 37.30, 44.08),
        "GAIRAT": (83.22, 54.81, 37.45, 41.10),
        "DONE-GD": (82.91, 57.65, 40.13, 45.58),
        "DONE-PGD": (81.68, 58.71, 40.27, 44.41),
        "DONE-ADAM": (82.25, 58.51, 40.36, 44.20),
    },
    "cifar10.imbalanced": {
        "AT": (69.74, 42.37, 6.25, 39.55),
        "MAIL": (72.01, 45.64, 9.8, 37.17),
        "GAIRAT": (73.87, 45.18, 16.9, 35.43),
        "DONE-GD": (74.22, 48.29, 17.19, 40.06),
        "DONE-PGD": (74.58, 48.13, 15.83, 38.69),
        "DONE-ADAM": (74.56, 48.15, 17.10, 39.46),
    },
    "svhn": {
        "AT": (93.21, 57.82, 47.21, 46.27),
        "MAIL": (93.11, 65.56, 52.23, 41.38),
        "GAIRAT": (91.56, 64.74, 52.15, 39.41),
        "DONE-PGD": (92.80, 66.20, 55.84, 48.32),
        "DONE-ADAM": (92.58, 65.72, 53.79, 49.13),
    },
    "svhn.imbalanced": {
        "AT": (88.46, 51.08, 33.67, 41.13),
        "MAIL": (86.62, 48.48, 31.91, 34.46),
        "GAIRAT": (86.73, 53.79, 36.46, 33.25),
        "DONE-PGD": (88.05, 54.85, 39.91, 41.44),
        "DONE-ADAM": (88.98, 55.90, 41.10, 42.38),
    },
    "stl10": {
        "AT": (67.11, 36.28, 10.07, 32.58),
        "MAIL": (68.06, 38.20, 13.33, 32.86),
        "GAIRAT": (65.67, 35.23, 15.21, 30.42),
        "DONE-PGD": (66.98, 40.23, 17.87, 33.71),
        "DONE-ADAM": (66.92, 39.70, 17.62, 34.59),
    },
    "gtsrb": {
        "AT": (88.13, 59.65, 27.03, 57.83),
        "MAIL": (88.47, 55.96, 20.73, 53.44),
        "GAIRAT": (86.67, 54.38, 22.10, 51.18),
        "DONE-PGD": (89.34, 60.16, 27.41, 57.25),
        "DONE-ADAM": (88.76, 60.05, 28.35, 57.70),
    },
    "cifar10.fast": {
        "Fast-AT": (82.44, 45.37, 23.3),
        "Fast-AT-GA": (79.83, 47.56, 25.01),
        "Fast-BAT": (79.91, 49.13, 26.05),
        "DONE-FAST": (79.17, 55.17, 37.13),
    },
}
TEST_IMAGES = {"cifar10": 10_000, "svhn": 26_032, "stl10": 8_000, "gtsrb": 12_630}
RADIUS = 8 / 255
# The attack of RA-PGD. The paper does not say how large its steps are, so the step size is not compared.
ATTACK = {
    "kind": "attack.pgd",
    "threat.kind": "threat.linf",
    "threat.radius": RADIUS,
    "steps": 20,
    "rule.kind": "step.sign",
    "start": "uniform",
    "restarts": 1,
}


def printed(label: str, runs: list[RunResult]) -> Mapping[str, float]:
    """Return the paper's numbers for a row of a table.

    Args:
        label: The label of the method.
        runs: The runs of the row.

    Returns:
        Key of the metric -> percent; empty where the runs are not of the paper's setting. RA-AA is there only if
        AutoAttack was run on all images.
    """
    numbers = PRINTED.get(runs[0].setting, {}).get(label, ())
    if not numbers or not all(_is_papers_setting(run) for run in runs):
        return {}
    on_all = all(run.evaluation.get("autoattack", {}).get("n") == run.evaluation["n"] for run in runs)
    return {key: value for key, value in zip(COLUMNS, numbers, strict=False) if key != "ra_aa" or on_all}


def _is_papers_setting(run: RunResult) -> bool:
    dataset, _, variant = run.setting.partition(".")
    config = flatten(run.config)
    expected: dict[str, Any] = {
        "data.source.kind": f"dataset.{dataset}",
        "data.train_images": None,
        "data.holdout": 0.0,
        "model.kind": "model.resnet18",
        "epochs": 25 if variant == "fast" else 60,
        "batch_size": 128,
        "method.attack.threat.radius": RADIUS,
        **({} if variant == "fast" else {"method.attack.steps": 10}),
        "validation.attack.steps": 20,
        "data.imbalance.kind": "imbalance.step" if variant == "imbalanced" else "imbalance.balanced",
        "data.imbalance.ratio": 0.2 if variant == "imbalanced" else None,
    }
    attack = flatten(run.evaluation["protocol"])
    return (
        all(config.get(key) == value for key, value in expected.items())
        and run.evaluation["n"] == TEST_IMAGES[dataset]
        and "note" not in attack  # there is a note where the images are not the published ones
        and all(attack.get(f"attack.{key}") == value for key, value in ATTACK.items())
    )
