"""doubly data fetch | inspect | imbalance."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from doubly.cli.options import parsed, taken
from doubly.cli.sources import run_of
from doubly.errors import UsageError


def data_verbs(arguments: list[str], out: Console) -> int:
    asks = arguments in (["-h"], ["--help"])
    if not arguments or asks:
        for name, verb in VERBS.items():
            out.print(f"{name:10} {(verb.__doc__ or '').splitlines()[0]}", highlight=False, markup=False)
        return 0 if asks else 2
    if arguments[0] not in VERBS:
        raise UsageError(f"there is no verb 'data {arguments[0]}': valid are {', '.join(VERBS)}")
    VERBS[arguments[0]](arguments[1:], out)
    return 0


def fetch(arguments: list[str], out: Console) -> None:
    """Download a dataset: doubly data fetch NAME [--data-root DIR]."""
    import tyro

    from doubly.config.serialize import suggestion
    from doubly.data import DATASETS
    from doubly.data.download.dataset_files import data_folder
    from doubly.data.download.fetch import Listener
    from doubly.data.download.fetch import fetch as fetch_files
    from doubly.data.download.published import PUBLISHED

    @dataclass(frozen=True)
    class Options:
        """Download what is missing, judge it by its checksum, unpack it. A cut download goes on where it stopped."""

        name: Annotated[str, tyro.conf.Positional]
        """dataset"""
        data_root: Path | None = None
        """folder to put it in; $DOUBLY_CACHE, or doubly in the user's cache, if not given"""
        offline: bool = False
        """use no network: unpack what is there, or say which files are missing"""
        mirror: str | None = None
        """address of a folder that has the same files"""

    options = parsed(Options, arguments, "data fetch")
    if options.name in DATASETS and options.name not in PUBLISHED:
        raise UsageError(f"there is nothing to fetch for '{options.name}': it reads what you have")
    if options.name not in PUBLISHED:
        raise UsageError(f"there is nothing to fetch for '{options.name}'{suggestion(options.name, PUBLISHED)}")
    root = data_folder(options.data_root)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=out, disable=not out.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int, whole: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=whole)
            bars.update(tasks[name], completed=done, total=whole)

        def say(line: str) -> None:
            bars.console.print(line, highlight=False, markup=False, soft_wrap=True)

        fetch_files(
            PUBLISHED[options.name],
            root,
            offline=options.offline,
            mirror=options.mirror,
            listener=Listener(say, progress),
        )
    out.print(
        f"now: doubly data inspect {options.name} --data-root {root}", highlight=False, markup=False, soft_wrap=True
    )


def inspect(arguments: list[str], out: Console) -> None:
    """Counts, shapes, channel means and a contact sheet: doubly data inspect NAME|RECIPE [--data-root DIR]."""
    import tyro

    from doubly.data import load_splits, train_split
    from doubly.data.contact_sheet import contact_sheet
    from doubly.data.sources.decoding import SUFFIXES

    @dataclass(frozen=True)
    class Options:
        """Show a dataset, or what a recipe makes of it. --set FIELD=JSON changes a field of it, as in --set size=32."""

        name: Annotated[str, tyro.conf.Positional]
        """dataset or recipe"""
        data_root: str | None = None
        """folder with its files"""
        output: Path | None = None
        """contact sheet to draw; NAME.png if not given"""
        columns: int = 12
        """images per class on the contact sheet"""

    words = list(arguments)
    changes = taken(words, "--set")
    options = parsed(Options, words, "data inspect")
    if options.columns < 1:
        raise UsageError(f"columns must be at least 1, got {options.columns}")
    sheet = options.output or Path(f"{options.name}.png")
    if sheet.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{sheet} names no kind of picture: end it in .png")
    run = run_of(options.name, options.data_root, changes)
    splits = load_splits(run.data)
    train, test = train_split(run.data, splits).train, splits.test
    table = Table("class", "train", "test", title=options.name)
    for name, *counts in zip(train.classes, train.counts().tolist(), test.counts().tolist(), strict=True):
        table.add_row(name, *(f"{count:,}" for count in counts))
    table.add_section()
    table.add_row("all", f"{len(train):,}", f"{len(test):,}", style="bold")
    out.print(table)
    mean, std = train.channel_statistics()
    kind = "bytes" if str(train.x.dtype) == "torch.uint8" else "floats"
    shape = "x".join(map(str, train.x.shape[1:]))
    for line in (
        f"{shape} {kind}; training mean {_numbers(mean)}, standard deviation {_numbers(std)}",
        *([splits.note] if splits.note else []),
    ):
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    contact_sheet(train, options.columns).save(sheet)
    out.print(f"wrote {sheet}", highlight=False, markup=False, soft_wrap=True)


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def imbalance(arguments: list[str], out: Console) -> None:
    """Write which training images stay: doubly data imbalance NAME --ratio 0.2 [--profile step|exponential]."""
    import tyro

    from doubly.config.serialize import to_json
    from doubly.data import IMBALANCES, load_splits
    from doubly.data.imbalance import selection_file
    from doubly.rundir import write_json

    @dataclass(frozen=True)
    class Options:
        """One JSON for each ratio, to be shared, and named by a run: --set
        data.imbalance='{"kind": "imbalance.selected", "file": FILE}'. --set FIELD=JSON changes a field of the
        dataset."""

        name: Annotated[str, tyro.conf.Positional]
        """dataset or recipe"""
        ratio: tuple[float, ...]
        """share of the images that the smallest class keeps; several make several files"""
        profile: Literal["step", "exponential"] = "step"
        """step: the first half of the classes loses images; exponential: less and less from the first to the last"""
        seed: int = 0
        """which images stay"""
        data_root: str | None = None
        """folder with its files"""
        output: Path = Path(".")
        """folder for the files"""

    words = list(arguments)
    changes = taken(words, "--set")
    options = parsed(Options, words, "data imbalance")
    if not options.ratio:
        raise UsageError("give at least one --ratio, as in --ratio 0.1 0.2 0.5")
    kinds = [IMBALANCES[options.profile](ratio, options.seed) for ratio in options.ratio]
    run = run_of(options.name, options.data_root, changes)
    train = load_splits(run.data).train
    chosen = [train.subset(kind.keep(train.y, len(train.classes))) for kind in kinds]  # all before any is written
    options.output.mkdir(parents=True, exist_ok=True)
    for kind, kept in zip(kinds, chosen, strict=True):
        path = options.output / f"{options.name}-{options.profile}-{kind.ratio!r}-s{options.seed}.json"
        write_json(path, selection_file(kept, {"dataset": to_json(run.data.source), "imbalance": to_json(kind)}))
        counts = " ".join(map(str, kept.counts().tolist()))
        line = f"{path}: {len(kept):,} of {len(train):,} images stay, by class {counts}"
        out.print(line, highlight=False, markup=False, soft_wrap=True)


VERBS: dict[str, Callable[[list[str], Console], None]] = {"fetch": fetch, "inspect": inspect, "imbalance": imbalance}
