"""Curves for TensorBoard, which is an optional dependency and imported only when it is used."""

import warnings
from typing import TYPE_CHECKING, Any, cast

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from doubly.bridges.logger import Logger
from doubly.errors import UsageError
from doubly.metric_names import METRICS
from doubly.report.figures import style, values
from doubly.text import printable

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MAX_CLASSES = 100  # curves of classes: TensorBoard draws a chart for each


class TensorBoard(Logger):
    """Writes every row of metrics, and a picture of the accuracy of each class, for TensorBoard.

    Steps are epochs. The first row hides what the folder already has of its epoch and later ones, so that the curves of
    a resumed run have no point twice. Training closes it at its end; use it as
    `train(…, callbacks=[TensorBoard(folder)])`, or in a `Job` as `callbacks=(TensorBoard.in_run_dir,)`.

    Args:
        folder: Where the event files go; it is created with the first row.
        run_dir: The run directory, if there is one; nothing of it is written here.
        config: The configuration, likewise.

    Raises:
        UsageError: If the package is missing, or the folder is no path.
    """

    title = "TensorBoard"
    writer: "SummaryWriter | None" = None

    @classmethod
    def check_installed(cls) -> None:
        """Raise UsageError if the package is missing."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise UsageError(f"TensorBoard cannot be written ({error}): pip install 'doubly[tensorboard]'") from None

    def write(self, row: dict[str, Any]) -> None:
        """Write a `row` of metrics."""
        from torch.utils.tensorboard import SummaryWriter

        epoch = row["epoch"]
        if self.writer is None:  # not earlier, since a run starts in an empty directory
            self.writer = SummaryWriter(str(self.folder), purge_step=epoch)
        writer: Any = self.writer
        for tag, value in scalars(row).items():
            writer.add_scalar(tag, value, epoch)
        for alarm in row.get("alarms", ()):
            writer.add_text("alarms", printable(alarm), epoch)
        if "validation" in row:
            writer.add_image("per_class", bars(row["validation"]["per_class"], epoch), epoch, dataformats="HWC")
        writer.flush()  # so that it is visible at once

    def finish(self) -> None:
        """Close the event file; a later row opens a new one."""
        writer: Any = self.writer
        if writer is not None:
            writer.close()
            self.writer = None


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
    """Draw the accuracy of each class under attack as a picture (H, W, 3), weakest first; of many, the weakest.

    Args:
        per_class: Accuracy by class; None for a class without images.
        epoch: Number of the epoch, from 0, for the title.
    """
    accuracies = sorted((100 * value, printable(name)) for name, value in per_class.items() if value is not None)
    shown = accuracies[: values.MAX_DRAWN_CLASSES]
    with mpl.rc_context(cast(Any, style.STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # drawn as boxes
        figure = Figure(figsize=(5.4, 0.9 + 0.24 * max(3, len(shown))), dpi=100, layout="constrained")
        axes = figure.subplots()
        axes.barh(range(len(shown)), [value for value, _ in shown], color=style.COLORS[1])
        axes.set_yticks(range(len(shown)), [name if len(name) <= 24 else f"{name[:23]}…" for _, name in shown])
        axes.set(xlim=(0, 100), ylim=(max(3, len(shown)) - 0.4, -0.6), xlabel="accuracy under PGD (%)")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#8a8d93", alpha=0.3, linewidth=0.6)
        part = "" if len(shown) == len(accuracies) else f", {len(shown)} weakest of {len(accuracies):,} classes"
        axes.set_title(f"epoch {epoch + 1}{part}", fontsize=10)
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        return np.array(canvas.buffer_rgba())[..., :3]
