"""doubly evaluate."""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from doubly.callbacks import Callback
from doubly.cli.options import parsed, taken
from doubly.cli.tables import say, show
from doubly.errors import UsageError
from doubly.jobs.signals import interrupt_on_signals


def evaluate(arguments: list[str], out: Console, err: Console) -> int:
    """Evaluate a run directory, or a network of the user's own."""
    from doubly.cli.progress import terminal_progress
    from doubly.distributed.launch import launched
    from doubly.jobs.shards import run_shards

    options, changes = _options(arguments)
    rank, world_size = launched()
    with interrupt_on_signals():
        if options.jobs > 1 and world_size > 1:
            raise UsageError("the processes of torchrun share AutoAttack's chunks by themselves: leave out --jobs")
        if options.jobs > 1 and not options.config.sharded:
            words = list(arguments)
            taken(words, "--jobs")
            run_shards(words, options.jobs, lambda message: say(err, message))
        with terminal_progress(err, bars=rank == 0) as callback:
            if options.directory is not None:
                result, folder = _evaluate_run(options, callback)
            else:
                result, folder = _evaluate_network(options, changes, callback)
    if options.config.sharded:
        say(out, f"{result.autoattack['chunks']} chunks are finished; a call without --shard combines them")
        return 0
    show(result, str(options.directory or options.model), out)
    say(out, f"wrote {folder / 'evaluation.json'} and {folder / 'evaluation.npz'}")
    return 0


def _options(arguments: list[str]) -> tuple[Any, list[str]]:
    import tyro

    from doubly.evaluation.config import EvalConfig

    @dataclass(frozen=True)
    class Options:
        """Evaluate a run directory, or any network (--model, --weights, --data): accuracy per class under attacks, with
        intervals, and checks of whether the numbers can be trusted. Writes evaluation.json, evaluation.npz and
        gallery.npz. --set FIELD=JSON changes a field of the dataset, as in --set batches=2."""

        directory: Annotated[Path | None, tyro.conf.Positional] = None
        """run directory"""
        config: Annotated[EvalConfig, tyro.conf.arg(name="")] = field(default_factory=EvalConfig)
        """settings"""
        attacks: tuple[str, ...] = ("pgd", "margin")
        """names from `doubly list attacks`; pgd: 20 steps on the cross-entropy; margin: the same on the logit margin"""
        autoattack: bool = False
        """also run AutoAttack (RA-AA); takes hours on large networks, and resumes where it was stopped"""
        quick: bool = False
        """also run its two attacks APGD-CE and APGD-T only (RA-APGD), which is rarely far from RA-AA"""
        threat: Literal["linf", "l2"] | None = None
        """what the attacker may do; none: the run's own threat, or linf"""
        epsilon: str | None = None
        """radius of the threat, such as 8/255; none: the run's own, or 8/255 for linf and 0.5 for l2"""
        jobs: int = 1
        """processes that share AutoAttack's chunks"""
        checkpoint: Literal["last", "best"] = "last"
        """checkpoint of a run: that of the last epoch, or the best on the hold-out"""
        device: str = "auto"
        """auto, cpu, cuda, …"""
        model: str | None = None
        """package.module:function that builds your network"""
        weights: str | None = None
        """weights of your network: safetensors, or a state dict saved by torch; none: as the function returns it"""
        data: str | None = None
        """images for your network: a dataset, a recipe, a folder of class folders, or an .npz or .safetensors file;
        the test images are used"""
        data_root: str | None = None
        """folder with the dataset's files"""

    words = list(arguments)
    changes = taken(words, "--set")
    options = parsed(Options, words, "evaluate")
    _check_options(options, changes)
    return options, changes


def _check_options(options: Any, changes: list[str]) -> None:
    if options.autoattack and options.quick:
        raise UsageError("give --autoattack or --quick: the second is part of the first")
    if options.jobs < 1:
        raise UsageError(f"jobs run in at least 1 process, got {options.jobs}")
    if (options.jobs > 1 or options.config.sharded) and not {"autoattack", "quick"} & set(_attack_names(options)):
        raise UsageError("--jobs and --shard share AutoAttack's chunks: add --autoattack or --quick")
    if options.directory is None and (options.model is None or options.data is None):
        raise UsageError("give a run directory, or --model package.module:function with --weights FILE and --data NAME")
    if options.directory is not None and (options.data or options.weights or changes):
        raise UsageError("a run directory knows its data and weights: leave out --data, --weights and --set")


def _attack_names(options: Any) -> tuple[str, ...]:
    ensemble = ("autoattack",) if options.autoattack else ("quick",) if options.quick else ()
    return (*options.attacks, *ensemble)


def _threat(options: Any, default: Any) -> Any:
    """Return the threat asked for; the default where nothing is, or where only the kind of the default is."""
    from doubly.config.serialize import parse_number
    from doubly.threat import THREATS, LinfBall

    kind = THREATS[options.threat] if options.threat else LinfBall if default is None else type(default)
    if options.epsilon is not None:
        return kind(radius=parse_number(options.epsilon))  # type: ignore[call-arg]  # a field of every subclass
    return default if options.threat is None or type(default) is kind else kind()


def _evaluate_run(options: Any, callback: Callback) -> tuple[Any, Path]:
    from doubly.checkpoints.load import load_run
    from doubly.config.user_code import UserModel
    from doubly.evaluation.api import evaluate_run

    own = load_run(options.directory).validation.attack.threat
    threat = _threat(options, own)
    result = evaluate_run(
        options.directory,
        which=options.checkpoint,
        architecture=UserModel(options.model) if options.model else None,
        device=options.device,
        attacks=_attack_names(options),
        threat=None if threat == own else threat,
        root=options.data_root,
        config=options.config,
        callbacks=[callback],
    )
    return result, options.config.output or options.directory


def _evaluate_network(options: Any, changes: list[str], callback: Callback) -> tuple[Any, Path]:
    from doubly.cli.sources import run_of
    from doubly.config.device import select_device
    from doubly.config.user_code import UserModel
    from doubly.distributed import join_processes
    from doubly.evaluation.api import evaluate
    from doubly.seeding import global_generators
    from doubly.training.setup import load_run_splits

    with join_processes() as communicator:
        splits = load_run_splits(run_of(options.data, options.data_root, changes), communicator, Callback())
        test = splits.test
        with global_generators(0):  # a function that loads no weights returns the same network each time
            model = UserModel(options.model, options.weights).build(test.x.shape[1], len(test.classes), [0.0], [1.0])
        about = {"model": options.model, "weights": options.weights, "split": "test"}
        about |= {"note": splits.note} if splits.note else {}
        folder = options.config.output or Path("evaluations") / _folder_name(options)
        settings = {**asdict(options.config), "output": folder}
        model.to(select_device(options.device, communicator))
        result = evaluate(
            model,
            test,
            _threat(options, None),
            _attack_names(options),
            callbacks=[callback],
            about=about,
            **settings,
        )
        return result, folder


def _folder_name(options: Any) -> str:
    """Return a name for the results; two networks whose weights have one name get different ones."""
    weights = Path(options.weights).resolve() if options.weights else ""
    digest = hashlib.sha256(f"{options.model} {weights}".encode()).hexdigest()[:6]
    name = Path(options.weights).stem if options.weights else options.model.replace(":", "-")
    return f"{name}-{digest}"
