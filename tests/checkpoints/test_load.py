"""Load the configuration and the trained network of a run directory."""

import time
from dataclasses import replace

import pytest
import safetensors
import torch

import doubly.checkpoints.files as files
import doubly.checkpoints.load as loading
from doubly.checkpoints import load_model, load_run
from doubly.checkpoints.export import export_run
from doubly.checkpoints.files import seal_checkpoint
from doubly.checkpoints.load import config_difference, load, load_model_and_info, load_trained_weights
from doubly.config.serialize import to_json
from doubly.config.user_code import UserModel
from doubly.data import Images, Splits
from doubly.errors import UsageError
from doubly.models import NarrowResNet, SmallCNN
from doubly.rundir import read_json, write_json


@pytest.fixture
def trained(tiny, tmp_path):
    """Train a small network on larger images, with an average of its weights."""
    images = [Images.of(part.x.repeat(1, 1, 2, 2), part.y) for part in (tiny.splits.train, tiny.splits.test)]
    run = replace(tiny.run(ema_decay=0.5, epochs=1, holdout=0.2), model=SmallCNN(2))
    tiny.train(run, tmp_path / "run", model=None, splits=Splits(*images))
    return run, tmp_path / "run"


def test_the_trained_network_is_the_average_if_there_is_one(tiny, trained, tmp_path, same_bits):
    run, path = trained
    before = torch.get_rng_state()
    model, info = load_model_and_info(path, "last", None)
    assert torch.equal(torch.get_rng_state(), before)
    tensors, expected_info = tiny.checkpoint(path)
    average = {name[4:]: value for name, value in tensors.items() if name.startswith("ema/")}
    assert info == expected_info and same_bits(dict(model.state_dict()), average)
    assert same_bits(dict(load_model(path).state_dict()), average)
    assert load_run(path) == run
    export_run(path, tmp_path / "out" / "weights.safetensors")
    with safetensors.safe_open(tmp_path / "out" / "weights.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "recipe": run.name, "checkpoint": "last"}
        assert same_bits({name: file.get_tensor(name) for name in file.keys()}, average)  # noqa: SIM118 - no mapping


def test_without_an_average_the_network_itself_is_loaded_also_by_a_function_of_the_user(tiny, tmp_path, monkeypatch):
    tiny.train(tiny.run(), tmp_path / "run")
    name = f"user_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"handed in from Python: name the function that builds it with --model"):
        load_model(tmp_path / "run")
    # The weights that it would begin from need not be there any more.
    model = load_model(tmp_path / "run", architecture=UserModel(f"{name}:build", "gone.pt"))
    assert torch.equal(model[1].weight, tiny.checkpoint(tmp_path / "run")[0]["model/1.weight"])


def test_what_cannot_be_loaded_is_refused(trained, tmp_path):
    _, path = trained
    with pytest.raises(UsageError, match=r"has no checkpoint 'first' \(there are: best, last\)"):
        load_trained_weights(path, "first")
    with pytest.raises(UsageError, match=r"no run directory: it has no config\.json"):
        load_run(tmp_path)
    with pytest.raises(UsageError, match="does not fit the model"):
        load_model(path, architecture=NarrowResNet(2, 1))
    state = path / "checkpoints" / "best" / "state.json"
    write_json(state, {key: value for key, value in read_json(state).items() if key != "classes"})
    seal_checkpoint(state.parent)
    with pytest.raises(UsageError, match=r"state\.json lacks the channels or the classes"):
        load_model(path, "best")
    write_json(tmp_path / "config.json", to_json(SmallCNN()))
    with pytest.raises(UsageError, match="does not describe a run"):
        load_run(tmp_path)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(trained, monkeypatch):
    _, path = trained
    original, attempts = loading.load_checkpoint, []

    def replaced_once(checkpoint):
        attempts.append(checkpoint)
        if len(attempts) == 1:
            raise UsageError("damaged")
        return original(checkpoint)

    monkeypatch.setattr(loading, "load_checkpoint", replaced_once)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert load_trained_weights(path, "last").path == path / "checkpoints" / "last" and len(attempts) == 2


def test_runs_differ_only_in_what_is_computed(trained):
    run, path = trained
    assert config_difference(path, run) is None
    other_root = replace(run, data=replace(run.data, root="elsewhere"))
    for other in (replace(run, device="cuda", save_seconds=1.0, microbatch=4, recompute_activations=True), other_root):
        assert config_difference(path, other) is None
    assert config_difference(path, replace(run, seed=7)) == "seed: 0 -> 7"


def test_a_network_is_loaded_ready_for_inference_from_text_or_path(tiny, tmp_path):
    tiny.train(tiny.run(), tmp_path / "run")
    with pytest.raises(UsageError, match="handed in from Python: build it again, and pass it as model="):
        load(str(tmp_path / "run"))
    for path in (str(tmp_path / "run"), tmp_path / "run"):
        model = load(path, model=tiny.model())
        assert not model.training and not any(p.requires_grad for p in model.parameters())
        assert model.classes == ("0", "1", "2") and model(torch.rand(1, 1, 4, 4)).shape == (1, 3)
    with pytest.raises(UsageError, match="no run directory"):
        load(str(tmp_path))


def test_a_file_that_is_gone_while_its_checkpoint_is_replaced_is_looked_for_again(trained, monkeypatch):
    _, path = trained
    folder = path / "checkpoints"
    checkpoint, original, replaced = loading.load_checkpoint(folder / "last"), files.sha256, []
    info = {key: value for key, value in checkpoint.info.items() if key not in ("schema", "checksums")}

    def gone(file):
        if file.parent == folder / "last" and len(replaced) < limit:
            replaced.append(file)
            with monkeypatch.context() as patch:
                patch.setattr(files, "sha256", original)
                files.save_checkpoint(folder, "last", files.Checkpoint(checkpoint.tensors, info))
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return original(file)

    monkeypatch.setattr(files, "sha256", gone)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for limit, is_read in ((4, True), (10**6, False)):
        replaced.clear()
        if is_read:
            assert load_trained_weights(path, "last").path == folder / "last" and len(replaced) == limit
        else:
            with pytest.raises(UsageError, match=r"last cannot be read \(No such file"):
                load_trained_weights(path, "last")
            assert len(replaced) == loading.MAX_ATTEMPTS + 1
