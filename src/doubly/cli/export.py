"""doubly export."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from doubly.cli.options import parse_options
from doubly.cli.tables import print_line
from doubly.errors import UsageError

if TYPE_CHECKING:
    from doubly.models import Model

FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2"}


@dataclass(frozen=True)
class ExportOptions:
    """Write the trained network of a run for other tools. A .safetensors file holds the weights as a plain state dict,
    for safetensors.torch.load_file and load_state_dict. An .onnx file is the graph for ONNX Runtime, a .pt2 file that
    of torch.export; both are checked against the network on test images."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """run directory"""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """file to write, ending in .safetensors, .onnx or .pt2"""
    format: Literal["auto", "safetensors", "onnx", "torch_export"] = "auto"
    """auto follows from the end of the file's name"""
    checkpoint: Literal["last", "best"] = "last"
    """checkpoint of the last epoch, or of the best on the hold-out"""
    model: Annotated[
        str | None, tyro.conf.arg(metavar="M:F", help_behavior_hint="(default: the network of the run)")
    ] = None
    """package.module:function that builds your network, for a graph"""
    trust_code: bool = False
    """run the code that the run directory names; a graph of your own network needs it, weights do not"""


def export(arguments: list[str], out: Console, err: Console) -> int:
    """Write the weights or the graph of a run directory."""
    options = parse_options(ExportOptions, arguments, "export")
    form = _format(options)
    if form == "safetensors":
        from doubly.checkpoints.export import export_run

        export_run(options.directory, options.output, options.checkpoint)
        print_line(out, f"wrote {options.output}")
        return 0
    from doubly.bridges.graphs import export_graph

    written = export_graph(options.directory, options.output, form, options.checkpoint, network_of(options))
    shape = " × ".join(map(str, written.shape))
    print_line(
        out,
        f"wrote {options.output}: images (N × {shape}) in [0, 1] to logits; largest difference to the network "
        f"{written.difference:.1g} on {written.images}",
    )
    return 0


def _format(options: ExportOptions) -> str:
    suffix = options.output.suffix
    if suffix not in FORMATS.values():
        raise UsageError(
            f"{options.output} must end in .safetensors, .onnx or .pt2: doubly writes no pickles, which can execute "
            "code"
        )
    form = next(name for name, ending in FORMATS.items() if ending == suffix)
    if options.format not in ("auto", form):
        raise UsageError(f"--format {options.format} writes {FORMATS[options.format]} files, got {options.output}")
    return form


def network_of(options: ExportOptions) -> "Model | None":
    """Return what builds the network where it is not the run's own configuration; None if it is."""
    from doubly.checkpoints.load import load_run
    from doubly.config.serialize import trust_code
    from doubly.config.user_code import UserModel

    if options.model is not None:
        return UserModel(options.model)
    run = load_run(options.directory)
    model: Model = (trust_code(run) if options.trust_code else run).model
    model.require_trusted()
    return model if options.trust_code else None
