"""doubly evaluate."""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.progress import Progress

from doubly.cli.options import parsed, taken
from doubly.cli.tables import duration, say, show
from doubly.errors import UsageError
from doubly.jobs.shards import run_shards
from doubly.jobs.signals import interrupt_on_signals


def evaluate(arguments: list[str], out: Console, err: Console) -> int:
    from doubly.distributed.launch import joined, started
    from doubly.training.progress import bar_columns

    options, changes = _options(arguments)
    first = started()[0] == 0
    with interrupt_on_signals():
        if options.jobs > 1 and started()[1] > 1:
            raise UsageError("the processes of torchrun share AutoAttack's chunks by themselves: leave out --jobs")
        if options.jobs > 1 and not options.how.sharded:
            words = list(arguments)
            taken(words, "--jobs")
            run_shards(words, options.jobs, lambda message: say(err, message))
        with joined(), Progress(*bar_columns(), console=err, disable=not (first and err.is_terminal)) as progress:
            watch = _Watch(err, progress)
            run = _run if options.directory is not None else _own
            result, place = run(options, changes, watch)
    if options.how.sharded:
        say(out, f"{result.autoattack['chunks']} chunks are done; without --shard they are put together")
        return 0
    show(result, str(options.directory or options.model), out)
    say(out, f"wrote {place / 'evaluation.json'} and {place / 'evaluation.npz'}")
    return 0


def _options(arguments: list[str]) -> tuple[Any, list[str]]:
    import tyro

    from doubly.evaluation.config import EvalConfig

    @dataclass(frozen=True)
    class Options:
        """Measure a run directory, or any network (--model, --weights, --data): per class, with intervals, and whether
        the numbers can be trusted. Writes evaluation.json, evaluation.npz and gallery.npz. --set FIELD=JSON changes a
        field of the dataset, as in --set batches=2."""

        directory: Annotated[Path | None, tyro.conf.Positional] = None
        """run directory"""
        how: Annotated[EvalConfig, tyro.conf.arg(name="")] = field(default_factory=EvalConfig)
        """how to measure"""
        attacks: tuple[str, ...] = ("pgd", "margin")
        """pgd: 20 steps on the cross-entropy; margin: the same on the logit margin"""
        autoattack: bool = False
        """AutoAttack too, whole: RA-AA. Takes hours on large networks; goes on where it was stopped"""
        quick: bool = False
        """its two attacks APGD-CE and APGD-T only: RA-APGD, which is not RA-AA but rarely far from it"""
        threat: Literal["linf", "l2"] | None = None
        """what the attacker may do; the run's own, or linf, if not given"""
        epsilon: str | None = None
        """its radius, as in 8/255; the run's own, 8/255 for linf and 0.5 for l2, if not given"""
        jobs: int = 1
        """processes that share AutoAttack's chunks"""
        checkpoint: Literal["last", "best"] = "last"
        """of a run: last epoch, or best on the hold-out"""
        device: str = "auto"
        """auto, cpu, cuda, …"""
        model: str | None = None
        """package.module:function that builds your network"""
        weights: str | None = None
        """its weights: safetensors, or a state dict saved by torch; none if the function fills them in"""
        data: str | None = None
        """its images: a dataset, a recipe, a folder of class folders, or an .npz or .safetensors file; the test part
        is measured"""
        data_root: str | None = None
        """folder with the dataset's files"""

    words = list(arguments)
    changes = taken(words, "--set")
    options = parsed(Options, words, "evaluate")
    if options.autoattack and options.quick:
        raise UsageError("give --autoattack or --quick: the second is part of the first")
    if options.jobs < 1:
        raise UsageError(f"jobs run in at least 1 process, got {options.jobs}")
    if (options.jobs > 1 or options.how.sharded) and not {"autoattack", "quick"} & set(_attacks(options)):
        raise UsageError("--jobs and --shard share AutoAttack's chunks: add --autoattack or --quick")
    if options.directory is None and (options.model is None or options.data is None):
        raise UsageError("give a run directory, or --model package.module:function with --weights FILE and --data NAME")
    if options.directory is not None and (options.data or options.weights or changes):
        raise UsageError("a run directory knows its data and weights: leave out --data, --weights and --set")
    return options, changes


