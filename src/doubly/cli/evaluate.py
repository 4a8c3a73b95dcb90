"""doubly evaluate and doubly compare."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.progress import Progress

from doubly.cli.options import parsed, taken
from doubly.cli.shown import say, show, show_differences
from doubly.errors import Interrupted, UsageError


def evaluate(arguments: list[str], out: Console, err: Console) -> int:
    from doubly.runs.progress import bar_columns

    options, changes = _options(arguments)
    with _stopping():
        if options.jobs > 1 and not options.how.sharded:
            _shards(arguments, options.jobs, err)
        with Progress(*bar_columns(), console=err, disable=not err.is_terminal) as progress:
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

    from doubly.runs.measuring import Measuring

    @dataclass(frozen=True)
    class Options:
        """Measure a run directory, or any network (--model, --weights, --data): per class, with intervals, and whether
        the numbers can be trusted. Writes evaluation.json and evaluation.npz. --set FIELD=JSON changes a field of the
        dataset, as in --set batches=2."""

        directory: Annotated[Path | None, tyro.conf.Positional] = None
        """run directory"""
        how: Annotated[Measuring, tyro.conf.arg(name="")] = field(default_factory=Measuring)
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
    from doubly.runs.saved_config import fraction
    from doubly.threat import THREATS, LinfBall

    kind = THREATS[options.threat] if options.threat else LinfBall if own is None else type(own)
    if options.epsilon is not None:
        return kind(fraction(options.epsilon))
    return own if options.threat is None or type(own) is kind else kind()


def _run(options: Any, changes: list[str], watch: Any) -> tuple[Any, Path]:
    from doubly.runs import evaluate_run, load_run
    from doubly.runs.own_model import OwnModel

    own = load_run(options.directory).probe.attack.threat
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
    from doubly.runs import evaluate
    from doubly.runs.build import chosen_device, load_splits
    from doubly.runs.own_model import OwnModel
    from doubly.seeding import global_generators

    splits = load_splits(run_of(options.data, options.data_root, changes))
    test = splits.test
    with global_generators(0):  # a function that fills nothing in draws the same network each time
        model = OwnModel(options.model, options.weights).build(test.x.shape[1], len(test.classes), [0.0], [1.0])
    about = {"model": options.model, "weights": options.weights, "split": "test"}
    about |= {"note": splits.note} if splits.note else {}
    name = Path(options.weights).stem if options.weights else options.model.replace(":", "-")
    place = options.how.output or Path("evaluations") / name
    settings = {**asdict(options.how), "output": place}
    model.to(chosen_device(options.device))
    threat = _threat(options, None)
    return evaluate(model, test, threat, _attacks(options), watch=watch, about=about, **settings), place


@contextmanager
def _stopping() -> Iterator[None]:
    """Ctrl-C and SIGTERM end it with a sentence: what AutoAttack wrote is whole at any time."""
    asked = signal.SIGINT

    def terminate(number: int, frame: Any) -> None:
        nonlocal asked
        asked = signal.SIGTERM
        raise KeyboardInterrupt

    alone = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if alone else None
    try:
        yield
    except KeyboardInterrupt:
        ending = Interrupted("stopped; what AutoAttack has finished is kept, and the same command goes on from there")
        ending.number = asked
        raise ending from None
    finally:
        if alone:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _later() -> Iterator[None]:
    """Signals that come inside are heard after it."""
    came: list[int] = []
    alone = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if alone else ()
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


def _shards(arguments: Sequence[str], jobs: int, err: Console) -> None:
    """Every job does its chunks in a process of its own, with its share of the cores; the caller puts them together."""
    from doubly.runs.pool import cores

    words = list(arguments)
    taken(words, "--jobs")
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // jobs))}
    command = [sys.executable, "-m", "doubly", "evaluate", *words, "--shard"]
    problems: list[str] = []

    def relay(lines: Any) -> None:
        for line in lines:
            if line.startswith("doubly: "):
                problems.append(line.removeprefix("doubly: ").strip())
            else:
                say(err, line.rstrip("\n"))

    processes, readers = [], []
    try:
        with _later():  # a process that has begun is one that will be ended
            for k in range(jobs):
                pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
                processes.append(subprocess.Popen([*command, str(k), str(jobs)], env=environment, **pipes))  # type: ignore[call-overload]
                readers.append(threading.Thread(target=relay, args=(processes[-1].stderr,), daemon=True))
                readers[-1].start()
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process, reader in zip(processes, readers, strict=True):
            process.wait()
            reader.join()
            process.stderr.close()
    if any(codes):
        raise UsageError(problems[0] if problems else "a process of --jobs failed; the same command goes on from there")


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
            self.progress.update(self.ensemble, description=f"AutoAttack, about {_duration(seconds)} left")

    def attack(self, chunk: int, of: int, part: str, standing: int, left: float | None) -> None:
        rest = "" if left is None else f", about {_duration(left)} left"
        self.say(f"chunk {chunk + 1} of {of}, {part}: {standing} stand{rest}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def compare(arguments: list[str], out: Console) -> int:
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Two evaluations of the same images: differences with 95 % intervals, and McNemar's test."""

        first: Annotated[Path, tyro.conf.Positional]
        """run directory, or folder with an evaluation"""
        second: Annotated[Path, tyro.conf.Positional]
        """the other"""
        resamples: int = 2000
        """of the bootstrap"""
        seed: int = 0
        """of the bootstrap"""

    options = parsed(Options, arguments, "compare")
    from doubly.evaluation.comparison import compare as differences
    from doubly.evaluation.result import EvalResult

    ours, theirs = EvalResult.load(options.first), EvalResult.load(options.second)
    rows = differences(ours, theirs, options.resamples, options.seed)
    show_differences(rows, ours, f"{options.first} minus {options.second}", out)
    return 0
