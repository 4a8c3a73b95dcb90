"""An entry of a leaderboard: one evaluated network as JSON, which anybody may send in and which is checked here."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from doubly.errors import UsageError
from doubly.metric_names import METRICS
from doubly.reading import read_tree
from doubly.report.collect import autoattack_settings
from doubly.report.protocol import describe_attack
from doubly.report.run_result import RunResult
from doubly.version import __version__

VERSION = "doubly.leaderboard.1"
ROUNDING = 1e-4  # by which averages may differ from those of the classes
# Fields of a protocol that say which network was measured or on which machine, not how.
NOT_PROTOCOL = ("model", "weights", "data", "mean", "std", "note", "checkpoint", "chunk")

_TEXT = {"type": "string", "maxLength": 200}
_SHARE = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
_AMOUNT = {"type": ["number", "null"], "minimum": 0, "maximum": 1e18}
_ACCURACIES = [
    key for key, metric in METRICS.items() if metric.is_accuracy and key not in ("worst_class", "train_accuracy")
]


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties, "additionalProperties": False}


SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Entry of a leaderboard of doubly",
    **_object(
        "schema name method data n protocol tail accuracies per_class cost",
        schema={"type": "string", "enum": [VERSION]},
        name={**_TEXT, "minLength": 1},
        method={**_TEXT, "minLength": 1},
        seed={"type": "integer", "minimum": 0, "maximum": 2**63},
        link={"type": "string", "maxLength": 300, "pattern": r"^(https://[^\s<>\"']+)?$"},
        data={**_TEXT, "minLength": 1},
        trained_on=_TEXT,
        n={"type": "integer", "minimum": 1, "maximum": 10**12},
        protocol={"type": "object"},
        tail=_object("share rounding", share=_SHARE, rounding=_TEXT),
        accuracies=_object("sa ra_pgd ra_tail_30", **dict.fromkeys(_ACCURACIES, _SHARE)),
        per_class={
            "type": "object",
            "minProperties": 1,
            "additionalProperties": _object(
                "n sa ra_pgd", n={"type": "integer", "minimum": 0, "maximum": 10**12}, sa=_SHARE, ra_pgd=_SHARE
            ),
        },
        autoattack={"type": "object"},
        cost=_object("", epochs=_AMOUNT, seconds=_AMOUNT, passes=_AMOUNT, peak_memory=_AMOUNT),
        trust=_TEXT,
        version=_TEXT,
    ),
}
"""What an entry holds, as JSON Schema; `doubly leaderboard --schema` prints it."""


def make_entry(run: RunResult, name: str = "", link: str = "") -> dict[str, Any]:
    """Return the entry of an evaluated network.

    Args:
        run: The run, or a network from elsewhere.
        name: Its name; by default that of the run.
        link: Address of a page about it.

    Raises:
        UsageError: If the numbers of the evaluation contradict each other.
    """
    evaluation, protocol = run.evaluation, run.evaluation["protocol"]
    rows = {
        key: {part: row.get(part) for part in ("n", "sa", "ra_pgd")} for key, row in evaluation["per_class"].items()
    }
    entry = {
        "schema": VERSION,
        "name": name or str(run.config["name"]),
        "method": run.method,
        "seed": run.seed,
        "link": link,
        "data": _dataset(run),
        "trained_on": _training_data(run),
        "n": evaluation["n"],
        "protocol": {key: value for key, value in protocol.items() if key not in NOT_PROTOCOL},
        "tail": {key.removeprefix("tail."): value for key, value in run.tail.items()},
        "accuracies": {key: evaluation[key] for key in _ACCURACIES if key in evaluation},
        "per_class": rows,
        "autoattack": autoattack_settings(run),
        "cost": _cost(run),
        "trust": str(evaluation.get("trust", {}).get("verdict", "")),
        "version": __version__,
    }
    check_entry(entry, str(run.path))
    return entry


def _dataset(run: RunResult) -> str:
    data = run.config.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    kind = str(source.get("kind", "")) if isinstance(source, dict) else ""
    return kind.rpartition(".")[2] or Path(str(run.evaluation["protocol"].get("data") or run.setting)).name


def _training_data(run: RunResult) -> str:
    """Return the dataset and its imbalance; empty for a network from elsewhere."""
    data = run.config.get("data")
    if not isinstance(data, dict):
        return ""
    imbalance = data.get("imbalance")
    kind = str(imbalance.get("kind", "")).rpartition(".")[2] if isinstance(imbalance, dict) else ""
    return ", ".join(filter(None, (_dataset(run), "" if kind == "balanced" else kind)))


def _cost(run: RunResult) -> dict[str, float | None]:
    """Return epochs, seconds, passes per image over all epochs, and bytes; null where they were not recorded."""
    epochs = len(run.metrics)
    values = {"seconds": run.seconds, "passes": epochs * sum(run.passes), "peak_memory": run.peak_memory}
    return {"epochs": epochs or None, **{key: value if math.isfinite(value) else None for key, value in values.items()}}


def read_entry(path: Path) -> dict[str, Any]:
    """Read and check the JSON file of an entry.

    Raises:
        UsageError: If it cannot be read, or a field is wrong; the message names it.
    """
    entry = read_tree(path)
    check_entry(entry, str(path))
    return entry


def check_entry(entry: Mapping[str, Any], origin: str) -> None:
    """Compare an entry with `SCHEMA`, and its averages with its classes.

    Args:
        entry: The entry.
        origin: Where it comes from, for the message.

    Raises:
        UsageError: If a field is missing, unknown, or holds something else.
    """
    fault = next(_faults(entry, SCHEMA, ""), None) or next(_contradictions(entry), None)
    if fault:
        raise UsageError(
            f"{origin} is no valid entry: {fault}; write it by `doubly leaderboard --entry DIR`, and see --schema"
        )


def _faults(value: Any, schema: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield what does not fit the parts of JSON Schema that SCHEMA uses."""
    title, kinds = name or "the file", schema.get("type", [])
    if not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield f"{title} must be {kinds if isinstance(kinds, str) else ' or '.join(kinds)}, got {value!r:.40}"
    elif isinstance(value, dict):
        known = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        yield from (
            f"{name}{'.' * bool(name)}{key} is missing" for key in schema.get("required", ()) if key not in value
        )
        if len(value) < schema.get("minProperties", 0):
            yield f"{title} is empty"
        for key, part in value.items():
            inner = known.get(key, others)
            if inner is False:
                yield f"{title} has the unknown field {key!r:.40}"
            elif inner is not True:
                yield from _faults(part, inner, f"{name}{'.' * bool(name)}{key[:40]}")
    elif isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**6):
            yield f"{title} has {len(value)} characters, allowed are up to {schema.get('maxLength')}, and not none"
        elif value not in schema.get("enum", [value]) or not re.search(schema.get("pattern", ""), value):
            yield f"{title} is {value!r:.40}, allowed is {schema.get('enum') or schema.get('pattern')}"
    elif isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{title} is {value!r:.40}, allowed are {schema['minimum']} to {schema['maximum']}"


