"""doubly evaluate."""

import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from doubly.callbacks import Callback
from doubly.cli.help import Flag, ShortHelp
from doubly.cli.options import NetworkOptions, parse_options, pop_flag
from doubly.cli.tables import print_evaluation, print_line
from doubly.errors import UsageError
from doubly.evaluation.config import EvalConfig
from doubly.metric_names import has_weak_classes, repair_advice
from doubly.rundir import RunDir
from doubly.text import printable_lines

if TYPE_CHECKING:
    from doubly.evaluation.result import EvalResult

HELP = ShortHelp(
    """\
usage: doubly evaluate DIR [OPTIONS]
       doubly evaluate --model M:F --weights FILE --data NAME [OPTIONS]

Evaluate the network of a run directory, or any network: accuracy per class under attacks, with
intervals, and checks of whether the numbers can be trusted. Writes evaluation.json, evaluation.npz
and gallery.npz.""",
    {
        "what to evaluate": "checkpoint model weights mean std data data-root set trust-code",
        "perturbations and attacks": "epsilon norm attacks perturbations autoattack quick seed",
        "which images": "images skip-images autoattack-images",
        "what is computed": "no-trust tail-share curve-images corruptions save-examples max-examples",
        "the run": "output device jobs",
    },
    (Flag("--set", "FIELD=JSON", "change a field of the dataset, as in --set batches=2", ""),),
    {"--mean": "", "--std": "", "--output": "DIR, or evaluations/NAME"},
)


@dataclass(frozen=True)
class EvaluateOptions(NetworkOptions):
    """Evaluate the network of a run directory, or any network (--model, --weights, --data): accuracy per class under
    attacks, with intervals, and checks of whether the numbers can be trusted. Writes evaluation.json, evaluation.npz
    and gallery.npz. --set FIELD=JSON changes a field of the dataset, as in --set batches=2."""

    directory: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]", help_behavior_hint="")] = (
        None
    )
    """run directory"""
    config: Annotated[EvalConfig, tyro.conf.arg(name="")] = field(default_factory=EvalConfig)
    """settings"""
    attacks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…")] = ("pgd", "margin")
    """names from `doubly list attacks`; pgd: 20 steps on the cross-entropy; margin: the same on the logit margin;
    strong: short targeted attempts, nearly as strong as AutoAttack (RA-strong); foolbox:NAME, torchattacks:NAME and
    advlib:NAME are attacks of these libraries, with options as in foolbox:LinfFMNAttack,steps=50"""
    perturbations: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """attacked images `x` or perturbations `delta` found elsewhere, .npz: checked against the threat and scored"""
    autoattack: bool = False
    """also run AutoAttack (RA-AA); takes hours on large networks, and resumes where it was stopped"""
    quick: bool = False
    """also run only two attacks of AutoAttack, APGD-CE and APGD-T (RA-APGD), which is rarely far from RA-AA"""
    jobs: int = 1
    """number of processes that share AutoAttack's chunks"""
    data: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the data of the run)")] = (
        None
    )
    """test images for your network: of a dataset, recipe, folder of class folders, .npz or .safetensors file"""

    @property
    def attack_names(self) -> tuple[str, ...]:
        """Names of all attacks, AutoAttack included."""
        ensemble = ("autoattack",) if self.autoattack else ("quick",) if self.quick else ()
        return (*self.attacks, *ensemble)


def evaluate(arguments: list[str], out: Console, err: Console) -> int:
    """Evaluate a run directory, or a network of the user's own."""
    options, changes = parse_evaluate_options(arguments)
    from doubly.cli.progress import terminal_progress
    from doubly.distributed.launch import launched
    from doubly.jobs.shards import run_shards
    from doubly.jobs.signals import interrupt_on_signals

    rank, world_size = launched()
    with interrupt_on_signals():
        if options.jobs > 1 and world_size > 1:
            raise UsageError("the processes of torchrun share AutoAttack's chunks by themselves: leave out --jobs")
        if options.jobs > 1 and not options.config.sharded:
            words = list(arguments)
            pop_flag(words, "--jobs")
            run_shards(words, options.jobs, lambda message: print_line(err, message))
        with terminal_progress(err, bars=rank == 0) as callback:
            result, folder = run_evaluation(options, changes, callback)
    if options.config.sharded:
        print_line(out, f"{result.autoattack['chunks']} chunks are finished; a call without --shard combines them")
        return 0
    print_note(result, out)
    print_evaluation(result, str(options.directory or options.model), out)
    if options.directory is not None:
        print_other_threat(options, options.directory, out)
    print_line(out, f"wrote {folder / 'evaluation.json'} and {folder / 'evaluation.npz'}")
    if options.directory is not None and not RunDir(options.directory).repair.is_file():
        _advise(result, options, options.directory, out)
    return 0


def run_evaluation(options: EvaluateOptions, changes: list[str], callback: Callback) -> tuple["EvalResult", Path]:
    """Evaluate a run directory, or a network of the user's own; returns the result and the folder of its files."""
    if options.directory is not None:
        return _evaluate_directory(options, options.directory, callback)
    return _evaluate_network(options, changes, callback)


