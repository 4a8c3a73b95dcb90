"""The configuration of a run: the tree of settings, its JSON form, and code named by the user."""

from doubly.config.optimizers import SGD, Adam, AdamW, OptimizerConfig
from doubly.config.run import Run, Validation
from doubly.data import Data

__all__ = ["SGD", "Adam", "AdamW", "Data", "OptimizerConfig", "Run", "Validation"]
