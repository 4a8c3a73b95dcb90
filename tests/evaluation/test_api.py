import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.checkpoints.export import export_run
from doubly.checkpoints.load import load_model, load_run
from doubly.config import Validation
from doubly.config.user_code import OwnModel
from doubly.data import Images
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.predict import answers
from doubly.evaluation.run_directory import evaluate_run
from doubly.losses import LogitMargin
from doubly.methods import Standard
from doubly.models import SmallCNN
from doubly.recipes import recipe
from doubly.rundir import RunDir, read_json
from doubly.threat import LinfBall
from doubly.training.loop import train_run


class Threshold(nn.Module):
    """Class 1 where the mean pixel exceeds a half: an attack of radius e turns exactly those nearer than e to it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, x):
        margin = self.scale * (x.mean((1, 2, 3)) - 0.5)
        return torch.stack([-margin, margin], 1)


GRAY = torch.tensor([0.1, 0.45, 0.48, 0.52, 0.55, 0.9, 0.3])
LABELS = torch.tensor([0, 0, 0, 1, 1, 1, 1])  # the last one is wrong from the start
IMAGES = Images.of(GRAY.view(-1, 1, 1, 1).expand(-1, 1, 2, 2), LABELS, ["dark", "light"])
ATTACK = PGD(LinfBall(0.1), 5, SignStep(0.05))


def test_known_answers():
    found = evaluate(Threshold(), IMAGES, attacks=[ATTACK]).summary()
    assert found["n"] == 7 and found["sa"] == 6 / 7 and found["ra_pgd"] == 2 / 7
    assert found["per_class"]["dark"].items() >= {"n": 3, "sa": 1.0, "ra_pgd": 1 / 3}.items()
    assert found["per_class"]["light"].items() >= {"n": 4, "sa": 0.75, "ra_pgd": 0.25}.items()
    assert found["worst_class"] == {"name": "light", "ra_pgd": 0.25}
    assert found["ra_tail_30"] == 0.25 and found["ra_tail_30_classes"] == ["light"]
    assert found["confusion"] == {"clean": [[3, 0], [1, 3]], "pgd": [[1, 2], [3, 1]]}
    json.dumps(found, allow_nan=False)


def test_predictions_are_in_the_order_of_the_images_whatever_the_chunk():
    whole = answers(Threshold(), IMAGES, {"pgd": ATTACK})
    told = []
    pieces = answers(Threshold(), IMAGES, {"pgd": ATTACK}, chunk=2, done=told.append)
    assert whole.classes["clean"].tolist() == [0, 0, 0, 1, 1, 1, 0]
    assert whole.classes["pgd"].tolist() == [0, 1, 1, 0, 0, 1, 0]
    assert all(np.array_equal(given, pieces.classes[name]) for name, given in whole.classes.items())
    assert told == [2, 4, 6, 7]


def test_a_number_says_how_it_was_made():
    about = evaluate(Threshold(), IMAGES, attacks=[ATTACK], seed=3, chunk=4, about={"note": "x"}).protocol
    assert about["attack"]["threat"]["radius"] == 0.1 and about["attack"]["steps"] == 5
    assert (about["seed"], about["chunk"], about["note"]) == (3, 4, "x")


def test_the_network_and_the_generators_are_left_as_they_were():
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 2))
    network[2].eval()
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    modes, generator = [m.training for m in network.modules()], torch.get_rng_state()
    first = evaluate(network, IMAGES, attacks=[ATTACK]).summary()
    assert (
        first == evaluate(network, IMAGES, attacks=[ATTACK]).summary()
    )  # the draws of the attack follow from the seed
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all((p.grad == 1).all() and p.requires_grad for p in network.parameters())
    assert [m.training for m in network.modules()] == modes and torch.equal(generator, torch.get_rng_state())


@pytest.mark.parametrize(
    ("network", "problem", "said"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), UsageError, "returns 1 logits"),
        (nn.Conv2d(1, 2, 1), UsageError, r"logits of shape \(7, classes\)"),
        (nn.Sequential(nn.Flatten(0), nn.Linear(28, 2)), UsageError, r"logits of shape \(7, classes\)"),
        (nn.Sequential(Threshold(), nn.Threshold(1e9, float("nan"))), NonFiniteError, "the model's logits"),
    ],
)
def test_a_network_that_answers_wrongly_is_one_sentence(network, problem, said):
    with pytest.raises(problem, match=said):
        evaluate(network, IMAGES, attacks=[ATTACK])


@pytest.mark.parametrize("data", [(GRAY.view(-1, 1, 1, 1) * 3, LABELS), (GRAY.view(-1, 1, 1, 1), LABELS - 1)])
def test_data_are_checked(data):
    with pytest.raises(UsageError):
        evaluate(Threshold(), data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory of a few seconds."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("run")
    base = recipe("digits.standard")
    validation = Validation(every=1, size=40, attack=replace(ATTACK, steps=2))
    data = replace(base.data, holdout=0.2)
    run = replace(base, data=data, model=SmallCNN(4), method=Standard(), validation=validation, epochs=2, average=0.5)
    return path, train_run(run, path)


def test_the_trained_network_comes_back(trained):
    path, network = trained
    torch.manual_seed(0)
    before = torch.get_rng_state()
    again = load_model(path)
    assert torch.equal(before, torch.get_rng_state())
    assert network.state_dict().keys() == again.state_dict().keys()  # the averaged one
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in network.state_dict().items())


def test_evaluating_a_run_writes_what_it_returns(trained):
    path, network = trained
    evaluate_run(path)
    found = read_json(RunDir(path).evaluation)
    run = load_run(path)
    test = run.data.source.load(None).test
    assert found["protocol"].items() >= {"split": "test", "checkpoint": "last", "data_sha256": test.sha256()}.items()
    again = {"pgd": run.validation.attack, "margin": replace(run.validation.attack, loss=LogitMargin())}
    expected = json.loads(json.dumps(evaluate(network, test, attacks=again).summary()))
    assert found.pop("epoch") == run.epochs and found["tail"]["pgd"].pop("validated")["n_validation"] == 287
    assert found.pop("test_images") == len(test) and found.pop("command")
    found["tail"]["margin"].pop("validated")
    assert {k: v for k, v in found.items() if k != "protocol"} == {k: v for k, v in expected.items() if k != "protocol"}
    with np.load(RunDir(path).predictions, allow_pickle=False) as kept:
        assert np.array_equal(kept["y"], test.y.numpy()) and np.array_equal(kept["ids"], test.ids.numpy())
        assert (kept["clean"] == kept["y"]).mean() == found["sa"] and (kept["pgd"] == kept["y"]).mean() == found[
            "ra_pgd"
        ]
        assert kept["pgd_losses"].dtype == np.float64


def test_the_best_checkpoint_can_be_measured_too(trained):
    path, _ = trained
    assert evaluate_run(path, "best").protocol["checkpoint"] == "best"


def test_an_export_is_a_plain_state_dict(trained, tmp_path):
    from safetensors.torch import load_file

    path, network = trained
    export_run(path, tmp_path / "new" / "weights.safetensors")
    found = load_file(tmp_path / "new" / "weights.safetensors")
    fresh = SmallCNN(4).build(1, 10, [0.0], [1.0])
    fresh.load_state_dict(found)
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(fresh.eval()(x), network.eval()(x))


def test_what_is_no_run_or_has_no_checkpoint_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="no run directory"):
        load_run(tmp_path)
    (tmp_path / "config.json").write_text('{"kind": "sgd"}')
    with pytest.raises(UsageError, match="does not describe a run"):
        load_run(tmp_path)


def test_a_missing_checkpoint_says_which_there_are(tiny, tmp_path):
    tiny.train(tiny.run(), tmp_path)
    with pytest.raises(UsageError, match=r"no checkpoint 'best' \(there are: last\)"):
        load_model(tmp_path, "best")
    with pytest.raises(UsageError, match="handed in from Python"):
        load_model(tmp_path)


def test_the_weights_that_a_run_began_from_may_be_gone(tiny, tmp_path, monkeypatch):
    name = f"began_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "weights.pt"
    torch.save(tiny.model().state_dict(), weights)
    run = replace(tiny.run(), model=OwnModel(f"{name}:build", str(weights)))
    network = tiny.train(run, tmp_path / "run", model=None)
    weights.unlink()
    assert torch.equal(load_model(tmp_path / "run")[1].weight, network[1].weight)