def print_note(result: "EvalResult", out: Console) -> None:
    """Print that the weights are random, loudly, if they are."""
    from doubly.evaluation.network import RANDOM_WEIGHTS

    note = str(result.protocol.get("note", ""))
    if RANDOM_WEIGHTS in note:
        out.print(printable_lines(note), style="bold red", highlight=False, markup=False, soft_wrap=True)


def _advise(result: "EvalResult", options: EvaluateOptions, directory: Path, out: Console) -> None:
    """Print what to try on a network with weak classes, by the last attack that was run."""
    from doubly.checkpoints.load import load_run

    attack = result.attacks[-1] if result.attacks else None
    if attack and has_weak_classes(result.accuracy(attack), result.tail(attack)[0]):
        code = ["--model", options.model] if options.model else ["--trust-code"] if options.trust_code else []
        command = shlex.join(["doubly", "repair", str(directory), *code])
        print_line(out, repair_advice("this network", command, load_run(directory).data.holdout))


def parse_evaluate_options(arguments: list[str]) -> tuple[EvaluateOptions, list[str]]:
    """Parse the arguments of doubly evaluate.

    Returns:
        The options, and what was given as --set.

    Raises:
        UsageError: If options do not fit together, or a value is refused.
        SystemExit: After --help, or after a message about a flag.
    """
    words = list(arguments)
    changes = pop_flag(words, "--set")
    options = parse_options(EvaluateOptions, words, "evaluate", short_help=HELP)
    if options.autoattack and options.quick:
        raise UsageError("give --autoattack or --quick: the second is part of the first")
    if options.jobs < 1:
        raise UsageError(f"jobs run in at least 1 process, got {options.jobs}")
    if (options.jobs > 1 or options.config.sharded) and not {"autoattack", "quick"} & set(options.attack_names):
        raise UsageError("--jobs and --shard share AutoAttack's chunks: add --autoattack or --quick")
    if options.directory is None and (options.model is None or options.data is None):
        raise UsageError("give a run directory, or --model package.module:function with --weights FILE and --data NAME")
    if options.directory is not None and (options.data or options.weights or changes):
        raise UsageError("a run directory knows its data and weights: leave out --data, --weights and --set")
    return options, changes


def print_other_threat(options: EvaluateOptions, directory: Path, out: Console) -> None:
    """Say so if the network was trained at another epsilon than it was measured at."""
    from doubly.checkpoints.load import load_run
    from doubly.cli.sources import select_threat
    from doubly.config.threats import describe_threats, is_same_ball, measured_threat, training_threat

    run = load_run(directory)
    training, measured = training_threat(run), select_threat(options.norm, options.epsilon, measured_threat(run))
    if training is not None and measured is not None and not is_same_ball(training, measured):
        print_line(out, describe_threats(run, measured))


def _evaluate_directory(options: EvaluateOptions, directory: Path, callback: Callback) -> tuple["EvalResult", Path]:
    """Evaluate the network of a run directory; returns the result and the folder of its files."""
    from doubly.checkpoints.load import load_run
    from doubly.cli.attacks import select_named_attacks
    from doubly.cli.sources import select_architecture, select_threat
    from doubly.evaluation.api import evaluate_run

    run = load_run(directory)
    trained_threat = run.validation.attack.threat
    threat = select_threat(options.norm, options.epsilon, trained_threat)
    attacks = select_named_attacks(options.attack_names, threat, options.perturbations)
    result = evaluate_run(
        directory,
        checkpoint=options.checkpoint,
        architecture=select_architecture(options.model, run, options.trust_code, options.mean, options.std),
        device=options.device,
        attacks=attacks,
        threat=None if threat == trained_threat else threat,
        root=options.data_root,
        config=options.config,
        callbacks=[callback],
    )
    return result, options.config.output or directory


def _evaluate_network(options: EvaluateOptions, changes: list[str], callback: Callback) -> tuple["EvalResult", Path]:
    """Evaluate a network of the user's own; returns the result and the folder of its files."""
    from doubly.cli.attacks import select_named_attacks
    from doubly.cli.network import build_network, describe_network
    from doubly.cli.sources import run_for_source, select_threat, source_folder_name
    from doubly.config.device import select_device
    from doubly.data.splits import load_splits_once
    from doubly.distributed import join_processes
    from doubly.evaluation.api import evaluate

    assert options.model is not None and options.data is not None  # as parse_evaluate_options checks
    name = source_folder_name(options.model, options.weights, options.mean, options.std)
    folder = options.config.output or Path("evaluations") / name
    with join_processes() as communicator:
        run = run_for_source(options.data, options.data_root, changes)
        splits = load_splits_once(run.data, communicator)
        test = splits.test
        model, warning = build_network(options, test.x.shape[1], len(test.classes), test.classes, callback.on_message)
        model.to(select_device(options.device, communicator))
        about = describe_network(options, options.data) | {"split": "test"}
        notes = [note for note in (warning, splits.note) if note]
        about |= {"note": "; ".join(notes)} if notes else {}
        settings = {**asdict(options.config), "output": folder}
        threat = select_threat(options.norm, options.epsilon, None)
        attacks = select_named_attacks(options.attack_names, threat, options.perturbations)
        result = evaluate(model, test, threat, attacks, callbacks=[callback], about=about, **settings)
        return result, folder
