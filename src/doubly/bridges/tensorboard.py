"""Curves for TensorBoard. The package is an extra, and is imported when it is asked for."""

import warnings
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.metric_names import METRICS
from doubly.report.figures import style, values
from doubly.text import printable
from doubly.training.loop import Callback, NullCallback

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MAX_CLASSES = 100  # curves of classes: TensorBoard draws a chart for each


class TensorBoard:
    """A watch that writes every row of metrics into `folder`, and passes all on: train(…, watch=TensorBoard(folder)).

    Steps are epochs. The first row hides what the folder holds of its epoch and later ones, so that a resumed run has
    no point twice.
    """

    def __init__(self, folder: Path | str, watch: Callback | None = None) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as problem:
            raise UsageError(f"TensorBoard cannot be written ({problem}): pip install 'doubly[tensorboard]'") from None
        self.folder, self.watch = Path(folder), watch or NullCallback()
        self.writer: SummaryWriter | None = None

    def step(self, epoch: int, step: int, steps: int) -> None:
        self.watch.step(epoch, step, steps)

    def say(self, sentence: str) -> None:
        self.watch.say(sentence)

    def row(self, row: dict[str, Any]) -> None:
        if parallel.world()[0] == 0:
            self._write(row, row["epoch"])
        self.watch.row(row)

    def _write(self, row: dict[str, Any], epoch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is None:  # not earlier: a run begins in an empty directory
            self.writer = SummaryWriter(str(self.folder), purge_step=epoch)
        writer: Any = self.writer
        for tag, value in scalars(row).items():
            writer.add_scalar(tag, value, epoch)
        for sentence in row.get("alarms", ()):
            writer.add_text("alarms", printable(sentence), epoch)
        if "validation" in row:
            writer.add_image("per_class", bars(row["validation"]["per_class"], epoch), epoch, dataformats="HWC")
        writer.flush()  # so that it can be seen now

    def close(self) -> None:
        writer: Any = self.writer
        if writer is not None:
            writer.close()
            self.writer = None

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: object, trace: TracebackType | None) -> None:
        self.close()


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return tag -> value for a row of metrics; a class without images has no value."""
    parts = {"train": row, "validation": row.get("validation", {})}
    result = {
        f"{part}/{metric.key}": value
        for part, record in parts.items()
        for metric in METRICS.values()
        if (value := metric.value(record)) is not None
    }
    classes = list(parts["validation"].get("per_class", {}).items())[:MAX_CLASSES]  # the same ones in every epoch
    return result | {f"per_class/{printable(name)}": value for name, value in classes if value is not None}


def bars(per_class: dict[str, float | None], epoch: int) -> npt.NDArray[np.uint8]:
    """A picture (H,W,3) of the accuracy of each class under attack, weakest first; of many, those that can be read."""
    known = sorted((100 * value, printable(name)) for name, value in per_class.items() if value is not None)
    shown = known[: values.MAX_DRAWN_CLASSES]
    with mpl.rc_context(cast(Any, style.STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # boxes serve
        figure = Figure(figsize=(5.4, 0.9 + 0.24 * max(3, len(shown))), dpi=100, layout="constrained")
        axes = figure.subplots()
        axes.barh(range(len(shown)), [value for value, _ in shown], color=style.COLORS[1])
        axes.set_yticks(range(len(shown)), [name if len(name) <= 24 else f"{name[:23]}…" for _, name in shown])
        axes.set(xlim=(0, 100), ylim=(max(3, len(shown)) - 0.4, -0.6), xlabel="accuracy under PGD (%)")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#8a8d93", alpha=0.3, linewidth=0.6)
        of = "" if len(shown) == len(known) else f", {len(shown)} weakest of {len(known):,} classes"
        axes.set_title(f"epoch {epoch + 1}{of}", fontsize=10)
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        return np.array(canvas.buffer_rgba())[..., :3]
