"""A run of AutoAttack: what it says about itself, and whose state it accepts."""

import logging
import random
import shutil
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from doubly.attacks.autoattack import QUICK, STANDARD, AutoAttack, reference_version
from doubly.callbacks import Callback
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.autoattack.runner import AutoAttackRunner
from doubly.threat import L2Ball, LinfBall

ATTACK = AutoAttack(LinfBall(0.05), iterations=2, queries=8)
MODULE = "doubly.evaluation.autoattack.runner"


def network(seed=0, classes=4):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(48, classes)
        )


def images(n=11):
    x = torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = network().eval()(x).argmax(1)
    y[0] = (y[0] + 1) % 4
    return Images.of(x, y, [str(k) for k in range(4)])


class Recorder(Callback):
    def __init__(self):
        self.messages, self.attacks = [], []

    def on_message(self, message):
        self.messages.append(message)

    def on_attack(self, chunk, chunks, part, robust, seconds_left):
        self.attacks.append((chunk, chunks, part, robust, seconds_left))


def run(model=None, data=None, **settings):
    """Return (outcome, info, callback)."""
    callback = Recorder()
    runner = AutoAttackRunner(**{"attack": ATTACK, "chunk_size": 4, **settings})
    return *runner.run(model or network(), data or images(), callback=callback), callback


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with the state of `run()`."""
    folder = tmp_path_factory.mktemp("finished")
    run(state=folder, exact_folder=True)
    return folder


def test_the_outcome_says_how_it_was_computed():
    outcome, info, callback = run()
    seconds = info.pop("seconds")
    assert info.pop("state") is None
    assert info == {
        "label": "RA-(apgd-ce+apgd-t+fab-t+square; 2 iterations, 9 targets, 8 queries)",
        "complete": True,
        "chunks": "3 of 3",
        "norm": "Linf",
        "epsilon": 0.05,
        "seed": 0,
        "chunk": 4,
        "reference": reference_version(),
        "forward": "folded",
        "parts": list(STANDARD),
        "substitutions": ["3 targets instead of 9, since there are 4 classes"],
        "warnings": list(outcome.warnings),
    }
    assert list(seconds) == list(STANDARD) and 0 < outcome.robust_after["square"].sum() < 10
    assert outcome.predictions[0] != images().y[0] and not outcome.robust_after["apgd-ce"][0]
    assert [call[:3] for call in callback.attacks] == [(chunk, 3, part) for chunk in range(3) for part in STANDARD]
    assert all(call[4] > 0 for call in callback.attacks[:-1]) and callback.attacks[-1][4] == 0
    assert run(shard=(0, 3))[2].attacks[-1][4] == 0  # the remaining time is that of this shard


def test_the_label_is_that_of_what_has_run():
    broken = replace(images(), y=(images().y + 1) % 4).subset(range(1, 5))  # nothing is correct, so no attack runs
    for attack, label in (
        (AutoAttack(), "RA-AA"),
        (AutoAttack(L2Ball(0.2), seed=3), "RA-AA"),
        (AutoAttack(parts=QUICK), "RA-APGD"),
    ):
        assert run(attack=attack, data=broken)[1]["label"] == label
    assert run(shard=(0, 2))[1]["label"] == "AutoAttack, incomplete"


def test_the_second_time_nothing_is_left_to_do(tmp_path):
    for exact_folder in (False, True):
        settings = {"state": tmp_path / str(exact_folder), "exact_folder": exact_folder}
        first, info, callback = run(**settings)
        again, info_again, callback_again = run(**settings)
        assert len(callback.attacks) == 12 and callback_again.attacks == []
        assert again.predictions.tolist() == first.predictions.tolist() and info_again == info
        folder = settings["state"] if exact_folder else next(settings["state"].iterdir())
        names = sorted(file.name for file in folder.iterdir())
        assert names == [*(f"chunk-0000{k}.json" for k in range(3)), "key.json"]


def changed_images(pixel=False):
    x, y = images().x.clone(), images().y.clone()
    if pixel:
        x[2, 0, 0, 0] = 1 - x[2, 0, 0, 0]
    else:
        y[3] = (y[3] + 1) % 4
    return replace(images(), x=x, y=y)


def changed_statistics():
    model = network()
    model[1].running_mean.add_(1e-3)
    return model


def test_the_state_of_another_evaluation_is_refused_in_a_named_folder_and_ignored_elsewhere(
    tmp_path, finished, monkeypatch
):
    shutil.copytree(finished, tmp_path / "exact")
    before = {file.name: file.read_bytes() for file in (tmp_path / "exact").iterdir()}
    runner = AutoAttackRunner(ATTACK, 4, tmp_path)
    folder = runner.files(runner.key(network(), images())).folder
    for name, changes in (
        ("model", {"model": network(seed=5)}),
        ("model", {"model": changed_statistics()}),
        ("data", {"data": changed_images()}),
        ("data", {"data": changed_images(pixel=True)}),
        ("data", {"data": images(10)}),
        ("epsilon", {"attack": replace(ATTACK, threat=LinfBall(0.06))}),
        ("norm", {"attack": replace(ATTACK, threat=L2Ball(0.05))}),
        ("seed", {"attack": replace(ATTACK, seed=1)}),
        ("parts", {"attack": replace(ATTACK, parts=QUICK)}),
        ("iterations", {"attack": replace(ATTACK, iterations=3)}),
        ("targets", {"attack": replace(ATTACK, targets=2)}),
        ("queries", {"attack": replace(ATTACK, queries=9)}),
        ("chunk", {"chunk_size": 5}),
    ):
        with pytest.raises(UsageError, match=rf"belongs to another evaluation: its {name} is .*another folder"):
            run(state=tmp_path / "exact", exact_folder=True, **changes)
        assert {file.name: file.read_bytes() for file in (tmp_path / "exact").iterdir()} == before
        other = AutoAttackRunner(changes.get("attack", ATTACK), changes.get("chunk_size", 4), tmp_path)
        key = other.key(changes.get("model", network()), changes.get("data", images()))
        assert other.files(key).folder != folder
    monkeypatch.setattr(f"{MODULE}.reference_version", lambda: "pyautoattack 9.9")
    with pytest.raises(UsageError, match="its version is pyautoattack 0"):
        run(state=tmp_path / "exact", exact_folder=True)


def test_refusals(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "state")
    for text in ("", '{"model": "a', "[]", "\x00"):
        (tmp_path / "state" / "key.json").write_text(text)
        with pytest.raises(UsageError, match=r"key\.json"):
            run(state=tmp_path / "state", exact_folder=True)
    assert (tmp_path / "state" / "chunk-00002.json").is_file()
    (tmp_path / "file").write_text("")
    model = network().train()
    with pytest.raises(UsageError, match=r"choose another (folder|name)"):
        run(model=model, state=tmp_path / "file")
    assert all(m.training for m in model.modules()) and all(p.requires_grad for p in model.parameters())
    small = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))
    x = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UsageError, match="at least 5 x 5 pixels"):
        attack = AutoAttack(L2Ball(1e-3), iterations=1, queries=1)
        run(model=small, data=Images.of(x, small(x).argmax(1), ["a", "b", "c"]), attack=attack)


def trace(frame, event, argument):
    return None


def surroundings():
    loggers = [logging.getLogger(name) for name in (None, "auto-attack")]
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(np.random.get_state()),
        list(warnings.filters),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        [(one.level, one.disabled, list(one.handlers)) for one in loggers],
    ]


def test_everything_is_left_as_it_was_found():
    model = network().train()
    model[1].eval()
    model[0].bias.requires_grad_(False)
    model[5].bias.grad = torch.full((4,), 2.0)
    modes, trainable = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    before, tracing = surroundings(), sys.gettrace()
    sys.settrace(trace)
    try:
        run(model=model, max_examples=1000)
        result = sys.gettrace()
    finally:
        sys.settrace(tracing)
    assert result is trace and surroundings() == before
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == trainable
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert model[5].bias.grad.tolist() == [2.0] * 4
    assert all(p.grad is None for p in model.parameters() if p is not model[5].bias)


def test_neither_mode_nor_generators_change_the_outcome():
    outcomes = []
    for seed, training in ((1, True), (2, False)):
        torch.manual_seed(seed)
        outcomes.append(run(model=network().train(training), max_examples=1000)[0])
    assert outcomes[0].predictions.tolist() == outcomes[1].predictions.tolist()
    assert all(torch.equal(image, outcomes[1].examples[row]) for row, image in outcomes[0].examples.items())


class Constant(nn.Module):
    """Predicts the same for everything, with a gradient of zero."""

    def __init__(self, own_memory):
        super().__init__()
        self.own_memory = own_memory
        self.register_buffer("logits", torch.tensor([0.0, 1.0, 2.0, 3.0]))

    def forward(self, x):
        if torch.is_grad_enabled() or self.own_memory:
            return self.logits + 0 * x.sum((1, 2, 3))[:, None]
        return self.logits.expand(len(x), 4)


class Detached(nn.Module):
    def forward(self, x):
        return x.detach().flatten(1)[:, :4] * 3 - 1


@pytest.mark.filterwarnings("ignore:Use of index_put_")
def test_networks_without_a_gradient_are_attacked_and_not_changed():
    for own_memory in (True, False):
        model = Constant(own_memory)
        outcome, info, _ = run(model=model, data=replace(images(), y=torch.arange(11) % 4))
        assert outcome.predictions.tolist() == [3] * 11
        assert outcome.robust_after["square"].tolist() == [k % 4 == 3 for k in range(11)]
        assert any("zero gradient" in text for text in info["warnings"])
        assert model.logits.tolist() == [0, 1, 2, 3]
    outcome, info, _ = run(model=Detached())
    assert outcome.complete and any("zero gradient" in text for text in info["warnings"])
