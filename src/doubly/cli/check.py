"""doubly check: from a network to a page in one command."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from doubly.cli.evaluate import (
    EvaluateOptions,
    print_note,
    print_other_threat,
    run_evaluation,
)
from doubly.cli.options import NetworkOptions, parse_options, pop_flag
from doubly.cli.tables import attack_label, print_evaluation, print_line
from doubly.errors import UsageError
from doubly.evaluation.config import EvalConfig
from doubly.report.next_steps import Step, repair_step, retrain_step
from doubly.text import format_percent, format_radius, format_value

if TYPE_CHECKING:
    from doubly.evaluation.result import EvalResult

ATTACKS = ("pgd", "margin", "strong")  # strong comes last: the summary is about it, unless AutoAttack ran
MAX_NAMED = 5  # classes that the summary names


@dataclass(frozen=True)
class CheckOptions(NetworkOptions):
    """Check a network: accuracy per class under strong attacks on a part of the test images, attacked examples, whether
    these numbers are trustworthy, which classes to worry about, and what to do next; with a page. Takes minutes.
    --set FIELD=JSON changes a field of the dataset, as in --set size=32."""

    network: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NETWORK")] = ""
    """package.module:function that builds your network, hf:NAME or another library's, or a run directory"""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA", help_behavior_hint="(default: the data of the run)")] = (
        None
    )
    """test images: folder of class folders, .npz file, dataset, or Hugging Face folder"""
    images: int = 500
    """number of test images, in the proportions of the classes and always the same ones"""
    autoattack: bool = False
    """also run AutoAttack on these images, which takes longer"""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: checks/NAME)")] = None
    """folder for the evaluation and the page"""


def check(arguments: list[str], out: Console, err: Console) -> int:
    """Evaluate a network, print what to worry about and what to do next, and write a page."""
    words = list(arguments)
    changes = pop_flag(words, "--set")
    options = parse_options(CheckOptions, words, "check")
    evaluation = _evaluation(options, changes)
    from doubly.cli.progress import terminal_progress
    from doubly.jobs.signals import interrupt_on_signals
    from doubly.report import write_report

    with interrupt_on_signals(), terminal_progress(err) as callback:
        result, folder = run_evaluation(evaluation, changes, callback)
    print_note(result, out)
    print_evaluation(result, options.network, out)
    if evaluation.directory is not None:
        print_other_threat(evaluation, evaluation.directory, out)
    print_line(out, worry_sentence(result))
    steps = next_steps(evaluation, result, changes)
    for step in steps:
        print_line(out, str(step))
    print_line(out, f"page: {write_report([folder], folder / 'report', steps)}")
    return 0


def _evaluation(options: CheckOptions, changes: Sequence[str]) -> EvaluateOptions:
    """Return the evaluation that a check consists of.

    Raises:
        UsageError: If the network is neither a function nor a run directory, or data and weights do not go with it.
    """
    from doubly.rundir import is_run, named_runs

    directory = named_runs(Path(options.network))[0] if options.network else None
    is_directory = directory is not None and is_run(directory)
    if not options.network or (not is_directory and ":" not in options.network):
        raise UsageError(
            f"'{options.network}' is neither a run directory nor package.module:function: doubly check runs/NAME, or "
            "doubly check mynet:build --weights FILE --data my_images"
        )
    if is_directory and (options.data or options.weights or changes):
        raise UsageError("a run directory knows its data and weights: leave out --data, --weights and --set")
    if not is_directory and options.data is None:
        raise UsageError("give test images, as in --data my_images: a folder of class folders, .npz file, or dataset")
    assert directory is not None
    name = directory.resolve().name if is_directory else _network_folder(options)
    return EvaluateOptions(
        norm=options.norm,
        epsilon=options.epsilon,
        checkpoint=options.checkpoint,
        device=options.device,
        trust_code=options.trust_code,
        model=options.model if is_directory else options.network,
        weights=options.weights,
        mean=options.mean,
        std=options.std,
        data_root=options.data_root,
        directory=directory if is_directory else None,
        config=EvalConfig(output=options.output or Path("checks") / name, images=options.images),
        attacks=ATTACKS,
        autoattack=options.autoattack,
        data=options.data,
    )


def _network_folder(options: CheckOptions) -> str:
    from doubly.cli.sources import source_folder_name

    return source_folder_name(options.network, options.weights, options.mean, options.std)


def worry_sentence(result: "EvalResult") -> str:
    """Return which classes to worry about: the weakest under the strongest attack, with their accuracies."""
    attack = result.attacks[-1]
    accuracies = zip(result.classes, result.per_class(attack).tolist(), strict=True)
    per_class = {name: value for name, value in accuracies if not math.isnan(value)}
    average = result.accuracy(attack)
    weak = [name for name in sorted(per_class, key=lambda name: per_class[name]) if per_class[name] < average]
    if not weak:
        return f"classes to worry about: none is weaker than the others under {attack_label(attack, result)}"
    named = ", ".join(f"{name} {format_percent(per_class[name], 0)} %" for name in weak[:MAX_NAMED])
    return (
        f"classes to worry about: {named} stay correct under {attack_label(attack, result)}, against "
        f"{format_percent(average, 0)} % of all images"
    )


def next_steps(options: EvaluateOptions, result: "EvalResult", changes: Sequence[str] = ()) -> list[Step]:
    """Return commands that raise the weakest classes, with the paths of this check.

    Args:
        options: The evaluation that was made.
        result: Its result.
        changes: What was given as --set.
    """
    measured = _measured(result)
    if options.directory is not None:
        return _steps_of_run(options.directory, measured)
    assert options.model is not None and options.data is not None
    normalized = ["--mean", *map(format_value, options.mean), "--std", *map(format_value, options.std)]
    normalized = normalized if options.mean else []
    network = ["--model", options.model, *(["--weights", options.weights] if options.weights else []), *normalized]
    root = ["--data-root", options.data_root] if options.data_root else []
    changed = [word for change in changes for word in ("--set", change)]
    repair = [*network, "--data", options.data, *root, *changed, *measured]
    source = [word for change in changes for word in ("--set", f"data.source.{change}")]  # a run has other settings too
    train = ["--data", options.data, *root, *source, "--method", "cfol", "--model", options.model]
    return [repair_step(repair, own=False), retrain_step([*train, *normalized, *measured], alternative=True)]


def _steps_of_run(directory: Path, measured: Sequence[str]) -> list[Step]:
    from doubly.checkpoints.load import load_run
    from doubly.data import ImageFolder
    from doubly.recipes import RECIPES

    run = load_run(directory)
    network = [] if run.model.named_code is None else ["--model", run.model.named_code]
    steps = []
    if run.data.holdout > 0:
        steps.append(repair_step([str(directory), *network, *measured]))
    other = f"{run.name.rpartition('.')[0]}.cfol"
    if other in RECIPES and other != run.name:
        return [*steps, retrain_step([other, *network, *measured], bool(steps))]
    source = run.data.source
    if isinstance(source, ImageFolder) and other != run.name:
        data = str(Path(run.data.root or ".") / source.path)
        return [*steps, retrain_step(["--data", data, "--method", "cfol", *network, *measured], bool(steps))]
    return steps


def _measured(result: "EvalResult") -> list[str]:
    """Return the flags of the ball that the check was made in."""
    threat = result.protocol["attack"]["threat"]
    norm = threat["kind"].rpartition(".")[2]
    return [*(["--norm", norm] if norm != "linf" else []), "--epsilon", format_radius(threat["radius"])]
