"""Checkpoints: write them, read them, and load a trained network from a run directory."""

from doubly.checkpoints.files import Checkpoint, find_checkpoint, load_checkpoint, save_checkpoint
from doubly.checkpoints.load import load_model, load_run

__all__ = ["Checkpoint", "find_checkpoint", "load_checkpoint", "load_model", "load_run", "save_checkpoint"]
