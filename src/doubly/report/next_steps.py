"""What to do next about weak classes, as commands to copy; the page and `doubly check` share them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from doubly.metric_names import has_weak_classes
from doubly.report.collect import BASELINE, Comparison, mean_sd
from doubly.report.protocol import flatten
from doubly.report.run_result import RunResult
from doubly.report.summary import headline
from doubly.text import format_radius

FOLDERS = ("dataset.folder", "dataset.arrays", "dataset.huggingface")  # sources with a path of their own
CFOL = "CFOL"  # label of the method that is recommended for weak classes


@dataclass(frozen=True)
class Step:
    """A command and what it is for."""

    text: str
    command: str

    @property
    def title(self) -> str:
        """The text as an entry of a list."""
        text = self.text.removeprefix("next, ").removeprefix("or ")
        return text[:1].upper() + text[1:]

    def __str__(self) -> str:
        return f"{self.text}: {self.command}"


def repair_step(words: Sequence[str], own: bool = True) -> Step:
    """Return the step that raises the weakest classes without training.

    Args:
        words: The words after `doubly repair`.
        own: Whether the network is one of a run directory, which knows the images that it held out.
    """
    unseen = "" if own else " (on images that it was not trained on)"
    return Step(f"next, without training{unseen}", shlex.join(["doubly", "repair", *words]))


def retrain_step(words: Sequence[str], alternative: bool = False) -> Step:
    """Return the step that trains with CFOL.

    Args:
        words: The words after `doubly train`.
        alternative: Whether another step was named before.
    """
    text = f"{'or ' * alternative}retrain with cfol, which attends to the weakest classes"
    return Step(text, shlex.join(["doubly", "train", *words]))


def next_steps(comparison: Comparison) -> list[Step]:
    """Return what to do next, from the files of the runs alone.

    Weak classes are repaired, or the network is retrained; numbers that no run has under AutoAttack are measured; the
    best method is compared with the baseline image by image.
    """
    run = next(iter(comparison.methods.values()))[0]
    best = comparison.methods[headline(comparison).method][0]
    steps = _about_weak_classes(comparison, run)
    if "ra_aa" not in best.evaluation and best.config.get("kind") == "run":
        command = shlex.join(["doubly", "evaluate", str(best.path), "--autoattack"])
        steps.append(Step("measure the best under AutoAttack, the attack that papers report", command))
    if BASELINE in comparison.methods and best not in comparison.methods[BASELINE]:
        paths = [str(one.path) for one in (best, comparison.methods[BASELINE][0])]
        steps.append(Step(f"compare with {BASELINE} image by image", shlex.join(["doubly", "compare", *paths])))
    return steps


def _about_weak_classes(comparison: Comparison, run: RunResult) -> list[Step]:
    runs = next(iter(comparison.methods.values()))
    average, tail = (mean_sd(one.evaluation[key] for one in runs)[0] for key in ("ra_pgd", "ra_tail_30"))
    if not has_weak_classes(average, tail):
        return []
    is_own = run.config.get("kind") == "run"
    repair, train = _words_of_run(run) if is_own else _words_of_network(run)
    steps = []
    if repair and not any(one.is_repaired for one in comparison.runs):
        steps.append(repair_step(repair, is_own))
    if train and CFOL not in comparison.methods:
        steps.append(retrain_step(train, bool(steps)))
    return steps


def _words_of_run(run: RunResult) -> tuple[list[str], list[str]]:
    """Return the words after `doubly repair` and after `doubly train`; empty where the command would be refused."""
    data = flatten(run.config.get("data", {}))
    kind, setting = str(data.get("source.kind", "")), str(run.config["name"]).rpartition(".")[0]
    repair = [] if data.get("holdout") == 0 else [str(run.path)]
    if kind in FOLDERS:
        folder = Path(str(data.get("root") or ".")) / str(data.get("source.path") or ".")
        return repair, ["--data", str(folder), "--method", "cfol", *_ball(run)]
    is_recipe = bool(kind) and setting.split(".")[0] == kind.rpartition(".")[2]
    return repair, [f"{setting}.cfol", *_ball(run)] if is_recipe else []


def _words_of_network(run: RunResult) -> tuple[list[str], list[str]]:
    """Return the words after `doubly repair` and `doubly train` for a network that was trained elsewhere."""
    protocol = run.evaluation["protocol"]
    model, weights, data = (protocol.get(key) for key in ("model", "weights", "data"))
    if not model or not data:
        return [], []
    network = ["--model", str(model), *(["--weights", str(weights)] if weights else [])]
    train = ["--data", str(data), "--method", "cfol", "--model", str(model), *_ball(run)]
    return [*network, "--data", str(data), *_ball(run)], train


def _ball(run: RunResult) -> list[str]:
    """Return the flags of the ball that the network was measured in."""
    threat = flatten(run.evaluation["protocol"])
    norm, radius = str(threat.get("attack.threat.kind", "")), threat.get("attack.threat.radius")
    if not isinstance(radius, float):
        return []
    name = norm.rpartition(".")[2]
    return [*(["--norm", name] if name != "linf" else []), "--epsilon", format_radius(radius)]
