import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from doubly.config import SGD, Validation
from doubly.config import serialize as saved
from doubly.data import Images, Splits
from doubly.data.loader import batches
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.api import evaluate
from doubly.methods import DONE
from doubly.rundir import RunDir, read_metrics
from doubly.schedules import Constant, Cyclic, Piecewise
from doubly.training.api import Trained, train
from doubly.training.loop import NullCallback
from doubly.types import Objective

# --- what a run leaves alone ----------------------------------------------------------------------------------------


def generators():
    return torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()


def test_the_callers_generators_are_untouched(tiny, tmp_path, adversarial):
    tiny.network = dropout
    before = generators()
    tiny.train(tiny.run(adversarial), tmp_path)
    after = generators()
    assert torch.equal(before[0], after[0]) and (before[1] == after[1]).all() and before[2] == after[2]


def test_a_resumed_run_takes_its_number_of_threads_and_gives_the_callers_back(tiny, tmp_path, monkeypatch):
    tiny.stopped(tiny.run(), tmp_path, after=5)
    state = tmp_path / "checkpoints" / "last" / "state.json"
    state.write_text(state.read_text().replace('"threads": 1', '"threads": 7'))
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    tiny.train(tiny.run(), tmp_path, resume=True)
    assert asked == [7, 1]


def test_frozen_parameters_stay_as_they_are(tiny):
    model = tiny.model()
    model[1].bias.requires_grad_(False)
    weight, bias = (p.detach().clone() for p in model[1].parameters())
    tiny.train(tiny.run(), model=model)
    assert torch.equal(model[1].bias, bias) and model[1].bias.grad is None and not model[1].bias.requires_grad
    assert not torch.equal(model[1].weight, weight)


def test_a_network_without_free_parameters_is_refused(tiny):
    with pytest.raises(UsageError, match="no parameters to train"):
        tiny.train(tiny.run(), model=tiny.model().requires_grad_(False))


def test_without_a_directory_nothing_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny.model()
    assert tiny.train(tiny.run(), model=model) is model
    assert list(tmp_path.iterdir()) == []


# --- the seed decides ------------------------------------------------------------------------------------------------


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_seed_decides_every_bit_and_the_global_generator_none(tiny, adversarial):
    tiny.network = dropout
    found = []
    for global_seed, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(global_seed)
        found.append(weights(tiny.train(tiny.run(adversarial, seed=seed))))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_training_learns(tiny, adversarial):
    model = tiny.train(tiny.run(adversarial, epochs=10))
    found = evaluate(model, tiny.splits.test, attacks=[tiny.attack])
    assert found.sa > 0.9 and found.ra_pgd > 0.6


# --- settings of the optimizer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip", "length"), [(1e-3, 1e-3), (1e6, None)])
def test_clip_bounds_the_step(tiny, tmp_path, clip, length):
    plain = {"lr": Constant(1.0), "momentum": 0.0, "weight_decay": 0.0}
    steps = {}
    for limit in (clip, None):
        tiny.stopped(tiny.run(optimizer=SGD(clip=limit, **plain)), tmp_path / str(limit), after=1)
        tensors, _ = tiny.checkpoint(tmp_path / str(limit))
        moved = torch.cat([tensors["model/1.weight"].flatten(), tensors["model/1.bias"]]) - weights(tiny.model())
        steps[limit] = moved.norm().item()
    assert steps[clip] == pytest.approx(length or steps[None], rel=1e-3)
    assert steps[None] > 0.01


