"""The notes below a table: how its numbers were measured, and what makes its rows hard to compare."""

import statistics
from collections.abc import Mapping
from typing import Any

from doubly.metric_names import METRICS
from doubly.report.collect import Comparison, autoattack_settings
from doubly.report.protocol import describe, flatten
from doubly.text import dead_classes_sentence, format_ball, format_value

BUDGET = ("epochs", "batch_size", "batch_norm", "model.", "warm_up", "ema_decay", "precision")  # fields of a run
MACHINE = ("device", "threads", "platform")  # fields of environment.json


def notes(comparison: Comparison) -> tuple[str, ...]:
    """Return the notes, the protocol first."""
    seeds = {label: ", ".join(str(run.seed) for run in runs) for label, runs in comparison.methods.items()}
    alike = len(set(seeds.values())) == 1
    all_seeds = [next(iter(seeds.values()))] if alike else [f"{label}: {values}" for label, values in seeds.items()]
    spread = ", mean ± sd over seeds" if any(len(runs) > 1 for runs in comparison.methods.values()) else ""
    caption = (
        f"Accuracies in percent of n = {comparison.n} test images{spread}. Attack: {describe(comparison.protocol)}. "
        f"Training seed{'s' if len(comparison.runs) > len(comparison.methods) else ''} {'; '.join(all_seeds)}."
    )
    repeated = [label for label, runs in comparison.methods.items() if len({run.seed for run in runs}) < len(runs)]
    separate = f"Other runs of {comparison.setting} were measured differently ({', '.join(comparison.differences)})"
    return (
        caption,
        *([f"{separate} and are in another table."] if comparison.differences else []),
        *_other_radius(comparison),
        *_dead_classes(comparison),
        *_autoattack(comparison),
        *_repaired(comparison),
        *_missing_seeds(comparison),
        *(["The rows have different seeds."] if not alike else []),
        *(f"{label} has several runs of the same seed." for label in repeated),
        *_budgets(comparison),
        *_machines(comparison),
        *(
            f"{label}, seed {run.seed}, {remark}."
            for label, runs in comparison.methods.items()
            for run in runs
            for remark in run.remarks
        ),
        *([f"{comparison.protocol['note']}."] if comparison.protocol.get("note") else []),
    )


def _other_radius(comparison: Comparison) -> list[str]:
    """Name the methods that were trained in another ball than they were measured in."""
    measured = _ball(flatten(comparison.protocol), "attack.")
    differing = []
    for label, runs in comparison.methods.items():
        prefixes = [
            key.removesuffix("threat.radius") for key in runs[0].choices if key.endswith("attack.threat.radius")
        ]
        balls = {_ball(runs[0].choices, prefix) for prefix in prefixes if prefix.startswith("method.")} - {measured}
        differing += [f"{label} ({', '.join(sorted(balls))})"] if balls and measured else []
    return [f"Trained in another ball than measured in: {', '.join(differing)}."] if differing else []


def _dead_classes(comparison: Comparison) -> list[str]:
    """Name the classes that a network does not recognize even without an attack, in every seed."""
    sentences = []
    for label, runs in comparison.methods.items():
        per_class = [run.evaluation["per_class"] for run in runs]
        dead = [
            name
            for name in comparison.classes
            if all(rows[name]["n"] and rows[name].get("sa") == 0 for rows in per_class)
        ]
        sentences += [f"{label}: {dead_classes_sentence(dead, len(comparison.classes))}."] if dead else []
    return sentences


def _ball(settings: Mapping[str, Any], prefix: str) -> str:
    norm, radius = settings.get(f"{prefix}threat.kind"), settings.get(f"{prefix}threat.radius")
    return format_ball(str(norm), radius) if norm and isinstance(radius, float) else ""


def _autoattack(comparison: Comparison) -> list[str]:
    settings = next(filter(None, map(autoattack_settings, comparison.runs)), None)
    if settings is None:
        return []
    return [f"RA-AA: all four attacks of AutoAttack ({settings['reference']}) on n = {settings['n']} of the images."]


def _repaired(comparison: Comparison) -> list[str]:
    labels = [label for label, runs in comparison.methods.items() if runs[0].is_repaired]
    origins = dict.fromkeys(comparison.methods[label][0].origin for label in labels)
    if not labels:
        return []
    return [
        f"{', '.join(labels)}: networks of {', '.join(origins)} with class offsets, fitted on held-out images; "
        "seconds, passes and learning curves are those of the training before."
    ]


def _missing_seeds(comparison: Comparison) -> list[str]:
    """Name the metrics that some seeds of a method have and others do not."""
    sentences = []
    for metric in METRICS.values():
        counts = {label: sum(metric.key in r.evaluation for r in runs) for label, runs in comparison.methods.items()}
        parts = [f"{label} {n} of {len(comparison.methods[label])}" for label, n in counts.items()]
        if any(0 < counts[label] < len(runs) for label, runs in comparison.methods.items()):
            sentences.append(f"Only some seeds have {metric.label}: {', '.join(parts)}.")
    return sentences


def _budgets(comparison: Comparison) -> list[str]:
    """Name the settings of training, other than the method, in which the rows differ."""
    differing = []
    for key in dict.fromkeys(key for run in comparison.runs for key in run.choices if key.startswith(BUDGET)):
        values = {label: format_value(runs[0].choices.get(key)) for label, runs in comparison.methods.items()}
        if len(set(values.values())) > 1:
            differing.append(f"{key} ({', '.join(f'{label}: {value}' for label, value in values.items())})")
    return [f"The rows were trained with different settings: {'; '.join(differing)}."] if differing else []


def _machines(comparison: Comparison) -> list[str]:
    """Say where training times do not compare: different machines, or one that did other work as well."""
    differing = [
        f"{key} ({', '.join(sorted(values))})"
        for key in MACHINE
        if len(values := {str(run.environment[key]) for run in comparison.runs if key in run.environment}) > 1
    ]
    busy = [
        run
        for run in comparison.runs
        if run.epoch_seconds and max(run.epoch_seconds) > 2 * statistics.median(run.epoch_seconds)
    ]
    sentences = []
    if differing:
        sentences.append(f"The runs differ in {' and '.join(differing)}, so their seconds cannot be compared.")
    if busy:
        some = f"{len(busy)} of {len(comparison.runs)} runs"
        sentences.append(f"In {some}, an epoch took more than twice the median time: the machine was shared.")
    return sentences
