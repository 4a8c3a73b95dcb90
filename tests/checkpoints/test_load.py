"""A trained network is loaded from its run directory, and exported."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from doubly.checkpoints.export import export_run
from doubly.checkpoints.load import load_model, load_run
from doubly.config import Data, Run
from doubly.config.user_code import InMemoryData, InMemoryModel, UserModel
from doubly.data import Images, Splits
from doubly.errors import UsageError
from doubly.methods import Standard
from doubly.models import SmallCNN
from doubly.training.loop import train_run


def splits():
    x = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images = Images.of(x, torch.arange(32) % 4)
    return Splits(images, images)


def run(model, **settings):
    settings = {"epochs": 1, "batch_size": 16, "device": "cpu", "channels_last": "no", **settings}
    return Run(Data(InMemoryData()), model, Standard(), **settings)


def test_the_averaged_network_is_loaded_and_exported(tmp_path):
    network = train_run(run(SmallCNN(4), ema_decay=0.5), tmp_path / "run", splits=splits()).model
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loaded = load_model(tmp_path / "run")
    assert torch.equal(before, torch.get_rng_state())
    assert network.state_dict().keys() == loaded.state_dict().keys()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in network.state_dict().items())
    export_run(tmp_path / "run", tmp_path / "new" / "weights.safetensors")
    plain = SmallCNN(4).build(1, 4, [0.0], [1.0])
    plain.load_state_dict(load_file(tmp_path / "new" / "weights.safetensors"))
    x = splits().test.x[:3]
    assert torch.equal(plain.eval()(x), network.eval()(x))


def test_the_weights_that_a_run_started_from_may_be_gone(tmp_path, monkeypatch):
    name = f"started_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "weights.pt"
    torch.save(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).state_dict(), weights)
    configuration = replace(run(InMemoryModel()), model=UserModel(f"{name}:build", str(weights)))
    network = train_run(configuration, tmp_path / "run", splits=splits()).model
    weights.unlink()
    assert torch.equal(load_model(tmp_path / "run")[1].weight, network[1].weight)


def test_refusals(tmp_path):
    with pytest.raises(UsageError, match="no run directory"):
        load_run(tmp_path)
    (tmp_path / "config.json").write_text('{"kind": "optimizer.sgd"}')
    with pytest.raises(UsageError, match="does not describe a run"):
        load_run(tmp_path)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    train_run(run(InMemoryModel()), tmp_path / "run", model=network, splits=splits())
    with pytest.raises(UsageError, match=r"no checkpoint 'best' \(there are: last\)"):
        load_model(tmp_path / "run", "best")
    with pytest.raises(UsageError, match="handed in from Python"):
        load_model(tmp_path / "run")