def test_the_learning_rate_changes_with_every_step(tiny, tmp_path):
    run = tiny.run(optimizer=SGD(Cyclic(0.4), momentum=0.0, weight_decay=0.0))
    tiny.stopped(run, tmp_path, after=1)
    assert torch.equal(tiny.checkpoint(tmp_path)[0]["model/1.weight"], tiny.model()[1].weight)  # it begins at 0
    tiny.stopped(run, tmp_path, after=1, resume=True)
    assert not torch.equal(tiny.checkpoint(tmp_path)[0]["model/1.weight"], tiny.model()[1].weight)
    tiny.train(run, tmp_path, resume=True)
    assert [row["lr"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        pytest.approx(Cyclic(0.4).at((epoch + 3 / 4) / 3)) for epoch in range(3)
    ]


class Double(nn.Module):
    def forward(self, x):
        return x.flatten(1).double()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_momentum_weight_decay_and_learning_rate_reach_every_parameter(tiny, momentum, decay):
    schedule = Cyclic(0.4)
    tiny.network = lambda: nn.Sequential(Double(), nn.Linear(16, 3).double())
    by_hand = np.vstack([p.detach().numpy().reshape(3, -1).T for p in tiny.model()[1].parameters()])  # bias: last row
    speed = np.zeros_like(by_hand)
    steps = list(batches(tiny.splits.train, 16, 3, 0))
    for step, batch in enumerate(steps):
        x = np.hstack([batch.x.flatten(1).double().numpy(), np.ones((len(batch.y), 1))])
        share = np.exp(x @ by_hand)
        share /= share.sum(1, keepdims=True)
        gradient = x.T @ (share - np.eye(3)[batch.y.numpy()]) / len(x)
        speed = momentum * speed + gradient + decay * by_hand
        by_hand = by_hand - schedule.at(step / len(steps)) * speed
    layer = tiny.train(tiny.run(optimizer=SGD(schedule, momentum, decay), epochs=1, seed=3))[1]
    found = np.vstack([layer.weight.detach().numpy().T, layer.bias.detach().numpy()])
    np.testing.assert_allclose(found, by_hand, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "settings", [{"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}, {"clip": 0.0}, {"clip": float("nan")}]
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(UsageError):
        SGD(**settings)


@pytest.mark.parametrize("settings", [{"every": 0}, {"size": 0}])
def test_a_probe_that_cannot_be_is_refused(settings):
    with pytest.raises(UsageError, match="at least 1"):
        Validation(**settings)


def test_the_average_follows_the_weights_step_by_step(tiny, tmp_path):
    tiny.network = batch_norm
    run = tiny.run(average=0.75)
    mean = {name: value.clone() for name, value in tiny.model().state_dict().items()}
    learned = dict(tiny.model().named_parameters())
    for update in range(5):
        early = 1 - (1 + update) / (10 + update)  # a short average at first
        tiny.stopped(run, tmp_path, after=1, resume=True)
        tensors, _ = tiny.checkpoint(tmp_path)
        for name in mean:
            now = tensors[f"model/{name}"]
            mean[name] = mean[name] + max(0.25, early) * (now - mean[name]) if name in learned else now
            torch.testing.assert_close(tensors[f"average/{name}"], mean[name])
    network = tiny.train(run, tmp_path, resume=True)
    tensors, _ = tiny.checkpoint(tmp_path)
    assert torch.equal(network[1].weight, tensors["average/1.weight"])
    assert not torch.equal(tensors["average/1.weight"], tensors["model/1.weight"])


# --- which epoch is the best -----------------------------------------------------------------------------------------


def rows_of(path):
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "peak_memory")}
        for row in read_metrics(path)
    ]


def test_without_a_holdout_there_is_no_best(tiny, tmp_path):
    tiny.train(tiny.run(), tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["last"]
    assert {row["validation"]["on"] for row in rows_of(tmp_path / "metrics.jsonl") if "validation" in row} == {"test"}


def test_best_is_the_first_of_the_highest_scores_on_the_holdout(tiny, tmp_path, adversarial):
    worse_later = SGD(Piecewise((0.05, 30.0), (0.5,)), momentum=0.0)
    validation = Validation(every=1, size=100, attack=tiny.attack)
    run = tiny.run(adversarial, holdout=0.25, validation=validation, optimizer=worse_later, epochs=6)
    tiny.train(run, tmp_path)
    validations = [row["validation"] for row in rows_of(tmp_path / "metrics.jsonl")]
    scores = [(p["ra_pgd"] + p["ra_tail_30"]) / 2 for p in validations]
    tensors, info = tiny.checkpoint(tmp_path, "best")
    assert {p["on"] for p in validations} == {"holdout"} and {p["n"] for p in validations} == {15}
    assert info["best"] == max(scores) and info["epoch"] == scores.index(max(scores)) < 5
    assert tiny.checkpoint(tmp_path)[1]["best"] == max(scores)
    assert not torch.equal(tensors["model/1.weight"], tiny.checkpoint(tmp_path)[0]["model/1.weight"])


def test_the_test_set_takes_no_part_in_the_choice(tiny, tmp_path, adversarial, same_bits):
    run = tiny.run(adversarial, holdout=0.25, validation=Validation(every=1, size=20, attack=tiny.attack))
    test = tiny.splits.test
    other = Images.of(1 - test.x, (test.y + 1) % 3)
    for name, splits in (("a", tiny.splits), ("b", Splits(tiny.splits.train, other))):
        tiny.train(run, tmp_path / name, splits=splits)
    for name in ("best", "last"):
        assert same_bits(tiny.checkpoint(tmp_path / "a", name)[0], tiny.checkpoint(tmp_path / "b", name)[0])
    assert rows_of(tmp_path / "a" / "metrics.jsonl") == rows_of(tmp_path / "b" / "metrics.jsonl")


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_one_row_per_epoch_and_the_probe_where_it_is_due(tiny, tmp_path):
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


def test_somebody_who_looks_on_is_told_of_every_step(tiny, tmp_path):
    class Notes(NullCallback):
        def __init__(self):
            self.steps, self.rows, self.said = [], [], []

        def step(self, epoch, step, steps):
            self.steps.append((epoch, step, steps))

        def row(self, row):
            self.rows.append(row)

        def say(self, sentence):
            self.said.append(sentence)

    notes = Notes()
    tiny.stopped(tiny.run(), tmp_path, after=6, watch=notes)
    tiny.train(tiny.run(), tmp_path, resume=True, watch=notes)
    assert notes.steps == [(epoch, step, 4) for epoch in range(3) for step in range(1, 5)]
    assert notes.rows == read_metrics(tmp_path / "metrics.jsonl")
    assert notes.said == ["not compiled: the run is too short", "continuing at epoch 1, step 2"]


# --- numbers that are not finite -------------------------------------------------------------------------------------


class Turning(nn.Module):
    """A linear network that goes wrong in its `turn`-th training step."""

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
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda logits: logits * float("nan"), "the model's logits: 48 of 48 values are NaN or infinite"),
        (lambda logits: logits + torch.tensor([0, float("inf"), 0]), "the model's logits: 16 of 48"),
        (InfiniteGradient.apply, "the gradient of layer.weight: 48 of 48"),
    ],
    ids=["nan", "infinity", "gradient"],
)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_number_that_is_not_finite_stops_the_run_before_it_is_saved(tiny, tmp_path, wrong, named, clip):
    run = tiny.run(optimizer=SGD(Constant(0.1), clip=clip), save_seconds=0.0)
    with pytest.raises(NonFiniteError) as problem:
        tiny.train(run, tmp_path, model=Turning(7, wrong))
    text = str(problem.value)
    assert text.startswith(f"epoch 1, step 2: {named}")
    assert text.endswith(f"; the last good checkpoint is {tmp_path / 'checkpoints' / 'last'}")
    tensors, info = tiny.checkpoint(tmp_path)
    assert (info["epoch"], info["step"]) == (1, 2)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    tiny.train(run, tmp_path, model=Turning(0, None), resume=True)  # a mended network goes on from there
    assert [row["epoch"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


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


def test_before_the_first_checkpoint_none_is_promised(tiny, tmp_path):
    with pytest.raises(NonFiniteError) as problem:
        tiny.train(tiny.run(), tmp_path, model=Turning(1, lambda logits: logits / 0))
    assert "epoch 0, step 0" in str(problem.value) and "checkpoint" not in str(problem.value)


# --- resume ----------------------------------------------------------------------------------------------------------


def dropout():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Dropout(0.5), nn.ReLU(), nn.Linear(12, 3))


def batch_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize("network", [dropout, batch_norm])
@pytest.mark.parametrize("settings", [{}, {"average": 0.9}], ids=["plain", "averaged"])
def test_a_run_stopped_at_any_step_ends_with_the_same_bits(tiny, tmp_path, same_bits, network, settings):
    tiny.network = network
    run = tiny.run(DONE(tiny.attack, cap=3.0), holdout=0.2, **settings)  # 3 steps per epoch, the best of 2 validations
    tiny.train(run, tmp_path / "whole")
    for after in range(1, 9):
        output = tmp_path / str(after)
        tiny.stopped(run, output, after)
        tiny.train(run, output, resume=True)
        for name in ("last", "best"):
            tensors, info = tiny.checkpoint(output, name)
            expected, about = tiny.checkpoint(tmp_path / "whole", name)
            assert same_bits(tensors, expected), f"stopped after step {after}"
            assert {**info, "checksums": 0, "seconds": 0} == {**about, "checksums": 0, "seconds": 0}
        assert rows_of(output / "metrics.jsonl") == rows_of(tmp_path / "whole" / "metrics.jsonl")


def test_a_run_stopped_again_and_again_ends_with_the_same_bits(tiny, tmp_path, same_bits, adversarial):
    tiny.network = dropout
    run = tiny.run(adversarial)
    tiny.train(run, tmp_path / "whole")
    for _ in range(12):
        tiny.stopped(run, tmp_path / "halting", after=1, resume=True)
    tiny.train(run, tmp_path / "halting", resume=True)
    assert same_bits(tiny.checkpoint(tmp_path / "whole")[0], tiny.checkpoint(tmp_path / "halting")[0])
    assert rows_of(tmp_path / "whole" / "metrics.jsonl") == rows_of(tmp_path / "halting" / "metrics.jsonl")


def test_a_crash_loses_no_more_than_since_the_last_save(tiny, tmp_path, same_bits):
    class Crashing(NullCallback):
        def step(self, epoch, step, steps):
            if (epoch, step) == (1, 3):
                raise RuntimeError("power cut")

    run = tiny.run(save_seconds=0.0)
    with pytest.raises(RuntimeError, match="power cut"):
        tiny.train(run, tmp_path / "cut", watch=Crashing())
    assert [tiny.checkpoint(tmp_path / "cut")[1][key] for key in ("epoch", "step")] == [1, 2]
    tiny.train(run, tmp_path / "cut", resume=True)
    tiny.train(run, tmp_path / "whole")
    assert same_bits(tiny.checkpoint(tmp_path / "whole")[0], tiny.checkpoint(tmp_path / "cut")[0])


def test_rows_that_are_ahead_of_the_checkpoint_are_written_anew(tiny, tmp_path):
    class Crashing(NullCallback):
        def row(self, row):
            if row["epoch"] == 1:
                raise RuntimeError("power cut")

    tiny.stopped(tiny.run(), tmp_path, after=2)
    with pytest.raises(RuntimeError, match="power cut"):
        tiny.train(tiny.run(), tmp_path, resume=True, watch=Crashing())
    assert len(rows_of(tmp_path / "metrics.jsonl")) == 2 and tiny.checkpoint(tmp_path)[1]["epoch"] == 0
    tiny.train(tiny.run(), tmp_path, resume=True)
    assert [row["epoch"] for row in rows_of(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_resuming_a_finished_run_changes_nothing(tiny, tmp_path, same_bits):
    tiny.train(tiny.run(), tmp_path)
    before = tiny.checkpoint(tmp_path), (tmp_path / "metrics.jsonl").read_bytes()
    model = tiny.train(tiny.run(), tmp_path, resume=True)
    assert same_bits(before[0][0], tiny.checkpoint(tmp_path)[0])
    assert before[1] == (tmp_path / "metrics.jsonl").read_bytes()
    assert torch.equal(model[1].weight, before[0][0]["model/1.weight"])


@pytest.mark.parametrize("change", ["labels", "pixels", "images"])
def test_a_run_is_not_resumed_on_other_images(tiny, tmp_path, change):
    tiny.stopped(tiny.run(), tmp_path, after=3)
    train = tiny.splits.train
    other = {
        "labels": lambda: replace(train, y=train.y.flip(0)),
        "pixels": lambda: replace(train, x=255 - train.x),
        "images": lambda: train.subset(range(len(train) - 1)),
    }[change]()
    kept, tiny.splits = tiny.splits, replace(tiny.splits, train=other)
    with pytest.raises(UsageError, match="was trained on other images than those here"):
        tiny.train(tiny.run(), tmp_path, resume=True)
    tiny.splits = kept
    tiny.train(tiny.run(), tmp_path, resume=True)


def test_choices_made_by_measuring_are_replayed(tiny, tmp_path, monkeypatch):
    tiny.network = batch_norm
    run = tiny.run(channels_last="auto")
    for faster, output in ((True, tmp_path / "a"), (False, tmp_path / "b")):
        monkeypatch.setattr("doubly.training.state.faster_channels_last", lambda *_, faster=faster: faster)
        tiny.stopped(run, output, after=5)
        monkeypatch.setattr("doubly.training.state.faster_channels_last", lambda *_, faster=faster: not faster)
        tiny.train(run, output, resume=True)
        assert tiny.checkpoint(output)[1]["choices"]["channels_last"] is faster


def test_an_attempt_that_fails_before_training_leaves_the_directory_free(tiny, tmp_path):
    with pytest.raises(UsageError):
        tiny.train(tiny.run(), tmp_path, model=tiny.model().requires_grad_(False))
    tiny.train(tiny.run(epochs=1), tmp_path)


SEEN = []


@dataclass(frozen=True)
class HardestFirst:
    """Class-level online learning in miniature: classes are drawn by the losses they had."""

    def init(self, counts=None):
        return {"losses": torch.tensor([0.0, 1.0, 3.0])}

    def sampling(self, state):
        SEEN.append(state["losses"].tolist())
        return state["losses"].softmax(0)

    def objective(self, model, batch, state, moment):
        logits = model(batch.x)
        losses = cross_entropy(logits, batch.y, reduction="none")
        SEEN.append(batch.ids.tolist())
        total = state["losses"].index_add(0, batch.y, losses.detach())
        return Objective(losses.mean(), losses.detach(), torch.ones(len(losses)), logits.detach(), {"losses": total})


def test_a_method_that_samples_is_asked_once_an_epoch_and_resumed_inside_one(tiny, tmp_path, monkeypatch, same_bits):
    monkeypatch.setitem(saved.KINDS, "method.hardest_first", HardestFirst)
    monkeypatch.setitem(saved._NAMES, HardestFirst, "method.hardest_first")
    run = tiny.run(HardestFirst(), compile="no")  # which counts no passes: SEEN is of the run alone
    SEEN.clear()
    tiny.train(run, tmp_path / "whole")
    whole = list(SEEN)
    assert len(whole) == 15 and [len(entry) for entry in whole[::5]] == [3, 3, 3]
    classes = tiny.splits.train.y[torch.tensor([position for batch in whole[1:5] for position in batch])]
    assert torch.bincount(classes, minlength=3)[2] > 40  # of 60, by softmax(0, 1, 3): 84 %
    for after in range(1, 12):
        SEEN.clear()
        tiny.stopped(run, tmp_path / str(after), after)
        tiny.train(run, tmp_path / str(after), resume=True)
        assert whole == SEEN, f"stopped after step {after}"
        assert same_bits(tiny.checkpoint(tmp_path / str(after))[0], tiny.checkpoint(tmp_path / "whole")[0])


# --- from Python -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["images", "tensors", "arrays", "dataset"])
def test_any_form_of_data_trains_the_same_network(tiny, form, adversarial):
    train_set = tiny.splits.train
    data = {
        "images": train_set,
        "tensors": (train_set.x, train_set.y),
        "arrays": (train_set.x.numpy(), train_set.y.numpy()),
        "dataset": torch.utils.data.TensorDataset(train_set.x, train_set.y),
    }
    settings = {
        "epochs": 2,
        "batch": 16,
        "validation": Validation(every=1, size=9, attack=tiny.attack),
        "channels_last": "no",
    }
    model = tiny.model()
    trained = train(model, data[form], adversarial, **settings)
    assert isinstance(trained, Trained) and trained.model is model and trained.directory is None
    assert [row["epoch"] for row in trained.metrics] == [0, 1]
    assert trained.metrics[0]["validation"]["on"] == "holdout"  # without a test set a tenth is held out
    expected = tiny.model()
    train(expected, train_set, adversarial, **settings)
    assert torch.equal(weights(model), weights(expected))


def test_a_test_set_is_measured_on_and_a_directory_kept(tiny, tmp_path, adversarial):
    settings = {"test": tiny.splits.test, "output": tmp_path, "epochs": 2, "batch": 16, "channels_last": "no"}
    trained = train(tiny.model(), tiny.splits.train, adversarial, **settings)
    assert trained.metrics == read_metrics(tmp_path / "metrics.jsonl")
    assert trained.metrics[-1]["validation"]["on"] == "test" and trained.directory == tmp_path
    again = train(tiny.model(), tiny.splits.train, adversarial, resume=True, **settings)
    assert torch.equal(weights(trained.model), weights(again.model))
