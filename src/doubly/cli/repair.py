"""doubly repair."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from doubly.callbacks import Callback
from doubly.cli.help import Flag, ShortHelp
from doubly.cli.options import NetworkOptions, parse_options, pop_flag
from doubly.cli.tables import print_differences, print_line, print_repair
from doubly.errors import UsageError
from doubly.offsets.config import RepairConfig

if TYPE_CHECKING:
    from doubly.offsets.result import RepairResult

HELP = ShortHelp(
    """\
usage: doubly repair DIR [OPTIONS]
       doubly repair --model M:F --weights FILE --data NAME [OPTIONS]

Raise the weakest classes of a finished network: one number per class is added to its logits, fitted
under attack on held-out images. Writes a network that others can load, with the accuracies before
and after on held-out images that were not used for the fit.""",
    {
        "what to repair": "checkpoint model weights mean std data data-root set trust-code",
        "perturbations and attacks": "epsilon norm attacks",
        "the fit": "priority fit-on fit-share images judge-images rounds seed",
        "the run": "output device",
    },
    (Flag("--set", "FIELD=JSON", "change a field of the dataset, as in --set size=32", ""),),
    {"--mean": "", "--std": ""},
)


@dataclass(frozen=True)
class RepairOptions(NetworkOptions):
    """Raise the weakest classes of a finished network: one number per class is added to its logits, fitted under attack
    on held-out images. Writes a network that others can load, with the accuracies before and after on held-out images
    that were not used for the fit. --set FIELD=JSON changes a field of the dataset."""

    directory: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]", help_behavior_hint="")] = (
        None
    )
    """run directory"""
    config: Annotated[RepairConfig, tyro.conf.arg(name="")] = field(default_factory=RepairConfig)
    """settings"""
    output: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: DIR-repaired, or repairs/NAME)")
    ] = None
    """folder to write, which must be new or empty"""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…")] = ("margin",)
    """attacks under which the result is judged; names from `doubly list attacks`"""
    data: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the data of the run)")] = (
        None
    )
    """dataset, recipe, folder or file whose training images your network was not trained on; never its test images"""


def repair(arguments: list[str], out: Console, err: Console) -> int:
    """Fit class offsets of a run directory or of a network of the user's own, and write the repaired network."""
    words = list(arguments)
    changes = pop_flag(words, "--set")
    options = parse_options(RepairOptions, words, "repair", short_help=HELP)
    if options.directory is None and (options.model is None or options.data is None):
        raise UsageError("give a run directory, or --model package.module:function with --weights FILE and --data NAME")
    if options.directory is not None and (options.data or options.weights or changes):
        raise UsageError("a run directory knows its data and weights: leave out --data, --weights and --set")
    from doubly.cli.progress import terminal_progress
    from doubly.jobs.signals import interrupt_on_signals

    with interrupt_on_signals(), terminal_progress(err) as callback:
        if options.directory is not None:
            result, folder = _repair_run(options, options.directory, callback)
        else:
            result, folder = _repair_network(options, changes, callback)
    print_repair(result, str(options.directory or options.model), out)
    print_differences(result.differences(), result.after, "after minus before", out)
    if options.directory is not None:
        model = f" --model {options.model}" if options.model else ""
        print_line(out, f"wrote {folder}; now: doubly evaluate {folder}{model}")
    else:
        print_line(out, f"wrote {folder / 'weights.safetensors'} and {folder / 'repair.json'}")
    return 0


def _repair_run(options: RepairOptions, directory: Path, callback: Callback) -> tuple["RepairResult", Path]:
    from doubly.checkpoints.load import load_run
    from doubly.cli.attacks import select_named_attacks
    from doubly.cli.sources import select_architecture, select_threat
    from doubly.offsets.api import repair_run

    run = load_run(directory)
    folder = options.output or directory.with_name(f"{directory.resolve().name}-repaired")
    threat = select_threat(options.norm, options.epsilon, run.validation.attack.threat)
    result = repair_run(
        directory,
        folder,
        checkpoint=options.checkpoint,
        architecture=select_architecture(options.model, run, options.trust_code, options.mean, options.std),
        device=options.device,
        threat=threat,
        attacks=select_named_attacks(options.attacks, threat),
        root=options.data_root,
        config=options.config,
        callbacks=[callback],
    )
    return result, folder


def _repair_network(options: RepairOptions, changes: list[str], callback: Callback) -> tuple["RepairResult", Path]:
    from doubly.cli.attacks import select_named_attacks
    from doubly.cli.network import build_network, describe_network
    from doubly.cli.sources import run_for_source, select_threat, source_folder_name
    from doubly.config.device import select_device
    from doubly.config.environment import command_line
    from doubly.distributed import SINGLE_PROCESS
    from doubly.offsets.api import repair as repair_network
    from doubly.offsets.held_out import held_out_images

    assert options.model is not None and options.data is not None  # as `repair` checks
    name = source_folder_name(options.model, options.weights, options.mean, options.std)
    folder = options.output or Path("repairs") / name
    run = run_for_source(options.data, options.data_root, changes)
    held_out, splits, notes = held_out_images(run.data, trained_here=False)
    for note in notes:
        callback.on_message(note)
    model, warning = build_network(
        options, held_out.x.shape[1], len(held_out.classes), held_out.classes, callback.on_message
    )
    if warning:
        callback.on_message(warning)
    threat = select_threat(options.norm, options.epsilon, None)
    result = repair_network(
        model.to(select_device(options.device, SINGLE_PROCESS)),
        held_out,
        threat,
        test=splits.test,
        attacks=select_named_attacks(options.attacks, threat),
        output=folder,
        callbacks=[callback],
        about=describe_network(options, options.data) | {"command": command_line()},
        **asdict(options.config),
    )
    return result, folder
