"""Training from Python in one call."""

import pytest
import torch

from doubly import train
from doubly.config import Validation
from doubly.errors import UsageError
from doubly.rundir import read_metrics
from doubly.training.api import Trained


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def settings(tiny, **changes):
    validation = Validation(every=1, size=9, attack=tiny.attack)
    return {"epochs": 2, "batch_size": 16, "validation": validation, "channels_last": "no", **changes}


def test_any_form_of_data_trains_the_same_network(tiny, adversarial):
    images = tiny.splits.train
    expected = tiny.model()
    train(expected, images, adversarial, **settings(tiny))
    for data in (
        (images.x, images.y),
        (images.x.numpy(), images.y.numpy()),
        torch.utils.data.TensorDataset(images.x, images.y),
    ):
        model = tiny.model()
        trained = train(model, data, adversarial, **settings(tiny))
        assert isinstance(trained, Trained) and trained.model is model and trained.directory is None
        assert [row["epoch"] for row in trained.metrics] == [0, 1]
        assert trained.metrics[0]["validation"]["on"] == "holdout"  # without test images a tenth is held out
        assert torch.equal(weights(model), weights(expected))


def test_test_images_are_validated_on_and_a_directory_is_written(tiny, tmp_path, adversarial):
    options = settings(tiny, test=tiny.splits.test, output=tmp_path)
    trained = train(tiny.model(), tiny.splits.train, adversarial, **options)
    assert trained.metrics == read_metrics(tmp_path / "metrics.jsonl")
    assert trained.metrics[-1]["validation"]["on"] == "test" and trained.directory == tmp_path
    again = train(tiny.model(), tiny.splits.train, adversarial, resume=True, **options)
    assert torch.equal(weights(trained.model), weights(again.model))


def test_refusals(tiny, adversarial):
    images = tiny.splits.train
    for arguments, message in [
        ((images, "at"), r"the third argument is the method, such as AT\(\), got 'at'"),
        ((images, adversarial, {"batchsize": 3}), "train has no setting 'batchsize': it has data, model"),
        ((images, adversarial, {"holdout": 0.0}), "nothing is left to measure on: pass test="),
        ((torch.utils.data.DataLoader(images.x), adversarial), "of a DataLoader pass its dataset"),
    ]:
        data, method, *changes = arguments
        with pytest.raises(UsageError, match=message):
            train(tiny.model(), data, method, **(changes[0] if changes else {}))
    with pytest.raises(UsageError, match=r"the first argument is the network, an nn\.Module, got Images"):
        train(images, tiny.model(), adversarial)


def test_an_optimizer_that_cannot_be_used_is_refused(tiny, adversarial):
    instance = torch.optim.Adam(tiny.model().parameters())
    for optimizer, message in [
        (instance, "must be settings or a function, got Adam: write optimizer=lambda"),
        ("adam", "must be settings or a function, got str"),
        (torch.optim.LBFGS, "LBFGS computes the loss several times in a step"),
    ]:
        with pytest.raises(UsageError, match=message):
            train(tiny.model(), tiny.splits.train, adversarial, **settings(tiny, optimizer=optimizer))