def _is(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if isinstance(value, bool):
        return False
    python: Any = {"object": dict, "string": str, "integer": int, "number": (int, float)}[kind]
    return isinstance(value, python) and not (isinstance(value, float) and not math.isfinite(value))


def _contradictions(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield averages that do not follow from the classes."""
    rows, accuracies = entry["per_class"].values(), entry["accuracies"]
    try:
        describe_attack(entry["protocol"])
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        yield "protocol.attack does not describe an attack"
    if any((row["n"] == 0) != (row["ra_pgd"] is None) or (row["n"] == 0) != (row["sa"] is None) for row in rows):
        yield "per_class needs accuracies of every class with images, and null for those without"
        return
    total = sum(row["n"] for row in rows)
    if total != entry["n"]:
        yield f"n is {entry['n']}, but the classes have {total} images"
        return
    for key in ("sa", "ra_pgd"):
        average = sum(row["n"] * row[key] for row in rows if row["n"]) / total
        if accuracies[key] is None or abs(average - accuracies[key]) > ROUNDING:
            yield f"accuracies.{key} is {accuracies[key]}, but the classes average {average:.4f}"
    weakest = sorted(row["ra_pgd"] for row in rows if row["n"])
    counts = {max(1, function(0.3 * len(weakest))) for function in (math.floor, math.ceil)}
    tails = [sum(weakest[:count]) / count for count in sorted(counts)]
    if accuracies["ra_tail_30"] is None or not tails[0] - ROUNDING <= accuracies["ra_tail_30"] <= tails[-1] + ROUNDING:
        yield f"accuracies.ra_tail_30 is {accuracies['ra_tail_30']}, but the weakest classes have {tails[-1]:.4f}"
