"""Runs for MLflow, which is an optional dependency and imported only when it is used."""

import os
from typing import Any

from doubly.bridges.logger import Logger, require
from doubly.bridges.tensorboard import bars, scalars
from doubly.report.protocol import flatten
from doubly.text import printable

MAX_VALUE = 500  # characters of a parameter that every store of MLflow takes
RUN_DIR = "doubly.run_dir"


class MLflow(Logger):
    """Writes metrics, a picture of the classes, the configuration and the trained weights as a run of MLflow.

    It goes to the server that MLFLOW_TRACKING_URI names, else to files in the folder, which
    `mlflow ui --backend-store-uri FOLDER` shows. Steps are epochs. A resumed run continues the run of its folder.
    Use it as `train(…, callbacks=[MLflow(folder)])`.
    """

    title = "mlflow"
    experiment = "doubly"
    client: Any = None
    run_id = ""

    @classmethod
    def check_installed(cls) -> None:
        """Raise UsageError if the package is missing."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would report the usage to its makers
        require("mlflow", "MLflow", "mlflow")

    def write(self, row: dict[str, Any]) -> None:
        """Log a `row` of metrics."""
        from mlflow.entities import Metric

        if self.client is None:
            self._begin()
        epoch, logged = row["epoch"], self.client.get_run(self.run_id).data.metrics.get("epoch", -1)
        if epoch <= logged:  # a resumed run repeats the epochs after its checkpoint, with the same numbers
            return
        values = {"epoch": float(epoch), **scalars(row)}
        metrics = [Metric(_key(name), value, 0, epoch) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics)
        if "validation" in row:
            picture = bars(row["validation"]["per_class"], epoch)
            self.client.log_image(self.run_id, picture, f"per_class/epoch-{epoch:04}.png")

    def _begin(self) -> None:
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:  # files need no server; MLflow asks to say that they are wanted
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self.folder.mkdir(parents=True, exist_ok=True)
            uri = self.folder.resolve().as_uri()
        client, config, place = MlflowClient(tracking_uri=uri), self.read_config(), str(self.folder.resolve())
        experiment = client.get_experiment_by_name(self.experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(self.experiment)
        same = [run for run in client.search_runs([number]) if run.data.tags.get(RUN_DIR) == place]
        if same:
            self.run_id = same[0].info.run_id
            client.update_run(self.run_id, status="RUNNING")
        else:
            name = f"{config.get('name', 'run')}-s{config.get('seed', 0)}"
            self.run_id = client.create_run(number, run_name=name, tags={RUN_DIR: place}).info.run_id
            for key, value in flatten(config).items():
                client.log_param(self.run_id, _key(key), str(value)[:MAX_VALUE])
        self.client = client

    def finish(self) -> None:
        """Log the files of the run, and end it."""
        if self.client is None:
            return
        client, self.client = self.client, None
        try:
            for file in self.artifacts():
                client.log_artifact(self.run_id, str(file))
        finally:
            client.set_terminated(self.run_id, "FINISHED" if self.is_complete else "KILLED")


def _key(name: str) -> str:
    """Return a name that MLflow takes: letters, digits and some marks; names of classes come from data."""
    kept = "".join(mark if mark.isalnum() or mark in "_-. /" else "_" for mark in printable(name))
    return "/".join(part.strip(". ") or "_" for part in kept.split("/"))[:250]
