"""The command line: doubly train | evaluate | report | … Each verb imports what it needs, so help comes at once."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from doubly import __version__
from doubly.cli.options import parsed, taken
from doubly.errors import Interrupted, ProcessLost, UsageError

OUT, ERR = Console(), Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, 2 for input that can be mended, 130 or 143 when stopped by a signal, 75
    where another process of the same run was lost."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"
    OUT.quiet = rank != "0"  # of the processes of torchrun the first one speaks
    name = "doubly" if rank == "0" else f"doubly, process {rank}"
    if not words or words[0] in ("-h", "--help"):
        _help()
        return 0 if words else 2
    if words[0] == "--version":
        OUT.print(f"doubly {__version__}", highlight=False)
        return 0
    try:
        if words[0] not in VERBS:
            raise UsageError(f"there is no verb '{words[0]}': valid are {', '.join(VERBS)}")
        if words[0] not in TOGETHER and os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                f"{words[0]} is for one process: leave torchrun away, which is for {' and '.join(TOGETHER)}"
            )
        return VERBS[words[0]](words[1:]) or 0
    except Interrupted as ending:
        ERR.print(f"{name}: {ending}", highlight=False, markup=False, soft_wrap=True)
        return 128 + ending.number
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except ProcessLost as lost:
        ERR.print(f"{name}: {lost}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 75
    except (UsageError, ArithmeticError, OSError) as problem:  # OSError: a full disk, a folder that may not be written
        ERR.print(f"{name}: {problem}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 2


def _help() -> None:
    table = Table("verb", "what it does", title="doubly: classifiers that hold on every class, not only on average")
    for name, verb in VERBS.items():
        table.add_row(name, (verb.__doc__ or "").splitlines()[0])
    OUT.print(table)
    OUT.print("doubly VERB --help shows the options of a verb; doubly --version the version.", highlight=False)


def train(arguments: list[str]) -> int:
    """Train a recipe: doubly train RECIPE --output DIR [--seed 1] [--epochs 60] [--method.cap 5] …

    Instead of a recipe, --config FILE takes a saved config.json. --set PATH=KIND or PATH=JSON replaces a whole part,
    as in --set method.attack.rule=step.adam. `doubly train RECIPE --help` lists every field, `doubly list recipes`
    the recipes.
    """
    if not arguments or arguments == ["--help"] or arguments == ["-h"]:
        OUT.print(train.__doc__, highlight=False, markup=False)
        return 0
    from doubly.callbacks import Callback
    from doubly.cli.progress import terminal_progress
    from doubly.jobs.signals import stop_on_signals
    from doubly.training.loop import train_run

    options, output = _train_options(arguments)
    if options.threads is not None:
        import torch

        if options.threads < 1:
            raise UsageError(f"threads must be at least 1, got {options.threads}")
        torch.set_num_threads(options.threads)
    run = options.run
    if options.dry_run:
        from doubly.cli.dry_run import dry_run

        return dry_run(run, output if options.resume else None, OUT, ERR)
    with stop_on_signals() as request, terminal_progress(OUT, run.epochs) as lines:
        callbacks: list[Callback] = [lines]
        if options.tensorboard:
            from doubly.bridges.tensorboard import TensorBoard

            callbacks.append(TensorBoard.in_run_dir(output))
        lines.on_message(f"{run.name}, seed {run.seed}, {run.epochs} epochs -> {output}")
        try:
            train_run(run, output, resume=options.resume, callbacks=callbacks, stop=request)
        except Interrupted as stopped:
            lines.on_message(f"{stopped}; saved: add --resume to continue")
            return 128 + (request.number or 2)
    OUT.print(f"trained; now: doubly evaluate {output}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _train_options(arguments: list[str]) -> tuple[Any, Path]:
    """Recipe or config, then replaced parts, then the flags."""
    import tyro

    from doubly.checkpoints.load import load_run
    from doubly.config import Run
    from doubly.config.serialize import from_json
    from doubly.config.user_code import UserModel

    @dataclass(frozen=True)
    class Options:
        """Train: every field of the run can be given, and …"""

        run: Annotated[Run, tyro.conf.arg(name="")]
        output: Path | None = None
        """run directory; runs/NAME-sSEED if not given"""
        resume: bool = False
        """go on from the run directory's checkpoint"""
        threads: int | None = None
        """CPU threads; all cores if not given"""
        dry_run: bool = False
        """say how long it would take here, from a calibration of a few seconds, and train nothing"""
        tensorboard: bool = False
        """also write curves for TensorBoard, to DIR/tensorboard; needs the extra doubly[tensorboard]"""
        data_root: str | None = None
        """folder with the dataset's files; the same as --data.root"""
        model: Annotated[str | None, tyro.conf.arg(name="model")] = None
        """package.module:function that returns your own network"""
        weights: str | None = None
        """weights to begin from, with --model"""

    words = list(arguments)
    configs, changes = taken(words, "--config"), taken(words, "--set")
    if words and not words[0].startswith("-"):
        from doubly.recipes import recipe

        base = recipe(words.pop(0))
        if configs:
            raise UsageError("give a recipe or --config FILE, not both")
    elif configs:
        base = from_json(_read(Path(configs[-1])), "config")
        if not isinstance(base, Run):
            raise UsageError(f"{configs[-1]} does not describe a run: give the config.json of a run directory")
    elif "--resume" in words and (place := taken(list(words), "--output")):
        base = load_run(Path(place[-1]))
    else:
        raise UsageError("name a recipe (`doubly list recipes` shows them), or give --config FILE")
    base = changed(base, changes)
    options = parsed(Options, words, "train RECIPE", Options(base))
    run = with_root(options.run, options.data_root)
    if options.model is not None:
        run = replace(run, model=UserModel(options.model, options.weights))
    elif options.weights is not None:
        raise UsageError("--weights goes with --model package.module:function")
    output = options.output or Path("runs") / f"{run.name}-s{run.seed}"
    return replace(options, run=run), output


