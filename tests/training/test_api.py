"""Training from Python in one call."""

import numpy as np
import pytest
import torch

from doubly import AT, DONE, PGD, TRADES, Images, L2Ball, LinfBall, SignStep, train
from doubly.config import SGD, Validation
from doubly.errors import NonFiniteError, UsageError
from doubly.rundir import read_metrics
from doubly.schedules import Cyclic
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


def test_whole_numbers_of_numpy_are_whole_numbers(tiny, adversarial):
    options = settings(tiny, epochs=np.int64(1), batch_size=np.int32(8))
    assert len(train(tiny.model(), tiny.splits.train, adversarial, **options).metrics) == 1


def test_refusals(tiny, adversarial):
    images = tiny.splits.train
    for arguments, message in [
        ((images, 3), r"the third argument is the method, such as AT\(\) or 'at', got 3: methods are standard, at"),
        ((images, "don_pgd"), "there is no method 'don_pgd': did you mean 'done_pgd'?"),
        (
            (images, adversarial, {"batchsize": 3}),
            "no setting 'batchsize': it has epochs, .*did you mean 'batch_size'",
        ),
        ((images, adversarial, {"learning_rate": 3}), "no setting 'learning_rate': it has epochs, lr, batch_size"),
        ((images, adversarial, {"epochs": 1.5}), "epochs is a whole number, got 1.5: write epochs=2"),
        ((images, adversarial, {"lr": "0.1"}), "lr is a number or a schedule .* got str"),
        ((images, adversarial, {"lr": 0}), "lr must be above 0, got 0"),
        ((images, adversarial, {"threat": LinfBall(0.1)}), "threat goes with a method's name"),
        ((images, adversarial, {"resume": True}), "resume=True needs output"),
        ((images, adversarial, {"mean": 0.5}), "both mean and std"),
        ((images, adversarial, {"mean": [125.0], "std": [60.0]}), "divide those of gray levels by 255"),
        ((adversarial, images), r"the order is train\(model, data, method\)"),
        ((images, "at", {"threat": L2Ball(1.0)}), "methods by name are for LinfBall"),
        ((Images.of(images.x, images.y + 1), adversarial), "labels run from 1 to 3, .* subtract 1 from the labels"),
        ((images, adversarial, {"holdout": 0.0}), "nothing is left to measure on: pass test="),
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


def test_keywords_names_and_classes_give_the_run_that_they_describe(tiny):
    images, quick = tiny.splits.train, {"epochs": 1, "batch_size": 16, "verbose": False, "channels_last": "no"}

    def trained(method, **changes):
        model = tiny.model()
        return weights(train(model, images, method, **quick, **changes).model)

    at = AT(PGD(LinfBall(0.1), 10, SignStep(0.025)))
    for result, expected in (
        (trained("at", threat=LinfBall(0.1)), trained(at)),
        (trained("done_pgd"), trained(DONE(mean_weight_limit=10.0))),
        (trained(TRADES), trained(TRADES())),
        (trained(at, lr=0.05), trained(at, optimizer=SGD(lr=Cyclic(0.05)))),
        (trained(at, lr=0.05), trained(at, optimizer=SGD(), lr=Cyclic(0.05))),
        (trained(at, optimizer=torch.optim.SGD, lr=0.05), trained(at, optimizer=SGD(Cyclic(0.05), 0.0, 0.0))),
    ):
        assert torch.equal(result, expected)
    row = train(tiny.model(), images, at, **quick).metrics[-1]
    other = Validation(attack=PGD(LinfBall(0.1), 20, SignStep(0.025)))
    assert row["validation"] == train(tiny.model(), images, at, validation=other, **quick).metrics[-1]["validation"]


def test_what_is_held_out_validations_and_alarms_are_printed_unless_switched_off(tiny, capsys):
    for verbose in (True, False):
        train(tiny.model(), tiny.splits.train, DONE(tiny.attack), **settings(tiny, verbose=verbose))
        printed = capsys.readouterr().out
        for part in ("training on 54 images; validating on 6 held-out images, which choose", "epoch 2: ", "radii"):
            assert (part in printed) == verbose
    with pytest.raises(NonFiniteError, match=r"epoch 0, step \d+: .*; the learning rate was [\d.e+]+: lower it"):
        train(tiny.model(), tiny.splits.train, AT(tiny.attack), **settings(tiny, lr=1e38, verbose=False))
