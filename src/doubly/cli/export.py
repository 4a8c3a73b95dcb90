"""doubly export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from doubly.cli.options import parse_options
from doubly.cli.tables import print_line
from doubly.errors import UsageError


@dataclass(frozen=True)
class ExportOptions:
    """Write the trained weights of a run as a plain state dict, for other tools. Read it with
    safetensors.torch.load_file and load_state_dict."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """run directory"""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """file to write, ending in .safetensors"""
    checkpoint: Literal["last", "best"] = "last"
    """checkpoint of the last epoch, or of the best on the hold-out"""


def export(arguments: list[str], out: Console, err: Console) -> int:
    """Write the weights of a run directory."""
    options = parse_options(ExportOptions, arguments, "export")
    if options.output.suffix == ".onnx":
        raise UsageError(
            f"{options.output}: doubly exports weights, not graphs: write a .safetensors file, or in Python call "
            f"torch.onnx.export(doubly.checkpoints.load_model(Path('{options.directory}')), images, '{options.output}')"
        )
    if options.output.suffix != ".safetensors":
        raise UsageError(f"{options.output} must end in .safetensors: doubly writes no pickles, which can execute code")
    from doubly.checkpoints.export import export_run

    export_run(options.directory, options.output, options.checkpoint)
    print_line(out, f"wrote {options.output}")
    return 0
