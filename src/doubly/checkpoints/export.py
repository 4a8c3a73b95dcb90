"""A trained network for other tools: a plain state dict, without prefixes, as safetensors."""

from pathlib import Path

import safetensors.torch

from doubly.checkpoints.load import load_run, trained_weights


def export_run(directory: Path, output: Path, which: str = "last") -> None:
    """Names and tensors as in `model.state_dict()`; the metadata says what it is."""
    about = {"format": "pt", "recipe": load_run(directory).name, "checkpoint": which}
    tensors, _, _ = trained_weights(directory, which)
    output.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, output, about)
