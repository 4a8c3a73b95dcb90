"""The training loop: what decides a run, what it writes, callbacks, and numbers that are not finite."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from doubly.callbacks import Callback
from doubly.config import SGD, Validation
from doubly.data import Images, Splits
from doubly.data.loader import batches
from doubly.distributed import Communicator
from doubly.errors import Interrupted, NonFiniteError, UsageError
from doubly.methods import AT, ATBSL, AWP, CFOL, DONE, TRADES, DONEClass, GroupDRO, RobustLT
from doubly.rundir import RunDir, read_metrics
from doubly.schedules import Constant, Cyclic, Piecewise
from doubly.training.loop import train_run


def dropout():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Dropout(0.5), nn.ReLU(), nn.Linear(12, 3))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rows_of(output):
    """Return the rows of metrics, without what differs from run to run."""
    rows = read_metrics(output / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in ("seconds", "peak_memory")} for row in rows]


def test_the_seed_decides_every_bit_and_global_generators_none(tiny, adversarial):
    tiny.network = dropout
    results = []
    for global_seed, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        results.append(weights(tiny.train(tiny.run(adversarial, seed=seed))))
        assert torch.equal(before[0], torch.get_rng_state())
        assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_any_method_can_draw_all_classes_equally_often_unless_it_sees_to_their_sizes_itself(tiny):
    train = tiny.splits.train
    tiny.splits = Splits(train.subset((train.y != 1) | (torch.arange(60) < 10)), tiny.splits.test)
    switched, by_method = tiny.run(AT(tiny.attack), sampling="balanced"), tiny.run(AT(tiny.attack, balance="sampling"))
    assert torch.equal(weights(tiny.train(switched)), weights(tiny.train(by_method)))
    assert not torch.equal(weights(tiny.train(switched)), weights(tiny.train(tiny.run(AT(tiny.attack)))))
    for method in (DONE(tiny.attack), TRADES(replace(tiny.attack, start="gaussian")), RobustLT(AT(tiny.attack))):
        tiny.run(method, sampling="balanced")
    for method, message in (
        (AT(balance="sampling"), "draws classes itself"),
        (CFOL(), "draws classes itself"),
        (DONEClass(action="sampling"), "draws classes itself"),
        (CFOL(mode="reweighting"), "drawn uniformly"),
        (AT(balance="loss"), "weights classes by their counts"),
        (AWP(AT(balance="loss")), "weights classes by their counts"),
        (GroupDRO(), "weights classes by their counts"),
        (DONEClass(), "weights classes by their counts"),
        (ATBSL(), "adjusts logits by the class counts"),
    ):
        with pytest.raises(UsageError, match=f"{message}.*count twice: use sampling shuffled"):
            tiny.run(method, sampling="balanced")


def test_frozen_parameters_stay_as_they_are(tiny):
    model = tiny.model()
    model[1].bias.requires_grad_(False)
    weight, bias = (p.detach().clone() for p in model[1].parameters())
    tiny.train(tiny.run(), model=model)
    assert torch.equal(model[1].bias, bias) and model[1].bias.grad is None and not model[1].bias.requires_grad
    assert not torch.equal(model[1].weight, weight)


def test_without_a_directory_nothing_is_written_and_the_network_is_trained_in_place(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny.model()
    result = train_run(tiny.run(), None, model=model, splits=tiny.splits)
    assert result.model is model and [row["epoch"] for row in result.rows] == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_refused_settings(tiny):
    for settings, message in [
        ({"epochs": 0}, "epochs and batch_size are at least 1"),
        ({"batch_size": 0}, "epochs and batch_size are at least 1"),
        ({"microbatch": 0}, "microbatch is at least 1"),
        ({"warm_up": 1.0}, "warm_up is a share"),
        ({"ema_decay": 1.0}, "ema_decay is a decay"),
    ]:
        with pytest.raises(UsageError, match=message):
            tiny.run(**settings)
    for settings in ({"every": 0}, {"size": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            Validation(**settings)
    with pytest.raises(UsageError, match="no parameters to train"):
        tiny.train(tiny.run(), model=tiny.model().requires_grad_(False))


def test_clip_bounds_the_step(tiny, tmp_path):
    lengths = {}
    for clip in (1e-3, 1e6, None):
        optimizer = SGD(lr=Constant(1.0), momentum=0.0, weight_decay=0.0, clip=clip)
        tiny.stopped(tiny.run(optimizer=optimizer), tmp_path / str(clip), after=1)
        tensors, _ = tiny.checkpoint(tmp_path / str(clip))
        step = torch.cat([tensors["model/1.weight"].flatten(), tensors["model/1.bias"]]) - weights(tiny.model())
        lengths[clip] = step.norm().item()
    assert lengths[None] > 0.01 and lengths[1e6] == lengths[None]
    assert lengths[1e-3] == pytest.approx(1e-3, rel=1e-3)


class Double(nn.Module):
    def forward(self, x):
        return x.flatten(1).double()


def test_momentum_weight_decay_and_learning_rate_reach_every_parameter_in_every_step(tiny, tmp_path):
    """Compare with logistic regression written in numpy."""
    schedule = Cyclic(0.4)
    tiny.network = lambda: nn.Sequential(Double(), nn.Linear(16, 3).double())
    steps = list(batches(tiny.splits.train, 16, 3, 0))
    for momentum in (0.0, 0.9):
        for decay in (0.0, 0.1):
            matrix = np.vstack([p.detach().numpy().reshape(3, -1).T for p in tiny.model()[1].parameters()])  # bias last
            velocity = np.zeros_like(matrix)
            for step, batch in enumerate(steps):
                x = np.hstack([batch.x.flatten(1).double().numpy(), np.ones((len(batch.y), 1))])
                p = np.exp(x @ matrix)
                p /= p.sum(1, keepdims=True)
                gradient = x.T @ (p - np.eye(3)[batch.y.numpy()]) / len(x)
                velocity = momentum * velocity + gradient + decay * matrix
                matrix = matrix - schedule.at(step / len(steps)) * velocity
            layer = tiny.train(tiny.run(optimizer=SGD(schedule, momentum, decay), epochs=1, seed=3))[1]
            result = np.vstack([layer.weight.detach().numpy().T, layer.bias.detach().numpy()])
            np.testing.assert_allclose(result, matrix, rtol=1e-12, atol=1e-14)
    tiny.train(tiny.run(optimizer=SGD(schedule)), tmp_path)
    rates = [row["lr"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert rates == pytest.approx([schedule.at((epoch + 3 / 4) / 3) for epoch in range(3)])  # of the last step


def test_without_a_holdout_there_is_no_best_epoch(tiny, tmp_path):
    tiny.train(tiny.run(), tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["last"]
    assert {row["validation"]["on"] for row in rows_of(tmp_path) if "validation" in row} == {"test"}


def test_best_is_the_first_of_the_highest_scores_on_the_holdout(tiny, tmp_path, adversarial):
    worse_later = SGD(Piecewise((0.05, 30.0), (0.5,)), momentum=0.0)
    validation = Validation(every=1, size=100, attack=tiny.attack)
    run = tiny.run(adversarial, holdout=0.25, validation=validation, optimizer=worse_later, epochs=6)
    tiny.train(run, tmp_path)
    validations = [row["validation"] for row in rows_of(tmp_path)]
    scores = [(p["ra_pgd"] + p["ra_tail_30"]) / 2 for p in validations]
    tensors, info = tiny.checkpoint(tmp_path, "best")
    assert {p["on"] for p in validations} == {"holdout"} and {p["n"] for p in validations} == {15}
    assert info["best_score"] == max(scores) and info["epoch"] == scores.index(max(scores)) < 5
    assert tiny.checkpoint(tmp_path)[1]["best_score"] == max(scores)
    assert not torch.equal(tensors["model/1.weight"], tiny.checkpoint(tmp_path)[0]["model/1.weight"])


def test_the_test_set_takes_no_part_in_the_choice(tiny, tmp_path, adversarial, same_bits):
    run = tiny.run(adversarial, holdout=0.25, validation=Validation(every=1, size=20, attack=tiny.attack))
    test = tiny.splits.test
    other = Images.of(1 - test.x, (test.y + 1) % 3)
    for name, splits in (("a", tiny.splits), ("b", Splits(tiny.splits.train, other))):
        tiny.train(run, tmp_path / name, splits=splits)
    for name in ("best", "last"):
        assert same_bits(tiny.checkpoint(tmp_path / "a", name)[0], tiny.checkpoint(tmp_path / "b", name)[0])
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


def test_one_row_per_epoch_with_a_validation_where_it_is_due(tiny, tmp_path):
    tiny.train(tiny.run(DONE(tiny.attack, cap=3.0), epochs=5), tmp_path)
    rows = read_metrics(RunDir(tmp_path).metrics)
    assert [row["epoch"] for row in rows] == list(range(5))
    assert [row["epoch"] for row in rows if "validation" in row] == [1, 3, 4]
    assert [row["r"] for row in rows] == [10.0, 10.0, 10.0, 1.0, 0.1]
    for row in rows:
        assert {"loss", "weighted_loss", "train_accuracy", "weight_mean", "weight_max", "weight_ess", "lr"} < set(row)
        assert 0 < row["weight_ess"] <= 1 and row["weight_max"] <= 3 and row["seconds"] > 0
        assert row["passes_forward"] >= 1 and row["passes_backward"] >= 1 and row["peak_memory"] > 2**20
    assert {"n", "sa", "ra_pgd", "ra_tail_30", "worst_class", "per_class"} < set(rows[-1]["validation"])


class Recorder(Callback):
    """Remembers every call."""

    def __init__(self):
        self.steps, self.rows, self.messages, self.closed = [], [], [], 0

    def on_step(self, epoch, step, steps):
        self.steps.append((epoch, step, steps))

    def on_epoch(self, row):
        self.rows.append(row)

    def on_message(self, message):
        self.messages.append(message)

    def close(self):
        self.closed += 1


def test_callbacks_hear_of_every_step_epoch_and_message(tiny, tmp_path):
    first, second = Recorder(), Recorder()
    tiny.stopped(tiny.run(), tmp_path, after=6, callbacks=[first, second])
    tiny.train(tiny.run(), tmp_path, resume=True, callbacks=[first, second])
    for recorder in (first, second):
        assert recorder.steps == [(epoch, step, 4) for epoch in range(3) for step in range(1, 5)]
        assert recorder.rows == read_metrics(tmp_path / "metrics.jsonl")
        assert recorder.messages[2:] == ["continuing at epoch 1, step 2", *recorder.messages[:2]]
        assert recorder.closed == 2


def test_callbacks_are_closed_after_an_error_also_before_the_first_step(tiny):
    class Failing(Recorder):
        def on_step(self, epoch, step, steps):
            raise OSError("disk is full")

    failing, other = Failing(), Recorder()
    with pytest.raises(OSError, match="disk is full"):
        tiny.train(tiny.run(), callbacks=[failing, other])
    assert (failing.closed, other.closed) == (1, 1) and other.steps == []
    with pytest.raises(UsageError, match="no parameters"):
        tiny.train(tiny.run(), model=tiny.model().requires_grad_(False), callbacks=[other])
    assert other.closed == 2


def test_other_processes_than_the_first_call_no_callbacks(tiny, monkeypatch):
    class Other(Communicator):
        is_first = False

    class Joined:
        def __enter__(self):
            return Other()

        def __exit__(self, *_): ...

    monkeypatch.setattr("doubly.training.loop.join_processes", Joined)
    recorder = Recorder()
    model = tiny.train(tiny.run(), callbacks=[recorder])
    assert not torch.equal(weights(model), weights(tiny.model()))
    assert not recorder.steps and not recorder.rows and not recorder.closed


class Turning(nn.Module):
    """A linear network that goes wrong in one of its training steps."""

    def __init__(self, turn, wrong):
        super().__init__()
        self.layer, self.turn, self.wrong = nn.Linear(16, 3), turn, wrong
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        logits = self.layer(x.flatten(1))
        if not self.training:
            return logits
        self.steps += 1
        return self.wrong(logits) if self.steps == self.turn else logits


class InfiniteGradient(torch.autograd.Function):
    factor = float("inf")

    @classmethod
    def forward(cls, ctx, x):
        return x.clone()

    @classmethod
    def backward(cls, ctx, gradient):
        return gradient * cls.factor


class HugeGradient(InfiniteGradient):
    """Finite, but its norm overflows."""

    factor = 1e30


def test_a_number_that_is_not_finite_stops_the_run_before_it_is_saved(tiny, tmp_path):
    for k, (wrong, named, clip) in enumerate(
        [
            (lambda logits: logits * float("nan"), "the model's logits: 48 of 48 values are NaN or infinite", None),
            (lambda logits: logits + torch.tensor([0, float("inf"), 0]), "the model's logits: 16 of 48", 1.0),
            (InfiniteGradient.apply, "the gradient of layer.weight: 48 of 48", None),
            (InfiniteGradient.apply, "the gradient of layer.weight: 48 of 48", 1.0),
            (HugeGradient.apply, "the norm of the gradient: 1 of 1", 1.0),
        ]
    ):
        output = tmp_path / str(k)
        run = tiny.run(optimizer=SGD(Constant(0.1), clip=clip), save_seconds=0.0)
        with pytest.raises(NonFiniteError) as error:
            tiny.train(run, output, model=Turning(7, wrong))
        message = str(error.value)
        assert message.startswith(f"epoch 1, step 2: {named}")
        assert message.endswith(f"; the last good checkpoint is {output / 'checkpoints' / 'last'}")
        tensors, info = tiny.checkpoint(output)
        assert (info["epoch"], info["step"]) == (1, 2)
        assert all(tensor.isfinite().all() for tensor in tensors.values())
        tiny.train(run, output, model=Turning(0, None), resume=True)  # a corrected network continues from there
        assert [row["epoch"] for row in rows_of(output)] == [0, 1, 2]
    with pytest.raises(NonFiniteError) as error:  # before the first checkpoint none is promised
        tiny.train(tiny.run(), tmp_path / "early", model=Turning(1, lambda logits: logits / 0))
    assert "epoch 0, step 0" in str(error.value) and "checkpoint" not in str(error.value)


def test_the_gradient_that_is_named_is_the_one_that_is_wrong(tiny):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 3)

        def forward(self, x):
            hidden = self.first(x.flatten(1)).relu()
            return nn.functional.linear(hidden, self.second.weight, InfiniteGradient.apply(self.second.bias))

    with pytest.raises(NonFiniteError, match=r"epoch 0, step 0: the gradient of second\.bias"):
        tiny.train(tiny.run(), model=Deep())


def test_weights_that_overflow_are_never_saved(tiny, tmp_path):
    run = tiny.run(optimizer=SGD(Piecewise((0.1, 3e38), (0.5,)), momentum=0.0), save_seconds=0.0, epochs=2)
    with pytest.raises(NonFiniteError, match="epoch 1, step"):
        tiny.train(run, tmp_path)
    tensors, info = tiny.checkpoint(tmp_path)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert info["epoch"] == 1


def test_an_error_of_the_network_is_passed_on(tiny):
    def fail(logits):
        raise RuntimeError("by design")

    with pytest.raises(RuntimeError, match="by design"):
        tiny.train(tiny.run(), model=Turning(3, fail))


def test_stop_is_asked_after_each_step(tiny):
    stops, recorder = iter([False, False, True]), Recorder()
    with pytest.raises(Interrupted, match="stopped at epoch 0, step 3"):
        tiny.train(tiny.run(), stop=lambda: next(stops), callbacks=[recorder])
    assert len(recorder.steps) == 3 and recorder.closed == 1
