"""From a run to a state: data, network, memory format, and refusals before anything is written."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from doubly.callbacks import Callback
from doubly.config import Data, Run, Validation
from doubly.data import Digits, Images, Splits, StepImbalance
from doubly.distributed import SINGLE_PROCESS
from doubly.errors import UsageError
from doubly.methods import WAT, Standard
from doubly.models import SmallCNN
from doubly.training.setup import (
    build_model,
    check_model,
    describe_settings,
    is_channels_last_faster,
    load_run_splits,
    prepare_data,
)

CPU = torch.device("cpu")


def run(validation=Validation(size=50), **data):  # noqa: B008 - frozen
    return Run(Data(Digits(), **data), SmallCNN(8), Standard(), validation=validation)


@pytest.fixture(scope="module")
def digits() -> Splits:
    return Digits().load()


def ids(images):
    return set(images.ids.tolist())


def test_without_a_holdout_the_validation_images_are_of_the_test_set(digits):
    prepared = prepare_data(run(), digits, CPU)
    assert ids(prepared.train) == ids(digits.train) and not prepared.held_out
    assert ids(prepared.validation) < ids(digits.test) and len(prepared.validation) == 50
    assert prepare_data(run(Validation(size=10)), digits, CPU).validation.counts().tolist() == [1] * 10


def test_held_out_images_are_validated_on_and_never_trained_on(digits):
    prepared = prepare_data(run(holdout=0.2), digits, CPU)
    assert prepared.held_out
    assert not ids(prepared.validation) & ids(prepared.train) and not ids(prepared.validation) & ids(digits.test)
    assert len(prepared.train) == len(digits.train) - round(0.2 * len(digits.train))
    imbalanced = prepare_data(run(holdout=0.2, imbalance=StepImbalance(0.2)), digits, CPU)
    assert torch.equal(imbalanced.validation.ids, prepared.validation.ids)
    other_seed = prepare_data(replace(run(holdout=0.2), seed=1, name="other"), digits, CPU)
    assert torch.equal(other_seed.train.ids, prepared.train.ids)


def test_what_a_method_learns_from_is_held_out_and_never_validates(digits):
    learner = replace(run(holdout=0.2), method=WAT())
    prepared, plain = prepare_data(learner, digits, CPU), prepare_data(run(holdout=0.2), digits, CPU)
    assert plain.driver is None and ids(prepared.train) == ids(plain.train)
    assert not ids(prepared.driver) & (ids(prepared.validation) | ids(prepared.train))
    assert len(prepared.driver) == 143 and prepared.driver.counts().min() >= 13
    shared = run(holdout=0.2, driver_share=0.5)  # so that other methods are validated on the same images
    assert torch.equal(prepare_data(shared, digits, CPU).validation.ids, prepared.validation.ids)
    for data, message in [
        ({}, r"learns from held-out images, and nothing is held out: add --data\.holdout 0\.2"),
        ({"holdout": 0.2, "driver_share": 0.0}, r"add --data\.driver-share 0\.5"),
    ]:
        with pytest.raises(UsageError, match=message):
            prepare_data(replace(run(**data), method=WAT()), digits, CPU)


def test_a_note_about_images_that_were_left_out_is_passed_on():
    messages = []

    class Listener(Callback):
        def on_message(self, message):
            messages.append(message)

    for settings in ({}, {"train_images": 200}):
        load_run_splits(run(**settings), SINGLE_PROCESS, Listener())
    (message,) = messages
    assert "trained on 200 of 1,437 images" in message


def test_a_network_is_built_for_the_data_and_its_weights_follow_from_the_seed_alone(digits):
    def weights(seed, global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        model = build_model(replace(run(), seed=seed), digits.train)
        assert torch.equal(before, torch.get_rng_state())
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(1, 1))
    model = build_model(run(), digits.train)
    mean, std = digits.train.channel_statistics()
    assert model(digits.train.pixels(slice(2))).shape == (2, 10)
    assert model.normalize.mean.item() == pytest.approx(mean[0])
    assert model.normalize.std.item() == pytest.approx(std[0])


class Wordless(nn.Module):
    def forward(self, x):
        raise ValueError


def test_a_network_that_does_not_fit_the_images_is_refused(digits):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)).train()
    before = torch.get_rng_state()
    check_model(model, digits.train)
    assert torch.equal(torch.get_rng_state(), before)
    for model, message in [
        (nn.Linear(3, 10), r"cannot take images of shape \(1, 8, 8\) \(mat1 and mat2"),
        (Wordless(), r"\(ValueError\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), "returns 7 logits for 10 classes"),
        (nn.Flatten(0), r"logits of shape \(2, classes\)"),
    ]:
        with pytest.raises(UsageError, match=message):
            check_model(model, digits.train)


def test_settings_are_compared_without_memory_addresses():
    one, other = (replace(run(), data=Data(type("Source", (), {})())) for _ in range(2))
    assert repr(one) != repr(other) and describe_settings(one) == describe_settings(other)
    assert describe_settings(run()) != describe_settings(replace(run(), seed=1))


def colored(count=8):
    return Images.of(torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0)), [0, 1] * (count // 2))


def test_timing_the_memory_formats_leaves_the_network_as_it_was():
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 2)]
    model = nn.Sequential(*layers).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    is_channels_last_faster(model, colored(), 8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert model.training and not model[1].training and model[0].training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.fixture
def clock(monkeypatch):
    """Let the clock of the timing advance as `clock` says; return how often it was read."""
    readings, seconds = [], {"per_call": iter(range(10**6))}
    monkeypatch.setattr(
        "doubly.training.setup.time.perf_counter", lambda: readings.append(next(seconds["per_call"])) or readings[-1]
    )
    return readings, seconds


def test_the_faster_memory_format_is_chosen(clock):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2))
    for plain, channels_last in ((2, 1), (1, 2)):
        starts = [0, plain, plain, plain + channels_last] * 3  # both formats, three times
        clock[1]["per_call"] = iter(starts)
        assert is_channels_last_faster(model, colored(), 8) == (channels_last < plain)


def test_the_memory_format_is_not_timed_where_it_does_not_matter_does_not_fit_or_is_dangerous(clock, monkeypatch):
    linear = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    assert is_channels_last_faster(linear, colored(), 8) is False and not clock[0]

    class Large(nn.Conv2d):
        def forward(self, x):
            raise torch.OutOfMemoryError

    assert is_channels_last_faster(Large(3, 8, 3), colored(), 8) is False
    clock[0].clear()
    # torch 2.13 corrupts memory in strided 1x1 convolutions of fewer channels than a vector register holds.
    images = Images.of(torch.zeros(2, 1, 6, 6, dtype=torch.uint8), [0, 1])
    for cpu, channels, kernel, stride, harmless in [
        ("AVX2", 4, 1, 2, False),
        ("AVX2", 8, 1, 2, True),
        ("AVX2", 4, 1, 1, True),
        ("AVX2", 4, 3, 2, True),
        ("AVX512", 8, 1, 2, False),
        ("AVX512", 16, 1, 2, True),
    ]:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda cpu=cpu: cpu)
        model = nn.Sequential(nn.Conv2d(1, channels, 3), nn.Conv2d(channels, 2, kernel, stride), nn.Flatten())
        clock[0].clear()
        is_channels_last_faster(model, images, 2)
        assert bool(clock[0]) == harmless, (cpu, channels)


def test_the_choice_made_at_the_beginning_is_kept_on_resume(tiny, tmp_path, monkeypatch):
    tiny.network = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    run = tiny.run(channels_last="auto")
    for faster in (True, False):
        output = tmp_path / str(faster)
        monkeypatch.setattr("doubly.training.setup.is_channels_last_faster", lambda *_, faster=faster: faster)
        tiny.stopped(run, output, after=5)
        monkeypatch.setattr("doubly.training.setup.is_channels_last_faster", lambda *_, faster=faster: not faster)
        tiny.train(run, output, resume=True)
        assert tiny.checkpoint(output)[1]["choices"]["channels_last"] is faster
