"""The files of a repair: a network that others can load, as safetensors, and JSON that says what was done."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from doubly.checkpoints import Checkpoint, find_checkpoint, load_run, save_checkpoint
from doubly.checkpoints.files import save_tensors
from doubly.config.serialize import to_json
from doubly.config.user_code import WithOffsets
from doubly.errors import UsageError
from doubly.evaluation.io import check_folder
from doubly.files import make_folder, write_bytes, write_json
from doubly.models import Model
from doubly.offsets.result import RepairResult
from doubly.reading import read_tree
from doubly.rundir import RunDir
from doubly.text import method_label

WEIGHTS = "weights.safetensors"
LABEL = "{} repaired"
UNFINISHED = {"checkpoints", "environment.json", "metrics.jsonl", "repair.json"}  # config.json is written last


def check_output(folder: Path) -> None:
    """Refuse an output that cannot be written or already holds something, before the work.

    Raises:
        UsageError: If so.
    """
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()) and not _is_unfinished(folder):
        raise UsageError(f"{folder} is not empty: choose another --output, or delete it")


def _is_unfinished(folder: Path) -> bool:
    """Return whether a folder holds what a repair left that was killed while it wrote, and nothing else."""
    if not {path.name for path in folder.iterdir() if not path.name.startswith(".")} <= UNFINISHED:
        return False
    last = find_checkpoint(RunDir(folder).checkpoints, "last")
    return last is None or read_tree(last / "state.json").get("repaired") is True


def write_network(result: RepairResult, folder: Path) -> None:
    """Write weights.safetensors and repair.json.

    Raises:
        UsageError: If the folder cannot be written.
    """
    check_folder(folder)
    make_folder(folder)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in result.model.state_dict().items()}
    save_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(RunDir(folder).repair, result.summary())


def write_run_dir(
    result: RepairResult, source: Path, folder: Path, info: dict[str, Any], architecture: Model | None
) -> None:
    """Write a run directory of the repaired network, which `doubly evaluate` and `doubly report` take.

    Args:
        result: The repair.
        source: The run directory of the network as it was.
        folder: The run directory to write.
        info: state.json of its checkpoint.
        architecture: What builds the network, if not the run's own configuration.
    """
    run = load_run(source)
    model = architecture or run.model
    label = LABEL.format(run.label or method_label(run.name))
    repaired = replace(run, label=label, ema_decay=None, model=model if result.layer else WithOffsets(model))
    make_folder(folder)
    kept = {name: value for name, value in info.items() if name not in ("schema", "checksums", "config_sha256")}
    checkpoint = Checkpoint({"model": dict(result.model.state_dict())}, {**kept, "repaired": True})
    save_checkpoint(RunDir(folder).checkpoints, "last", checkpoint)
    for file in (RunDir(source).environment, RunDir(source).metrics):
        if file.is_file():
            write_bytes(folder / file.name, file.read_bytes())
    write_json(RunDir(folder).repair, result.summary())
    write_json(RunDir(folder).config, to_json(repaired))  # last: a folder with a config.json is a complete run