def with_root(run: Any, root: str | None) -> Any:
    """The run with its data in that folder, wherever it is resumed or evaluated from."""
    return run if root is None else replace(run, data=replace(run.data, root=str(Path(root).resolve())))


def _read(path: Path) -> Any:
    from doubly.rundir import read_json

    return read_json(path)


def changed(run: Any, changes: list[str]) -> Any:
    """--set PATH=JSON, or PATH=KIND for a part with its defaults."""
    from doubly.config.serialize import KINDS, suggestion, with_change

    for change in changes:
        path, equals, text = change.partition("=")
        if not equals:
            raise UsageError(f"--set is written PATH=KIND or PATH=JSON, got '{change}'")
        try:
            value = text if text in KINDS else json.loads(text)
        except ValueError:
            raise UsageError(f"--set {path}: '{text}' is neither JSON nor a kind{suggestion(text, KINDS)}") from None
        run = with_change(run, path, value)
    return run


def evaluate(arguments: list[str]) -> int:
    """Measure a run, or any network: doubly evaluate DIR | --model M:F --weights FILE --data NAME [--autoattack]."""
    from doubly.cli.evaluate import evaluate as verb

    return verb(arguments, OUT, ERR)


def compare(arguments: list[str]) -> int:
    """Two evaluations of the same images: doubly compare DIR DIR."""
    from doubly.cli.compare import compare as verb

    return verb(arguments, OUT)


def watch(arguments: list[str]) -> int:
    """Running curves in the terminal: doubly watch DIR…"""
    from doubly.cli.watch import watch as verb

    return verb(arguments, OUT)


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def export(arguments: list[str]) -> int:
    """Write the trained weights as a plain state dict (safetensors) for other tools."""
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Write a plain state dict as safetensors; read it with safetensors.torch.load_file and load_state_dict."""

        directory: Annotated[Path, tyro.conf.Positional]
        """run directory"""
        output: Path
        """file to write, ending in .safetensors"""
        checkpoint: Literal["last", "best"] = "last"
        """last epoch, or best on the hold-out"""

    options = parsed(Options, arguments, "export")
    if options.output.suffix != ".safetensors":
        raise UsageError(f"{options.output} must end in .safetensors: doubly writes no pickles, which can execute code")
    from doubly.checkpoints.export import export_run

    export_run(options.directory, options.output, options.checkpoint)
    OUT.print(f"wrote {options.output}", highlight=False, markup=False, soft_wrap=True)
    return 0


def listing(arguments: list[str]) -> int:
    """Show what there is: doubly list methods|attacks|models|datasets|recipes|passes [BEGINNING]."""
    from doubly.attacks import ATTACKS
    from doubly.attacks.autoattack import AutoAttack
    from doubly.config.serialize import suggestion
    from doubly.data import DATASETS
    from doubly.methods import METHODS
    from doubly.models import MODELS
    from doubly.recipes import RECIPES

    def about(kind: type) -> str:
        return (kind.__doc__ or "").strip().splitlines()[0]

    if arguments == ["passes"]:
        from doubly.studies.passes import passes_table

        OUT.out(passes_table(), highlight=False)
        return 0
    tables: dict[str, Mapping[str, Any]] = {
        "methods": METHODS,
        "attacks": {**ATTACKS, "autoattack": AutoAttack},
        "models": MODELS,
        "datasets": DATASETS,
        "recipes": RECIPES,
    }
    if len(arguments) not in (1, 2) or arguments[0] in ("-h", "--help"):
        OUT.print(f"doubly list {'|'.join(tables)} [BEGINNING] | passes", markup=False, highlight=False)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    if arguments[0] not in tables:
        raise UsageError(f"there is no list of '{arguments[0]}'{suggestion(arguments[0], tables)}")
    beginning = arguments[1] if len(arguments) == 2 else ""
    for name, thing in tables[arguments[0]].items():
        if name.startswith(beginning):
            text = about(type(thing().method) if arguments[0] == "recipes" else thing)
            OUT.print(f"{name:40} {text}", highlight=False, markup=False, soft_wrap=True)
    return 0


def doctor(arguments: list[str]) -> int:
    """Versions, device, threads, and a self-check of a few seconds; --compile tries the compiler as well."""
    if arguments not in ([], ["--compile"]):
        OUT.print("doubly doctor takes no option but --compile, which also tries the compiler", highlight=False)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    from doubly.cli.doctor import examine

    table = Table("what", "found", show_header=False)
    healthy = True
    for name, text, fine in examine(bool(arguments)):
        table.add_row(name, text, style=None if fine else "red")
        healthy &= fine
    OUT.print(table)
    return 0 if healthy else 2


def report(arguments: list[str]) -> int:
    """Tables, figures and one page from run directories: doubly report RUN… --output DIR."""
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Collect run directories into tables, figures and one self-contained page."""

        runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
        """run directories, or folders that contain them"""
        output: Path = Path("report")
        """folder to write"""

    options = parsed(Options, arguments, "report")
    from doubly.report import Report
    from doubly.report.forms import show

    made = Report.of(options.runs)
    page = made.write(options.output)
    show(made.tables, OUT)
    OUT.print(f"wrote {page}", highlight=False, markup=False, soft_wrap=True)
    return 0


