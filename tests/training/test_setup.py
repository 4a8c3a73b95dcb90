from pathlib import Path

import pytest
import torch
from torch import nn

from doubly.config import Data, Run, Validation
from doubly.data import Digits, Images, Splits, StepImbalance, load_splits
from doubly.errors import UsageError
from doubly.methods import Standard
from doubly.models import SmallCNN
from doubly.recipes import recipe
from doubly.training.setup import build_model, chosen_device, faster_channels_last, prepare

CPU = torch.device("cpu")


def run(validation=Validation(size=50), **data):  # noqa: B008 - frozen
    return Run(Data(Digits(), **data), SmallCNN(8), Standard(), validation=validation)


@pytest.fixture(scope="module")
def digits() -> Splits:
    return Digits().load()


def ids(images):
    return set(images.ids.tolist())


def test_without_a_holdout_all_is_trained_on_and_the_probe_is_of_the_test_set(digits):
    prepared = prepare(run(), digits, CPU)
    assert ids(prepared.train) == ids(digits.train) and not prepared.chooses
    assert ids(prepared.validation) < ids(digits.test) and len(prepared.validation) == 50


def test_the_holdout_chooses_and_is_never_trained_on(digits):
    prepared = prepare(run(holdout=0.2), digits, CPU)
    assert prepared.chooses
    assert not ids(prepared.validation) & ids(prepared.train) and not ids(prepared.validation) & ids(digits.test)
    assert len(prepared.train) == len(digits.train) - round(0.2 * len(digits.train))


def test_the_first_images_of_each_class_can_be_the_test_set(digits):
    splits = load_splits(run(test_per_class=30).data)
    assert torch.equal(splits.train.ids, digits.train.ids)
    first = [digits.test.ids[digits.test.y == label][:30] for label in range(10)]
    assert torch.equal(splits.test.ids, torch.cat(first).sort().values)  # in the order of the whole test set
    with pytest.raises(UsageError, match="test_per_class is at least 1"):
        run(test_per_class=0)


def test_only_what_is_trained_on_is_thinned_out(digits):
    prepared = prepare(run(Validation(size=10**6), holdout=0.25, imbalance=StepImbalance(0.2)), digits, CPU)
    balanced = prepare(run(Validation(size=10**6), holdout=0.25), digits, CPU)
    assert torch.equal(prepared.validation.ids, balanced.validation.ids)
    thinned, whole = prepared.train.counts(), balanced.train.counts()
    assert (thinned[:5] - 0.2 * whole[:5]).abs().max() <= 1 and torch.equal(thinned[5:], whole[5:])


def test_every_seed_and_method_sees_the_same_holdout(digits):
    recipes = (recipe("digits.imbalanced.at"), recipe("digits.imbalanced.done_pgd"))
    held = []
    for seed, base in enumerate(recipes):
        data = Data(base.data.source, base.data.imbalance, 0.2)
        prepared = prepare(Run(data, base.model, base.method, seed=seed), digits, CPU)
        held.append((ids(prepared.train), ids(prepared.validation)))
    assert held[0] == held[1]


def test_the_probe_has_every_class(digits):
    assert prepare(run(Validation(size=10)), digits, CPU).validation.counts().tolist() == [1] * 10


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_holdout_is_a_share(share):
    with pytest.raises(UsageError, match="share"):
        Data(Digits(), holdout=share)


def test_devices():
    assert chosen_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert chosen_device("cpu") == CPU


@pytest.mark.parametrize("name", ["cuda:99", "toaster", "mps" if not torch.backends.mps.is_available() else "toaster"])
def test_a_device_that_is_not_there_is_one_sentence(name):
    with pytest.raises(UsageError) as problem:
        chosen_device(name)
    assert f"'{name}'" in str(problem.value) and "auto or cpu" in str(problem.value)
    assert "\n" not in str(problem.value)


def test_the_root_is_handed_to_the_source(tmp_path):
    class Source:
        def load(self, root):
            seen.append(root)
            return Digits().load()

    seen = []
    for root in (None, str(tmp_path)):
        load_splits(Data(Source(), root=root))
    assert seen == [None, Path(tmp_path)]


def test_so_many_training_images_are_in_the_proportions_of_the_classes_and_noted(digits):
    splits = load_splits(run(train_images=200, test_per_class=5).data)
    assert len(splits.train) == 200 and ids(splits.train) < ids(digits.train)
    share = 200 * digits.train.counts() / len(digits.train)
    assert (splits.train.counts() - share).abs().max() <= 1
    assert "trained on 200 of 1,437 images" in splits.note and "first 5 images of each class, 50 in all" in splits.note
    assert torch.equal(load_splits(run(train_images=200).data).train.ids, splits.train.ids)
    assert load_splits(run(train_images=10**6).data).note == ""


def test_the_weights_follow_from_the_seed_alone(digits):
    def first(seed, global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        network = build_model(Run(Data(Digits()), SmallCNN(8), Standard(), seed=seed), digits.train)
        assert torch.equal(before, torch.get_rng_state())
        return torch.cat([p.flatten() for p in network.parameters()])

    assert torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(1, 1))


def test_a_network_is_built_for_the_data(digits):
    network = build_model(run(), digits.train)
    mean, std = digits.train.channel_statistics()
    assert network(digits.train.pixels(slice(2))).shape == (2, 10)
    assert network.normalize.mean.item() == pytest.approx(mean[0])
    assert network.normalize.std.item() == pytest.approx(std[0])


def test_measuring_the_memory_format_leaves_the_network_as_it_was():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 2)]
    network = nn.Sequential(*layers).train()
    network[1].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    images = Images.of(torch.rand(8, 3, 8, 8), [0, 1] * 4)
    generator = torch.get_rng_state()
    faster_channels_last(network, images, 8)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert network.training and not network[1].training and network[0].training
    assert all(p.grad is None and p.requires_grad for p in network.parameters())


def test_without_a_convolution_there_is_nothing_to_measure():
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    assert faster_channels_last(network, Images.of(torch.rand(8, 3, 8, 8), [0, 1] * 4), 8) is False


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "harmless"), [(4, 1, 2, False), (8, 1, 2, True), (4, 1, 1, True)]
)
def test_channels_last_is_not_tried_where_torch_corrupts_memory(monkeypatch, channels, kernel, stride, harmless):
    network = nn.Sequential(nn.Conv2d(1, channels, 3), nn.Conv2d(channels, 2, kernel, stride), nn.Flatten())
    measured = []
    monkeypatch.setattr("doubly.training.setup.time.perf_counter", lambda: float(measured.append(1) or len(measured)))
    images = Images.of(torch.zeros(2, 1, 6, 6, dtype=torch.uint8), [0, 1])
    faster_channels_last(network, images, 2)
    assert bool(measured) == harmless
