"""doubly frontier."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from doubly.cli.help import ShortHelp
from doubly.cli.options import parse_options
from doubly.cli.tables import print_frontiers, print_line
from doubly.errors import UsageError
from doubly.offsets.config import FrontierConfig, RepairConfig

if TYPE_CHECKING:
    from doubly.offsets.frontier import Frontier

HELP = ShortHelp(
    """\
usage: doubly frontier DIR… [OPTIONS]

Evaluate networks at several factors of their class offsets, which are fitted on held-out images,
and draw average against tail under attack on test images. Runs are compared with the first one.
Writes frontier.json into each run directory, which `doubly report` shows.""",
    {
        "networks": "checkpoint trust-code data-root",
        "perturbations": "epsilon norm",
        "the frontier": "factors attack* split images skip-images seed max-loss tail-share",
        "how the offsets are fitted": "repair.priority repair.*",
        "the run": "output device",
    },
)


@dataclass(frozen=True)
class FrontierOptions:
    """Evaluate networks at several factors of their class offsets, which are fitted on held-out images, and draw
    average against tail under attack on test images. Runs are compared with the first one. Writes frontier.json into
    each run directory, which `doubly report` shows; with --split validation frontier-validation.json, to choose by."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR…", help_behavior_hint="")] = ()
    """run directories, or folders that contain them; the others are compared with the first"""
    config: Annotated[FrontierConfig, tyro.conf.arg(name="")] = field(default_factory=FrontierConfig)
    """settings"""
    repair: RepairConfig = field(default_factory=RepairConfig)
    """how the offsets are fitted"""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("frontier")
    """folder for the picture, frontier.png and frontier.svg, and comparison.json"""
    max_loss: float = 0.005
    """how far the average may lie below that of the first run as trained, as a share, where tails are compared"""
    checkpoint: Literal["last", "best"] = "last"
    """checkpoint of a run: that of the last epoch, or of the best on the hold-out"""
    norm: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", aliases=["--threat"], help_behavior_hint="(default: that of the run)")
    ] = None
    """norm of the perturbations: linf, l2, or another name from `doubly list kinds threat`"""
    epsilon: Annotated[str | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="(default: that of the run)")] = (
        None
    )
    """radius of the threat, such as 8/255"""
    trust_code: bool = False
    """run the code that the run directories name; without it, a run from somebody else cannot execute anything"""
    device: str = "auto"
    """auto takes CUDA where there is one; or cpu, cuda, cuda:1, …"""
    data_root: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: that of the run)")] = (
        None
    )
    """folder with the dataset's files"""


def frontier(arguments: list[str], out: Console, err: Console) -> int:
    """Compute the frontiers of runs, print and draw them, and compare them with that of the first."""
    options = parse_options(FrontierOptions, arguments, "frontier", short_help=HELP)
    if not options.runs:
        raise UsageError("give at least one run directory that `doubly train` wrote")
    if not 0 <= options.max_loss < 1:
        raise UsageError(f"max_loss is a share in [0, 1), such as 0.005 for half a point, got {options.max_loss:g}")
    from doubly.cli.progress import terminal_progress
    from doubly.evaluation.io import check_folder
    from doubly.files import make_folder, write_json
    from doubly.jobs.signals import interrupt_on_signals
    from doubly.offsets.comparison import compare_runs
    from doubly.report.figures import frontier as draw
    from doubly.rundir import runs_in

    check_folder(options.output)
    paths = list(dict.fromkeys(run for path in options.runs for run in runs_in(path)))
    with interrupt_on_signals(), terminal_progress(err) as callback:
        frontiers = [_compute(options, path, callback) for path in paths]
    rows = compare_runs(frontiers, options.max_loss)
    print_frontiers(frontiers, rows, [str(path) for path in paths], out)
    make_folder(options.output)
    write_json(options.output / "comparison.json", [{"run": str(p), **row} for p, row in zip(paths, rows, strict=True)])
    draw(_by_label(frontiers), options.output / "frontier")
    print_line(out, f"wrote {_file_name(options.config.split)} into each run, and {options.output / 'frontier.png'}")
    return 0


def _compute(options: FrontierOptions, path: Path, callback: Any) -> "Frontier":
    from doubly.checkpoints.load import load_run
    from doubly.cli.sources import select_architecture, select_threat
    from doubly.offsets.frontier import frontier_run

    run = load_run(path)
    trained_threat = run.validation.attack.threat
    threat = select_threat(options.norm, options.epsilon, trained_threat)
    return frontier_run(
        path,
        checkpoint=options.checkpoint,
        architecture=select_architecture(None, run, options.trust_code),
        device=options.device,
        threat=None if threat == trained_threat else threat,
        root=options.data_root,
        config=options.config,
        repair=options.repair,
        callbacks=[callback],
    )


def _file_name(split: str) -> str:
    return "frontier.json" if split == "test" else "frontier-validation.json"


def _by_label(frontiers: list["Frontier"]) -> dict[str, list[dict[str, Any]]]:
    by_label: dict[str, list[dict[str, Any]]] = {}
    for one in frontiers:
        by_label.setdefault(one.label, []).append(one.summary)
    return by_label
