"""Runs: configuration, the loop, checkpoints, evaluation. `train` and `evaluate` are the calls from Python."""

from doubly.errors import Interrupted
from doubly.runs.config import SGD, Data, Probe, Run
from doubly.runs.from_python import Trained, train
from doubly.runs.load import load_model, load_run
from doubly.runs.loop import train_run
from doubly.runs.measure import evaluate
from doubly.runs.measure_run import evaluate_run
from doubly.runs.measuring import Measuring

__all__ = [
    "SGD",
    "Data",
    "Interrupted",
    "Measuring",
    "Probe",
    "Run",
    "Trained",
    "evaluate",
    "evaluate_run",
    "load_model",
    "load_run",
    "train",
    "train_run",
]
