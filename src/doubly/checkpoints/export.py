"""Write a trained network for other tools: a plain state dict, without prefixes, as safetensors."""

from pathlib import Path

from doubly.checkpoints.files import save_tensors
from doubly.checkpoints.load import load_run, load_trained_weights
from doubly.files import make_folder


def export_run(directory: Path, output: Path, checkpoint: str = "last") -> None:
    """Write the weights of a run directory's checkpoint.

    Names and tensors are those of `model.state_dict()`; the file's metadata names recipe and checkpoint.

    Args:
        directory: The run directory.
        output: The file to write.
        checkpoint: last or best.

    Raises:
        UsageError: If it is not a run directory, or there is no such checkpoint, or it is damaged.
    """
    metadata = {"format": "pt", "recipe": load_run(directory).name, "checkpoint": checkpoint}
    weights = load_trained_weights(directory, checkpoint)
    make_folder(output.parent)
    save_tensors(output, weights.tensors, metadata)
