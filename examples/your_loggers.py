"""Log a run to CSV, and to W&B and MLflow where they are installed: scalars, accuracies of classes, pictures, files."""

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from sklearn.datasets import load_digits
from torch import nn, tensor

from doubly import AT, PGD, LinfBall, train
from doubly.bridges.csv import CSV
from doubly.bridges.mlflow import MLflow
from doubly.bridges.wandb import WandB

digits = load_digits()
data = (tensor(digits.images).float()[:, None] / 16, tensor(digits.target))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

with TemporaryDirectory() as folder:
    run = Path(folder) / "run"
    installed = [logger for name, logger in (("wandb", WandB), ("mlflow", MLflow)) if find_spec(name)]
    loggers = [logger.in_run_dir(run) for logger in (CSV, *installed)]
    method = AT(PGD(LinfBall(0.1), steps=2))
    train(model, data, method, epochs=3, output=run, callbacks=loggers, verbose=False)
    header, *lines = (run / "metrics.csv").read_text().splitlines()
    print(f"metrics.csv: {len(lines)} epochs, columns {header[:60]}…")
    for logger in loggers[1:]:
        files = [file for file in logger.folder.rglob("*") if file.is_file()]
        print(f"{logger.title}: {len(files)} files, {sum(file.stat().st_size for file in files) // 1024} kB")
    if len(loggers) == 1:
        print("for the others: pip install 'doubly[wandb,mlflow]'")
