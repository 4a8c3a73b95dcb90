"""doubly data fetch | inspect | imbalance."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from doubly.cli.options import DataRoot, parse_options, pop_flag
from doubly.cli.tables import print_line
from doubly.errors import UsageError
from doubly.files import make_folder, replacing, write_json
from doubly.text import escape_terminal

Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


def data(arguments: list[str], out: Console, err: Console) -> int:
    """Run one of the verbs of datasets."""
    is_help = arguments in (["-h"], ["--help"])
    if not arguments or is_help:
        for name, (summary, _) in DATA_VERBS.items():
            print_line(out, f"doubly data {name:10} {summary}")
        return 0 if is_help else 2
    if arguments[0] not in DATA_VERBS:
        raise UsageError(f"there is no verb 'data {arguments[0]}': valid are {', '.join(DATA_VERBS)}")
    DATA_VERBS[arguments[0]][1](arguments[1:], out)
    return 0


@dataclass(frozen=True)
class FetchOptions:
    """Download a dataset: what is missing is downloaded, checked by its checksum and unpacked. A download that was
    interrupted continues where it stopped."""

    name: Name
    """dataset"""
    data_root: Annotated[
        Path | None,
        tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: $DOUBLY_CACHE, or doubly in the user's cache)"),
    ] = None
    """folder to put it in"""
    offline: bool = False
    """use no network: unpack what is there, and list the files that are missing"""
    mirror: Annotated[
        str | None, tyro.conf.arg(metavar="URL", help_behavior_hint="(default: the published address)")
    ] = None
    """address of a folder with the same files"""


def fetch(arguments: list[str], out: Console) -> None:
    """Download a dataset."""
    options = parse_options(FetchOptions, arguments, "data fetch")
    from doubly.config.serialize import suggestion
    from doubly.data import DATASETS
    from doubly.data.download.dataset_files import data_folder
    from doubly.data.download.fetch import Listener
    from doubly.data.download.fetch import fetch as fetch_files
    from doubly.data.download.published import PUBLISHED

    if options.name not in PUBLISHED:
        is_local = options.name in DATASETS
        reason = ": it reads what you have" if is_local else suggestion(options.name, PUBLISHED)
        raise UsageError(f"there is nothing to fetch for '{options.name}'{reason}")
    root = data_folder(options.data_root)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=out, disable=not out.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def update_bar(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        listener = Listener(lambda line: print_line(bars.console, line), update_bar)
        fetch_files(PUBLISHED[options.name], root, offline=options.offline, mirror=options.mirror, listener=listener)
    print_line(out, f"now: doubly data inspect {options.name} --data-root {root}")


@dataclass(frozen=True)
class InspectOptions:
    """Print the classes of a dataset with their numbers of images, size and channel statistics; --picture FILE also
    draws some images of each class. For a recipe, it shows the training images that the recipe uses. --set FIELD=JSON
    changes a field of the dataset, as in --set size=32."""

    name: Name
    """dataset, recipe, folder of class folders, or .npz or .safetensors file"""
    data_root: DataRoot = None
    """folder with the dataset's files"""
    picture: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", aliases=["--output"], help_behavior_hint="(default: none)")
    ] = None
    """picture to draw, such as digits.png"""
    columns: int = 12
    """images per class in the picture"""


def inspect(arguments: list[str], out: Console) -> None:
    """Print the size of a dataset, and draw some images of each class if asked to."""
    words = list(arguments)
    changes = pop_flag(words, "--set")
    options = parse_options(InspectOptions, words, "data inspect")
    from doubly.cli.sources import run_for_source
    from doubly.data import load_splits, train_split
    from doubly.data.contact_sheet import contact_sheet
    from doubly.data.sources.decoding import SUFFIXES

    if options.columns < 1:
        raise UsageError(f"columns must be at least 1, got {options.columns}")
    picture = options.picture
    if picture is not None and picture.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{picture} is not the name of a picture: end it in .png")
    run = run_for_source(options.name, options.data_root, changes)
    splits = load_splits(run.data)
    train, test = train_split(run.data, splits).train, splits.test
    table = Table("class", "train", "test", title=escape_terminal(options.name))
    for name, *counts in zip(train.classes, train.counts().tolist(), test.counts().tolist(), strict=True):
        table.add_row(escape_terminal(name), *(f"{count:,}" for count in counts))
    table.add_section()
    table.add_row("all", f"{len(train):,}", f"{len(test):,}", style="bold")
    out.print(table)
    mean, std = train.channel_statistics()
    kind = "bytes" if str(train.x.dtype) == "torch.uint8" else "floats"
    shape = "x".join(map(str, train.x.shape[1:]))
    print_line(out, f"{shape} {kind}; training mean {_numbers(mean)}, standard deviation {_numbers(std)}")
    if splits.note:
        print_line(out, splits.note)
    if picture is not None:
        with replacing(picture) as file:
            contact_sheet(train, options.columns).save(file)
        print_line(out, f"wrote {picture}")


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


@dataclass(frozen=True)
class ImbalanceOptions:
    """Choose training images so that the classes are imbalanced, and write which, as one JSON file for each ratio. A
    run trains on these images with --set data.imbalance='{"kind": "imbalance.selected", "file": FILE}'.
    --set FIELD=JSON changes a field of the dataset."""

    name: Name
    """dataset, recipe, folder of class folders, or .npz or .safetensors file"""
    ratio: Annotated[tuple[float, ...], tyro.conf.arg(metavar="NUMBER…")]
    """share of its images that the smallest class keeps; several ratios make several files"""
    profile: Literal["step", "exponential"] = "step"
    """step: the first half of the classes loses images; exponential: each class keeps more than the one before it"""
    seed: int = 0
    """decides which images are kept"""
    data_root: DataRoot = None
    """folder with the dataset's files"""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path(".")
    """folder for the files"""


def imbalance(arguments: list[str], out: Console) -> None:
    """Write which training images are kept."""
    words = list(arguments)
    changes = pop_flag(words, "--set")
    options = parse_options(ImbalanceOptions, words, "data imbalance")
    from doubly.cli.sources import run_for_source
    from doubly.config.serialize import to_json
    from doubly.data import IMBALANCES, load_splits
    from doubly.data.imbalance import selection_file

    if not options.ratio:
        raise UsageError("give at least one --ratio, as in --ratio 0.1 0.2 0.5")
    imbalances = [IMBALANCES[options.profile](ratio, options.seed) for ratio in options.ratio]
    source = run_for_source(options.name, options.data_root, changes).data
    train = load_splits(source).train
    subsets = [train.subset(rule.keep(train.y, len(train.classes))) for rule in imbalances]  # all before any is written
    make_folder(options.output)
    for rule, subset in zip(imbalances, subsets, strict=True):
        path = (
            options.output
            / f"{Path(options.name).resolve().name}-{options.profile}-{rule.ratio!r}-s{options.seed}.json"
        )
        write_json(path, selection_file(subset, {"dataset": to_json(source.source), "imbalance": to_json(rule)}))
        counts = " ".join(map(str, subset.counts().tolist()))
        print_line(out, f"{path}: {len(subset):,} of {len(train):,} images are kept, by class {counts}")


DATA_VERBS: dict[str, tuple[str, Callable[[list[str], Console], None]]] = {
    "fetch": ("Download a dataset: doubly data fetch NAME [--data-root DIR]", fetch),
    "inspect": ("Count, and draw, the images of a dataset: doubly data inspect NAME [--picture FILE]", inspect),
    "imbalance": ("Choose images so that classes are imbalanced: doubly data imbalance NAME --ratio 0.2", imbalance),
}
