"""doubly evaluate and doubly compare."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from doubly.cli.options import parsed, taken
from doubly.errors import UsageError


def evaluate(arguments: list[str], out: Console, err: Console) -> int:
    options, changes = _options(arguments)
    if options.jobs > 1 and not options.how.sharded and (options.autoattack or options.quick):
        _shards(arguments, options.jobs)
    with Progress(*_columns(), console=err, disable=not err.is_terminal) as progress:
        watch = _Watch(err, progress)
        result = _run(options, watch) if options.directory is not None else _own(options, changes, watch)
    if options.how.sharded:
        chunks = result.autoattack["chunks"]
        out.print(f"{chunks} chunks are done; without --shard they are put together", highlight=False)
        return 0
    title = options.directory or options.model
    show(result, f"{title}", out)
    return 0


def _options(arguments: list[str]) -> tuple[Any, list[str]]:
    import tyro

    from doubly.runs.measuring import Measuring

    @dataclass(frozen=True)
    class Options:
        """Measure a run directory, or any network (--model, --weights, --data): per class, with intervals, and whether
        the numbers can be trusted. Writes evaluation.json and evaluation.npz."""

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
        epsilon: float | None = None
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
        """its weights: safetensors, or a state dict saved by torch"""
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
    if options.directory is None and (options.model is None or options.data is None):
        raise UsageError("give a run directory, or --model package.module:function with --weights FILE and --data NAME")
    if options.directory is not None and (options.data or options.weights or changes):
        raise UsageError("a run directory knows its data and weights: leave out --data, --weights and --set")
    return options, changes


def _attacks(options: Any) -> tuple[str, ...]:
    more = ("autoattack",) if options.autoattack else ("quick",) if options.quick else ()
    return (*options.attacks, *more)


def _threat(options: Any, own: Any) -> Any:
    """As asked for; None leaves a run its own."""
    from doubly.threat import THREATS, LinfBall

    if options.threat is None and options.epsilon is None:
        return own
    kind = THREATS[options.threat] if options.threat else type(own) if own is not None else LinfBall
    return kind() if options.epsilon is None else kind(options.epsilon)


def _run(options: Any, watch: Any) -> Any:
    from doubly.runs import evaluate_run, load_run
    from doubly.runs.own_model import OwnModel

    own = load_run(options.directory).probe.attack.threat
    threat = _threat(options, own)
    return evaluate_run(
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


def _own(options: Any, changes: list[str], watch: Any) -> Any:
    from doubly.cli.sources import run_of
    from doubly.runs import evaluate
    from doubly.runs.build import chosen_device, load_splits
    from doubly.runs.own_model import OwnModel

    splits = load_splits(run_of(options.data, options.data_root, changes))
    test = splits.test
    model = OwnModel(options.model, options.weights).build(test.x.shape[1], len(test.classes), [0.0], [1.0])
    about = {"model": options.model, "weights": options.weights, "split": "test"}
    about |= {"note": splits.note} if splits.note else {}
    place = options.how.output or Path("evaluations") / Path(options.weights or options.model.replace(":", "-")).stem
    settings = {**asdict(options.how), "output": place}
    model.to(chosen_device(options.device))
    return evaluate(model, test, _threat(options, None), _attacks(options), watch=watch, about=about, **settings)


def _shards(arguments: Sequence[str], jobs: int) -> None:
    """Every job does its chunks in a process of its own, with its share of the cores; this one puts them together."""
    from doubly.runs.pool import cores

    words = list(arguments)
    taken(words, "--jobs")
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // jobs))}
    command = [sys.executable, "-m", "doubly", "evaluate", *words, "--shard"]
    processes = [
        subprocess.Popen([*command, str(k), str(jobs)], env=environment, stdout=subprocess.DEVNULL) for k in range(jobs)
    ]
    try:
        codes = [process.wait() for process in processes]
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    if any(codes):
        raise UsageError("a process of --jobs failed, see above; what is done is kept, and the same command goes on")


def show(result: Any, title: str, out: Console) -> None:
    """Per class, on all, on the tail; then whether to believe it."""
    from doubly.evaluation.summary import key_of, summary

    labels = {"clean": "SA", "pgd": "RA-PGD", "margin": "RA-margin", "autoattack": result.label}
    columns = {name: labels.get(name, f"RA-{name}") for name in result.answers}
    table = Table(
        "", "n", *columns.values(), title=f"{title}, % with 95 % intervals", box=box.SIMPLE_HEAD, pad_edge=False
    )
    found = summary(result)
    for name, row in found["per_class"].items():
        cells = [_cell(row[key_of(result, a)], row[f"{key_of(result, a)}_interval"], 0) for a in columns]
        table.add_row(name, str(row["n"]), *cells)
    table.add_section()
    ends = found["intervals"]
    cells = [_cell(result.accuracy(a), ends[key_of(result, a)]) for a in columns]
    table.add_row("all", str(result.n), *cells, style="bold")
    share = f"{100 * result.tail_share:.0f}"
    cells = [_cell(result.tail(a)[0], result.interval(a, "tail")[1:]) for a in result.attacks]
    table.add_row(f"RA-Tail-{share}", "", "", *cells)
    cells = [_cell(result.worst(a)[1], ends[f"worst_{key_of(result, a)}"]) for a in result.attacks]
    table.add_row("worst class", "", "", *cells)
    out.print(table)
    for attack in result.attacks:
        _say(out, f"tail under {columns[attack]}: {', '.join(result.tail(attack)[1])}")
    if result.autoattack:
        about = result.autoattack
        n = found["autoattack"]["n"] if "autoattack" in result.answers else "0"
        said = "".join(f"; {text}" for text in about["substitutions"])
        _say(
            out,
            f"{about['label']}: {about['reference']}, n = {n}, epsilon {about['epsilon']:.6g}, {about['norm']}{said}",
        )
    if result.trust:
        _panel(result.trust, out)


def _panel(trust: Any, out: Console) -> None:
    table = Table("check", "verdict", "what was found", title=f"can it be trusted? {trust['verdict']}")
    for line in trust["lines"]:
        style = {"suspicious": "red", "not measured": "dim"}.get(line["verdict"])
        table.add_row(line["name"], line["verdict"], line["text"], style=style)
    out.print(table)


def _cell(value: float | None, ends: Any, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} ({100 * ends[0]:.0f}–{100 * ends[1]:.0f})"


def _say(out: Console, text: str) -> None:
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def _columns() -> list[Any]:
    from doubly.runs.progress import bar_columns

    return bar_columns()


class _Watch:
    """A bar for PGD; for AutoAttack a line after each attack, with the time left."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self.console, self.progress = console, progress
        self.task: Any = None

    def say(self, sentence: str) -> None:
        _say(self.console, sentence)

    def images(self, done: int, of: int) -> None:
        if self.task is None:
            self.task = self.progress.add_task("attacking", total=of)
        self.progress.update(self.task, completed=done)

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
    table = Table(
        "", "n", "average", "tail", "worst class", "only first right", "only second right", "p (McNemar)",
        title=f"{options.first} minus {options.second}, points with 95 % intervals",
    )  # fmt: skip
    for row in differences(ours, theirs, options.resamples, options.seed):
        intervals = [f"{100 * i.value:+.1f} ({100 * i.low:+.1f} to {100 * i.high:+.1f})" for i in row[2:5]]
        test = row.test
        table.add_row(row.attack, str(row.n), *intervals, str(test.first_only), str(test.second_only), f"{test.p:.2g}")
    out.print(table)
    return 0
