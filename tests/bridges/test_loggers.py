"""What the loggers write, read back with the libraries' own readers; failures; and that training keeps its bits."""

import csv
import importlib.util
import os
import random
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from doubly.bridges.csv import CSV
from doubly.bridges.mlflow import MLflow
from doubly.bridges.tensorboard import TensorBoard, scalars
from doubly.bridges.wandb import WandB
from doubly.checkpoints import load_model
from doubly.cli import main
from doubly.config.serialize import with_changes
from doubly.errors import UsageError
from doubly.methods import Standard
from doubly.recipes import recipe
from doubly.rundir import read_metrics
from doubly.training.loop import train_run

SMALL = {"batch_size": 512, "model.width": 2, "validation.every": 2, "validation.size": 20, "device": "cpu"}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, which are not ours


def needs(package):
    """Skip where a library is not installed: it is an extra."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'doubly[{package}]'")


@pytest.fixture(scope="module")
def run():
    return with_changes(replace(recipe("digits.at"), method=Standard()), {**SMALL, "validation.attack.steps": 1})


@pytest.fixture(scope="module")
def plain(run, tmp_path_factory):
    """The directory of a run without a logger."""
    folder = tmp_path_factory.mktemp("plain")
    train_run(replace(run, epochs=3), folder)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_ERROR_REPORTING", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def logged_run(run, folder, logger):
    """Train three epochs with a logger; return the expected scalars by epoch."""
    train_run(replace(run, epochs=3), folder, callbacks=[logger.in_run_dir(folder)])
    return {row["epoch"]: scalars(row) for row in read_metrics(folder / "metrics.jsonl")}


def assert_same_weights(plain, folder):
    first, second = (load_model(path).state_dict() for path in (plain, folder))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_csv_has_a_line_per_epoch(run, plain, tmp_path):
    rows = logged_run(run, tmp_path, CSV)
    CSV.in_run_dir(tmp_path).on_epoch({"epoch": 2, "loss": 5.0})  # as a resumed run writes an epoch again
    with (tmp_path / "metrics.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [line["epoch"] for line in lines] == ["0", "1", "2"] and lines[2]["train/loss"] == "5.0"
    for line in lines[:2]:
        values = {name: float(text) for name, text in line.items() if name != "epoch" and text}
        assert values == rows[int(line["epoch"])]
    assert any(name.startswith("per_class/") for name in lines[0])
    assert_same_weights(plain, tmp_path)


def test_mlflow_keeps_scalars_configuration_pictures_and_files(run, plain, tmp_path):
    needs("mlflow")
    rows = logged_run(run, tmp_path, MLflow)
    again = MLflow.in_run_dir(tmp_path)
    again.on_epoch({"epoch": 1, "loss": 5.0})  # of a resumed run: it is there already
    again.on_epoch({"epoch": 3, "loss": 6.0, "validation": {"per_class": {"a b: <x>/..": 0.5, "\ud83d": None}}})
    again.close()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("doubly").experiment_id])
    history = [(m.step, m.value) for m in client.get_metric_history(kept.info.run_id, "train/loss")]
    assert history == [(epoch, values["train/loss"]) for epoch, values in rows.items()] + [(3, 6.0)]
    name = next(name for name in rows[1] if name.startswith("per_class/"))
    assert [m.step for m in client.get_metric_history(kept.info.run_id, name)] == [1, 2]
    assert kept.data.params["batch_size"] == "512" and kept.info.status == "FINISHED"
    files = {item.path for item in client.list_artifacts(kept.info.run_id)}
    assert {"config.json", "metrics.jsonl", "model.safetensors", "per_class"} <= files
    assert_same_weights(plain, tmp_path)


def wandb_records(content, block=32768):
    """Yield the records of a .wandb file, which is a log of LevelDB after seven bytes; W&B has no public reader."""
    position, record = 7, b""
    while position + 7 <= len(content):
        if block - position % block < 7:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_keeps_scalars_configuration_pictures_and_files_offline(run, plain, tmp_path):
    needs("wandb")
    rows = logged_run(run, tmp_path, WandB)
    from wandb.proto import wandb_internal_pb2

    (file,) = tmp_path.glob("wandb/wandb/offline-run-*/run-*.wandb")
    history, kinds, config = [], [], {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kinds.append(record.WhichOneof("record_type"))
        if kinds[-1] == "history":
            history.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
        if kinds[-1] == "run":
            config |= {item.key: item.value_json for item in record.run.config.update}
    assert [float(line["train/loss"]) for line in history] == [values["train/loss"] for values in rows.values()]
    assert config["batch_size"] == "512" and "artifact" in kinds and history[1]["classes/_type"] == '"image-file"'
    assert len(list(tmp_path.glob("wandb/wandb/offline-run-*/files/media/images/*.png"))) == 2
    assert_same_weights(plain, tmp_path)
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


class Broken(CSV):
    """Draws random numbers, as a library may, and fails at its second row."""

    def write(self, row):
        random.random(), np.random.rand(), torch.rand(1)
        if row["epoch"] == 1:
            raise ConnectionError("the server \x1b[31m is gone")

    def finish(self):
        raise ValueError("again")


def test_a_logger_that_fails_is_said_once_and_training_goes_on(run, plain, tmp_path):
    said = []
    logger = Broken.in_run_dir(tmp_path)
    logger.say = said.append
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    result = train_run(replace(run, epochs=3), tmp_path, callbacks=[logger])
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    reason = "ConnectionError: the server ?[31m is gone"
    assert said == [f"CSV failed and is left out from here on ({reason}); training goes on"]
    assert len(result.rows) == 3
    assert_same_weights(plain, tmp_path)
    with pytest.warns(UserWarning, match="CSV failed"):
        Broken(tmp_path).close()


def test_what_cannot_be_logged_is_refused_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for module in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    cases = [
        ("wandb", "pip install 'doubly[wandb]'"),
        ("mlflow", "pip install 'doubly[mlflow]'"),
        ("csv tensorboard", "pip install 'doubly[tensorboard]'"),
        ("comet", "there is no logger 'comet': --log takes csv, mlflow, tensorboard, wandb"),
    ]
    for names, sentence in cases:
        assert main(["train", "digits.at", "--output", "run", "--log", *names.split()]) == 2, names
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1 and not (tmp_path / "run").exists(), names
    for call, sentence in [(lambda: CSV(3), "a path, got int"), (lambda: WandB("x"), "pip install 'doubly")]:
        with pytest.raises(UsageError, match=sentence):
            call()


def test_several_loggers_of_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TensorBoard, "write", lambda self, row: 1 / 0)
    small = ["--epochs", "2", "--model.width", "2", "--method.attack.steps", "1", "--validation.size", "20"]
    words = ["train", "digits.at", "--output", "run", *small, "--threads", "1", "--log", "csv", "tensorboard"]
    assert main(words) == 0
    output = "".join(capsys.readouterr())
    assert " ".join(output.split()).count("TensorBoard failed and is left out") == 1
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3