def search(arguments: list[str]) -> int:
    """Choose hyper-parameters on a hold-out: doubly search RECIPE [--trials 12] [--jobs 2] [--space FILE]."""
    import tyro

    @dataclass(frozen=True)
    class Options:
        """Try points of a grid on hold-outs of the training images; the test images take no part."""

        recipe: Annotated[str, tyro.conf.Positional]
        """recipe to begin from"""
        output: Path | None = None
        """folder for the trials; runs/search/RECIPE if not given"""
        trials: int = 12
        """points of the grid to try"""
        splits: int = 2
        """hold-outs to average over"""
        jobs: int = 2
        """processes, each with its share of the cores"""
        space: Path | None = None
        """JSON object from dotted field to a list of values; learning rate, epochs and weight decay if not given"""
        data_root: str | None = None
        """folder with the dataset's files"""

    options = parsed(Options, arguments, "search")
    from doubly.config.serialize import to_json, with_changes
    from doubly.jobs.search import Search, default_space, run_searches
    from doubly.recipes import recipe
    from doubly.rundir import write_json

    base = with_root(recipe(options.recipe), options.data_root)
    output = options.output or Path("runs") / "search" / options.recipe
    space = default_space(base) if options.space is None else _read(options.space)
    if not isinstance(space, dict) or not all(isinstance(values, list) and values for values in space.values()):
        raise UsageError(f'{options.space} must map dotted fields to lists of values, as {{"epochs": [40, 60]}}')
    (found,) = run_searches([Search(base, space, output, options.trials, options.splits)], options.jobs, OUT)
    table = Table("score", "RA-PGD", "RA-Tail-30", "SA", *space, title=f"{options.recipe}: hold-out, best first")
    for row in sorted(found["trials"], key=lambda row: -row["score"]):
        holdouts = [part for part in row["holdouts"] if part]
        means = [_percent(sum(p[k] for p in holdouts) / len(holdouts)) if holdouts else "failed" for k in _MEASURES]
        table.add_row(_percent(row["score"]), *means, *(str(value) for value in row["changes"].values()))
    OUT.print(table)
    write_json(output / "winner.json", to_json(with_changes(base, found["winner"])))
    OUT.print(f"now: doubly train --config {output / 'winner.json'}", highlight=False, markup=False, soft_wrap=True)
    return 0


_MEASURES = ("ra_pgd", "ra_tail_30", "sa")


def reproduce(arguments: list[str]) -> int:
    """Run a whole study and its report: doubly reproduce table1|…|figure6|cifar10|demo|digits [--scale small]."""
    from doubly.cli.reproduce import reproduce as verb

    return verb(arguments, OUT, ERR)


def data(arguments: list[str]) -> int:
    """Datasets: doubly data fetch|inspect|imbalance NAME."""
    from doubly.cli.data import data_verbs

    return data_verbs(arguments, OUT)


TOGETHER = ("train", "evaluate")  # verbs that several processes work on

VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "watch": watch,
    "evaluate": evaluate,
    "compare": compare,
    "report": report,
    "search": search,
    "reproduce": reproduce,
    "data": data,
    "export": export,
    "list": listing,
    "doctor": doctor,
}
