"""A table of all metrics as one CSV file, for spreadsheets and pandas."""

import csv
import io
from pathlib import Path
from typing import Any, Self

from doubly.bridges.logger import Logger
from doubly.bridges.tensorboard import scalars
from doubly.files import make_folder, write_text
from doubly.text import escape_csv


class CSV(Logger):
    """Writes one line per epoch with every scalar and the accuracy of each class.

    The file is written whole after each epoch, since a validation adds columns. A resumed run keeps the lines of
    earlier epochs and writes later ones again. Use it as `train(…, callbacks=[CSV(folder)])`; the file is metrics.csv.
    """

    title = "CSV"

    @classmethod
    def in_run_dir(cls, path: Path) -> Self:
        """Return a logger that writes metrics.csv into a run directory."""
        return cls(path, path)

    @property
    def file(self) -> Path:
        """Path of the file."""
        return self.folder / "metrics.csv"

    def write(self, row: dict[str, Any]) -> None:
        """Write the file with this `row`."""
        epoch = row["epoch"]
        rows = [old for old in self._read() if int(old["epoch"]) < epoch]
        values = {escape_csv(name): repr(float(value)) for name, value in scalars(row).items()}
        rows.append({"epoch": str(epoch), **values})
        names = list(dict.fromkeys(name for old in rows for name in old))
        stream = io.StringIO()
        writer = csv.DictWriter(stream, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        make_folder(self.folder)
        write_text(self.file, stream.getvalue())

    def _read(self) -> list[dict[str, str]]:
        if not self.file.is_file():
            return []
        with self.file.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))
