"""Write a trained network as a graph, for ONNX Runtime or `torch.export.load`, and check that it computes the same."""

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from doubly.bridges.logger import require
from doubly.checkpoints.load import load_model_and_info, load_run
from doubly.config.run import Run
from doubly.data import load_splits
from doubly.errors import UsageError
from doubly.files import make_folder, replacing
from doubly.models import Model
from doubly.text import printable

TOLERANCE = 1e-4  # of the logits, relative to the largest where that is above 1
CHECKED_IMAGES = 32


class Exported(NamedTuple):
    """What was written.

    Attributes:
        path: The file.
        shape: Shape of an image, (channels, height, width).
        difference: Largest difference of the logits to those of the network.
        images: Which images it was checked on, in words.
    """

    path: Path
    shape: tuple[int, ...]
    difference: float
    images: str


def export_graph(
    directory: Path, output: Path, form: str, checkpoint: str = "last", architecture: Model | None = None
) -> Exported:
    """Write the network of a run as a graph from images in [0, 1], (N, C, H, W), to logits.

    Args:
        directory: The run directory.
        output: The file to write.
        form: onnx or torch_export.
        checkpoint: last or best.
        architecture: What builds the network, if not the run's own configuration.

    Returns:
        The file, and how far its logits are from those of the network.

    Raises:
        UsageError: If the package is missing, there is no such checkpoint, the network cannot be written as a graph, or
            the graph computes something else.
    """
    if form == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require(package, "ONNX", "onnx")
    model, info = load_model_and_info(directory, checkpoint, architecture)
    model.eval().requires_grad_(False)
    x, images = run_images(load_run(directory), info)
    make_folder(output.parent)
    with replacing(output) as unfinished:
        write, run = (_write_onnx, _run_onnx) if form == "onnx" else (_write_torch, _run_torch)
        try:
            with _quiet():
                write(model, x[:2], unfinished, [str(name) for name in info["classes"]])
        except Exception as error:  # an exporter has many; the network may be of the user
            raise UsageError(
                f"the network cannot be written as {form} ({_reason(error)}): change what its forward pass does in "
                "Python, or export the weights as .safetensors"
            ) from None
        difference = _difference(model, x, lambda images: run(unfinished, images))
    return Exported(output, tuple(x.shape[1:]), difference, images)


def run_images(run: Run, info: dict[str, Any]) -> tuple[Tensor, str]:
    """Return some test images of a run, and what they are; noise of the stored size where the data are not here.

    Args:
        run: The configuration.
        info: The state.json of a checkpoint.

    Raises:
        UsageError: If the data cannot be read and the checkpoint does not keep the size of its images.
    """
    try:
        test = load_splits(run.data).test
        return test.pixels(slice(0, CHECKED_IMAGES)).float(), "test images"
    except UsageError as error:
        size = info.get("image_size")
        if not size:
            raise UsageError(f"the size of the images is not known: {error}") from None
        shape = (CHECKED_IMAGES, int(info["channels"]), *map(int, size))
        return torch.rand(
            shape, generator=torch.Generator().manual_seed(0)
        ), "images of noise, since the data are not here"


def _difference(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> float:
    """Return the largest difference of the logits, in a batch and for one image; refuse a large one."""
    worst = 0.0
    for part in (x, x[:1]):
        with torch.no_grad():
            expected = model(part)
        difference = float((run(part) - expected).abs().max())
        if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
            raise UsageError(
                f"the graph's logits differ from those of the network by {difference:.2g}, allowed are {TOLERANCE:g}: "
                "nothing is written; export the weights as .safetensors"
            )
        worst = max(worst, difference)
    return worst


def _write_onnx(model: nn.Module, x: Tensor, path: Path, classes: list[str]) -> None:
    batch = torch.export.Dim.DYNAMIC
    program: Any = torch.onnx.export(
        model,
        (x,),
        dynamo=True,
        dynamic_shapes=({0: batch},),
        input_names=["images"],
        output_names=["logits"],
        verbose=False,
    )
    proto = program.model_proto
    facts = {"classes": json.dumps(classes), "input": "pixels in [0, 1]; normalization is part of the graph"}
    for key, value in facts.items():
        proto.metadata_props.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())


def _run_onnx(path: Path, x: Tensor) -> Tensor:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(np.asarray(session.run(["logits"], {"images": x.numpy()})[0]))


def _write_torch(model: nn.Module, x: Tensor, path: Path, classes: list[str]) -> None:
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    program.example_inputs = None  # they would be pickled into the file
    torch.export.save(program, path, extra_files={"classes.json": json.dumps(classes)})


def _run_torch(path: Path, x: Tensor) -> Tensor:
    with _quiet():
        logits: Tensor = torch.export.load(path).module()(x)
    return logits


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters from printing their progress and warnings about torch's own code."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _reason(error: Exception) -> str:
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0])[:160]
