"""A model card: README.md about one evaluated network, with its robustness on every class and what it is not for."""

import json
from typing import Any

from doubly.metric_names import METRICS
from doubly.report.protocol import describe, describe_attack
from doubly.report.run_result import RunResult
from doubly.text import TRUST_QUESTION, duration, escape_markdown, format_percent, trust_answer
from doubly.version import __version__

MAX_CLASSES = 1000  # rows of the table


def model_card(run: RunResult, name: str = "") -> str:
    """Return the model card of a run as Markdown, with the header that the Hugging Face Hub reads.

    Args:
        run: The run, evaluated.
        name: Name of the network; by default that of the run.
    """
    title = name or f"{run.config['name']}, seed {run.seed}"
    parts = [_header(run, title), f"# {escape_markdown(title)}", _introduction(run), "## Robustness", _numbers(run)]
    parts += ["### Every class", _classes(run), "## Protocol", _protocol(run), "## Data", _data(run)]
    parts += ["## Training", _training(run), "## Intended use", INTENDED, "## Limits", _limits(run)]
    return "\n\n".join(parts) + "\n"


INTENDED = (
    "Research on robustness, and comparison with networks that were measured by the same protocol. Images are pixels "
    "in [0, 1]; normalization is a part of the network. Check it on your own images before any other use."
)


def _header(run: RunResult, title: str) -> str:
    """Return the YAML header; strings are written as JSON, which YAML reads, so that no name can add a field."""
    values = {key: METRICS[key].value(run.evaluation) for key in ("sa", "ra_pgd", "ra_tail_30", "ra_aa")}
    metrics = [
        {"type": "accuracy", "name": METRICS[key].label, "value": round(value, 4)}
        for key, value in values.items()
        if value is not None
    ]
    data = _source(run)
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"name": data, "type": data},
        "metrics": metrics,
    }
    fields = {
        "library_name": "doubly",
        "pipeline_tag": "image-classification",
        "tags": ["adversarial-robustness", "image-classification", "doubly"],
        "model-index": [{"name": title, "results": [result]}],
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items()), "---"])


def _source(run: RunResult) -> str:
    """Return the name of the dataset."""
    source = run.config.get("data", {}).get("source", {}) if isinstance(run.config.get("data"), dict) else {}
    kind = str(source.get("kind", "")) if isinstance(source, dict) else ""
    return kind.rpartition(".")[2] or str(run.evaluation["protocol"].get("data") or run.setting)


def _introduction(run: RunResult) -> str:
    return (
        f"An image classifier with {len(run.evaluation['per_class'])} classes; method {escape_markdown(run.method)}. "
        "Averages hide weak classes, so both are given: accuracy on average, and of the weakest classes under attack."
    )


def _numbers(run: RunResult) -> str:
    lines = ["| | % | 95 % interval | |", "|---|---:|---:|---|"]
    intervals = run.evaluation.get("intervals", {})
    for key, metric in METRICS.items():
        value = metric.value(run.evaluation) if metric.is_accuracy else None
        if value is None:
            continue
        ends = intervals.get("worst_ra_pgd" if key == "worst_class" else key)
        is_pair = isinstance(ends, list) and len(ends) == 2
        interval = " – ".join(format_percent(end) for end in ends) if is_pair else ""
        label = f"{metric.label} ({run.evaluation['worst_class']['name']})" if key == "worst_class" else metric.label
        lines.append(f"| {escape_markdown(label)} | {format_percent(value)} | {interval} | {metric.explanation} |")
    return "\n".join(lines)


def _classes(run: RunResult) -> str:
    rows = run.evaluation["per_class"]
    keys = [
        key for key in next(iter(rows.values())) if key == "sa" or (key.startswith("ra_") and "_interval" not in key)
    ]
    labels = [METRICS[key].label if key in METRICS else key for key in keys]
    lines = [f"| class | images | {' | '.join(map(escape_markdown, labels))} |", f"|---|---:|{'---:|' * len(keys)}"]
    ordered = sorted(rows.items(), key=lambda item: (item[1]["ra_pgd"] is None, item[1]["ra_pgd"] or 0.0))
    for name, row in ordered[:MAX_CLASSES]:
        cells = [_percent(row.get(key)) for key in keys]
        lines.append(f"| {escape_markdown(name)} | {row['n']:,} | {' | '.join(cells)} |")
    if len(ordered) > MAX_CLASSES:
        lines.append(f"\nThe {MAX_CLASSES:,} weakest of {len(ordered):,} classes.")
    return "\n".join(lines)


def _percent(value: Any) -> str:
    return "" if value is None else format_percent(value)


def _protocol(run: RunResult) -> str:
    evaluation, protocol = run.evaluation, run.evaluation["protocol"]
    lines = [f"- {describe_attack(protocol)}, n = {evaluation['n']:,} images", f"- in full: {describe(protocol)}"]
    tail = evaluation["ra_tail_30_classes"]
    lines.append(f"- weakest 30 % of classes, chosen on the same images: {', '.join(tail)}")
    verdict = evaluation.get("trust", {}).get("verdict")
    lines.append(f"- {TRUST_QUESTION} {trust_answer(verdict) if verdict else 'not checked'}")
    if "ra_aa" not in evaluation:
        lines.append("- AutoAttack was not run in full: a stronger attack may find less robustness")
    return "\n".join(f"- {escape_markdown(line.removeprefix('- '))}" for line in lines)


def _data(run: RunResult) -> str:
    data = run.config.get("data", {})
    imbalance = data.get("imbalance", {}) if isinstance(data, dict) else {}
    kind = str(imbalance.get("kind", "")).rpartition(".")[2] if isinstance(imbalance, dict) else ""
    text = f"Dataset: {_source(run)}." + (f" Classes in training: {kind}." if kind else "")
    split = run.evaluation["protocol"].get("split")
    known = (
        f" Measured on its {split} images." if split else " Whether it was trained on these images is not known here."
    )
    return escape_markdown(text + known)


def _training(run: RunResult) -> str:
    config, seconds = run.config, run.seconds
    if "epochs" not in config:
        return "Trained elsewhere; nothing is known here about how."
    time = f", {duration(seconds)}" if seconds == seconds else ""
    method = config.get("method", {})
    kind = method.get("kind", run.method) if isinstance(method, dict) else run.method
    text = f"{run.method} ({kind}), {config['epochs']} epochs, seed {run.seed}{time}, doubly {__version__}."
    return escape_markdown(text) + " `config.json` has every setting."


def _limits(run: RunResult) -> str:
    protocol, worst = run.evaluation["protocol"], run.evaluation["worst_class"]
    lines = [
        f"Robustness was measured against {describe_attack(protocol) or 'one attack'} only; larger or other changes of "
        "an image are not covered.",
        f"Its weakest class is {worst['name']}, at {format_percent(worst['ra_pgd'])} % under attack: do not rely on "
        "the average where this class matters.",
        "An accuracy under attack is an upper bound: a stronger attack can only lower it.",
    ]
    return "\n".join(f"- {escape_markdown(line)}" for line in (*lines, *(f"this run {text}" for text in run.remarks)))