def _attacks(options: Any) -> tuple[str, ...]:
    more = ("autoattack",) if options.autoattack else ("quick",) if options.quick else ()
    return (*options.attacks, *more)


def _threat(options: Any, own: Any) -> Any:
    """As asked for; `own` where nothing is, and its radius where only the same kind is."""
    from doubly.config.serialize import fraction
    from doubly.threat import THREATS, LinfBall

    kind = THREATS[options.threat] if options.threat else LinfBall if own is None else type(own)
    if options.epsilon is not None:
        return kind(fraction(options.epsilon))
    return own if options.threat is None or type(own) is kind else kind()


def _run(options: Any, changes: list[str], watch: Any) -> tuple[Any, Path]:
    from doubly.checkpoints.load import load_run
    from doubly.config.user_code import OwnModel
    from doubly.evaluation.run_directory import evaluate_run

    own = load_run(options.directory).validation.attack.threat
    threat = _threat(options, own)
    result = evaluate_run(
        options.directory,
        options.checkpoint,
        OwnModel(options.model) if options.model else None,
        options.device,
        _attacks(options),
        threat=None if threat == own else threat,
        root=options.data_root,
        how=options.how,
        watch=watch,
    )
    return result, options.how.output or options.directory


def _own(options: Any, changes: list[str], watch: Any) -> tuple[Any, Path]:
    from doubly.cli.sources import run_of
    from doubly.config.user_code import OwnModel
    from doubly.evaluation.api import evaluate
    from doubly.seeding import global_generators
    from doubly.training.setup import chosen_device, fetched_splits

    splits = fetched_splits(run_of(options.data, options.data_root, changes))
    test = splits.test
    with global_generators(0):  # a function that fills nothing in draws the same network each time
        model = OwnModel(options.model, options.weights).build(test.x.shape[1], len(test.classes), [0.0], [1.0])
    about = {"model": options.model, "weights": options.weights, "split": "test"}
    about |= {"note": splits.note} if splits.note else {}
    place = options.how.output or Path("evaluations") / _name(options)
    settings = {**asdict(options.how), "output": place}
    model.to(chosen_device(options.device))
    threat = _threat(options, None)
    return evaluate(model, test, threat, _attacks(options), watch=watch, about=about, **settings), place


def _name(options: Any) -> str:
    """Of the folder for the results: two networks with weights of one name have two."""
    weights = Path(options.weights).resolve() if options.weights else ""
    mark = hashlib.sha256(f"{options.model} {weights}".encode()).hexdigest()[:6]
    name = Path(options.weights).stem if options.weights else options.model.replace(":", "-")
    return f"{name}-{mark}"


class _Watch:
    """A bar for PGD; for AutoAttack a line after each attack, with the time left."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self.console, self.progress = console, progress
        self.task: Any = None
        self.ensemble: Any = None

    def say(self, sentence: str) -> None:
        say(self.console, sentence)

    def images(self, done: int, of: int) -> None:
        if self.task is None:
            self.task = self.progress.add_task("attacking", total=of)
        self.progress.update(self.task, completed=done)

    def left(self, seconds: float | None) -> None:
        if seconds is not None and self.console.is_terminal:
            if self.ensemble is None:
                self.ensemble = self.progress.add_task("AutoAttack", total=None)
            self.progress.update(self.ensemble, description=f"AutoAttack, about {duration(seconds)} left")

    def attack(self, chunk: int, of: int, part: str, standing: int, left: float | None) -> None:
        rest = "" if left is None else f", about {duration(left)} left"
        self.say(f"chunk {chunk + 1} of {of}, {part}: {standing} stand{rest}")
