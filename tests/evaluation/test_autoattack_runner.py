import json
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
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.autoattack.runner import Callback as Silent
from doubly.evaluation.autoattack.runner import Ensemble
from doubly.threat import L2Ball, LinfBall

ATTACK = AutoAttack(LinfBall(0.05), iterations=2, queries=8)


def network(seed=0, classes=4):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(48, classes)
        )


def images(n=11, classes=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 6, 6, generator=generator)
    with torch.no_grad():
        y = network(classes=classes).eval()(x).argmax(1)
    y[0] = (y[0] + 1) % classes
    return Images.of(x, y, [str(k) for k in range(classes)])


class Callback(Silent):
    def __init__(self):
        self.said, self.attacks = [], []

    def say(self, sentence):
        self.said.append(sentence)

    def attack(self, chunk, of, part, standing, left):
        self.attacks.append((chunk, of, part, standing, left))


def run(ensemble=None, model=None, data=None, **changes):
    watch = Callback()
    ensemble = ensemble or Ensemble(**{"attack": ATTACK, "chunk": 4, "compile": "no", **changes})
    return *ensemble.run(model or network(), data or images(), watch), watch


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with the state of `run()`."""
    folder = tmp_path_factory.mktemp("begun")
    run(state=folder, in_this_folder=True)
    return folder


def test_the_outcome_says_how_it_was_made():
    standing, about, watch = run()
    seconds = about.pop("seconds")
    assert about.pop("state") is None
    assert about == {
        "label": "RA-(apgd-ce+apgd-t+fab-t+square; 2 iterations, 9 targets, 8 queries)",
        "complete": True,
        "chunks": "3 of 3",
        "norm": "Linf",
        "epsilon": 0.05,
        "seed": 0,
        "chunk": 4,
        "reference": reference_version(),
        "compiled": False,
        "parts": list(STANDARD),
        "substitutions": ["3 targets instead of 9, since there are 4 classes"],
        "warnings": list(standing.warnings),
    }
    assert list(seconds) == list(STANDARD) and 0 < standing.after["square"].sum() < 10
    assert standing.answers[0] != images().y[0] and not standing.after["apgd-ce"][0]
    assert [each[:3] for each in watch.attacks] == [(chunk, 3, part) for chunk in range(3) for part in STANDARD]
    assert all(each[4] > 0 for each in watch.attacks[:-1]) and watch.attacks[-1][4] == 0


def test_the_time_left_is_that_of_this_shard():
    assert run(shard=(0, 3))[2].attacks[-1][4] == 0


@pytest.mark.parametrize(
    ("attack", "label"),
    [(AutoAttack(), "RA-AA"), (AutoAttack(L2Ball(0.2), seed=3), "RA-AA"), (AutoAttack(parts=QUICK), "RA-APGD")],
)
def test_the_label_is_that_of_what_ran(attack, label):
    nothing_stands = replace(images(), y=(images().y + 1) % 4).subset(range(1, 5))
    assert run(attack=attack, data=nothing_stands)[1]["label"] == label


@pytest.mark.parametrize("exact", [False, True])
def test_the_second_time_nothing_is_left_to_do(exact, tmp_path):
    first, about, watch = run(state=tmp_path, in_this_folder=exact)
    again, about_again, watched = run(state=tmp_path, in_this_folder=exact)
    assert len(watch.attacks) == 12 and watched.attacks == []
    assert again.answers.tolist() == first.answers.tolist() and about_again == about
    folder = tmp_path if exact else next(tmp_path.iterdir())
    assert sorted(file.name for file in folder.iterdir()) == [*(f"chunk-0000{k}.json" for k in range(3)), "key.json"]


def other_label():
    y = images().y.clone()
    y[3] = (y[3] + 1) % 4
    return replace(images(), y=y)


def other_pixel():
    x = images().x.clone()
    x[2, 0, 0, 0] = 1 - x[2, 0, 0, 0]
    return replace(images(), x=x)


def other_statistics():
    model = network()
    model[1].running_mean.add_(1e-3)
    return model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model", {"model": network(seed=5)}),
        ("model", {"model": other_statistics()}),
        ("data", {"data": other_label()}),
        ("data", {"data": other_pixel()}),
        ("data", {"data": images(10)}),
        ("epsilon", {"attack": replace(ATTACK, threat=LinfBall(0.06))}),
        ("norm", {"attack": replace(ATTACK, threat=L2Ball(0.05))}),
        ("seed", {"attack": replace(ATTACK, seed=1)}),
        ("parts", {"attack": replace(ATTACK, parts=QUICK)}),
        ("iterations", {"attack": replace(ATTACK, iterations=3)}),
        ("targets", {"attack": replace(ATTACK, targets=2)}),
        ("queries", {"attack": replace(ATTACK, queries=9)}),
        ("chunk", {"chunk": 5}),
    ],
)
def test_the_state_of_another_evaluation_is_refused_where_it_was_named_and_passed_over_elsewhere(
    name, changes, tmp_path, begun
):
    shutil.copytree(begun, tmp_path / "exact")
    before = {file.name: file.read_bytes() for file in (tmp_path / "exact").iterdir()}
    with pytest.raises(UsageError, match=rf"belongs to another evaluation: its {name} is .*another folder"):
        run(state=tmp_path / "exact", in_this_folder=True, **changes)
    assert {file.name: file.read_bytes() for file in (tmp_path / "exact").iterdir()} == before
    made = Ensemble(ATTACK, 4, "no", tmp_path)
    key = made.key(network(), images())
    other = Ensemble(changes.get("attack", ATTACK), changes.get("chunk", 4), "no", tmp_path)
    another = other.key(changes.get("model", network()), changes.get("data", images()))
    assert made._chunks(key, False).folder != other._chunks(another, False).folder
    assert made._chunks(key, False).folder != made._chunks(key, True).folder


def test_another_version_of_the_reference_is_another_evaluation(tmp_path, monkeypatch):
    run(state=tmp_path, in_this_folder=True)
    monkeypatch.setattr("doubly.evaluation.autoattack.runner.reference_version", lambda: "pyautoattack 9.9")
    with pytest.raises(UsageError, match="its version is pyautoattack 0"):
        run(state=tmp_path, in_this_folder=True)


@pytest.mark.parametrize("compile_", ["no", "auto"])
@pytest.mark.parametrize("text", ["", '{"model": "a', "[]", "\x00"])
def test_a_garbled_key_is_a_sentence(compile_, text, tmp_path, begun):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    (tmp_path / "key.json").write_text(text)
    with pytest.raises(UsageError, match=r"key\.json"):
        run(state=tmp_path, in_this_folder=True, compile=compile_)
    assert (tmp_path / "chunk-00002.json").is_file()


def test_a_state_folder_that_cannot_be_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        run(state=tmp_path / "file")


def tracer(frame, event, argument):
    return None


def test_everything_is_as_it_was_found():
    model = network().train()
    model[1].eval()
    model[0].bias.requires_grad_(False)
    model[5].bias.grad = torch.full((4,), 2.0)
    before_model = [
        [m.training for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        {name: value.clone() for name, value in model.state_dict().items()},
    ]
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)

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

    before, earlier = surroundings(), sys.gettrace()
    sys.settrace(tracer)
    try:
        run(model=model, keep=1000)
        found = sys.gettrace()
    finally:
        sys.settrace(earlier)
    assert found is tracer and surroundings() == before
    assert [m.training for m in model.modules()] == before_model[0]
    assert [p.requires_grad for p in model.parameters()] == before_model[1]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before_model[2].items())
    assert model[5].bias.grad.tolist() == [2.0] * 4
    assert all(p.grad is None for p in model.parameters() if p is not model[5].bias)


def test_a_failure_leaves_the_network_as_it_was(tmp_path):
    (tmp_path / "file").write_text("")
    model = network().train()
    with pytest.raises(UsageError):
        run(model=model, state=tmp_path / "file")
    assert all(m.training for m in model.modules()) and all(p.requires_grad for p in model.parameters())


def test_neither_mode_nor_generators_change_the_outcome():
    outcomes = []
    for seed, training in ((1, True), (2, False)):
        torch.manual_seed(seed)
        outcomes.append(run(model=network().train(training), keep=1000)[0])
    assert outcomes[0].answers.tolist() == outcomes[1].answers.tolist()
    assert all(torch.equal(image, outcomes[1].examples[row]) for row, image in outcomes[0].examples.items())


@pytest.fixture
def compiler(monkeypatch):
    """torch.compile gives back the network; how often it was asked."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: asked.append(options) or model)
    monkeypatch.setattr("doubly.evaluation.autoattack.runner.can_compile", lambda device: True)
    return asked


def test_a_compiled_network_is_said_and_kept_apart(compiler, tmp_path):
    plain = run(state=tmp_path)
    fast = run(state=tmp_path, compile="yes")
    assert len(compiler) == 1 and fast[1]["compiled"] and not plain[1]["compiled"]
    assert fast[2].said[0].startswith("compiled in") and len(list(tmp_path.iterdir())) == 2
    assert len(fast[2].attacks) == 12 and fast[2].attacks[0][4] > 0
    with pytest.raises(UsageError, match="compiled is True"):
        run(
            state=next(f for f in tmp_path.iterdir() if json.loads((f / "key.json").read_text())["compiled"]),
            in_this_folder=True,
        )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("begun", ["yes", "no"])
def test_auto_goes_on_as_it_was_begun(begun, exact, compiler, tmp_path):
    first = run(state=tmp_path, in_this_folder=exact, compile=begun)
    again = run(state=tmp_path, in_this_folder=exact, compile="auto")
    assert again[1]["compiled"] == (begun == "yes") and again[2].attacks == []
    assert again[0].answers.tolist() == first[0].answers.tolist()


@pytest.mark.parametrize(("worth", "expected"), [(0.0, True), (1e9, False)])
def test_auto_compiles_where_it_pays(worth, expected, compiler, monkeypatch):
    monkeypatch.setattr("doubly.evaluation.autoattack.runner.WORTH", worth)
    assert run(compile="auto")[1]["compiled"] is expected and bool(compiler) is expected


@pytest.mark.parametrize("compile_", ["auto", "yes"])
def test_without_a_compiler_the_network_itself_is_used(compile_, monkeypatch):
    monkeypatch.setattr("doubly.evaluation.autoattack.runner.can_compile", lambda device: False)
    monkeypatch.setattr("doubly.evaluation.autoattack.runner.WORTH", 0.0)
    _, about, watch = run(compile=compile_)
    assert not about["compiled"] and watch.said == ["not compiled: there is no C++ compiler"]


def test_a_network_that_does_not_compile_is_used_as_it_is(compiler, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: lambda x: 1 / 0)
    _, about, watch = run(compile="yes")
    assert not about["compiled"] and "ZeroDivisionError" in watch.said[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about itself
def test_a_network_that_is_really_compiled_stands_as_the_plain_one(tmp_path):
    plain, fast = run()[0], run(compile="yes", state=tmp_path)
    assert fast[1]["compiled"] and (fast[0].answers != plain.answers).sum() <= 1
    assert run(compile="auto", state=tmp_path)[0].answers.tolist() == fast[0].answers.tolist()


def test_images_too_small_for_square_are_refused_with_a_sentence():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))
    x = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    data = Images.of(x, model(x).argmax(1), ["a", "b", "c"])
    with pytest.raises(UsageError, match="5"):
        run(model=model, data=data, attack=AutoAttack(L2Ball(1e-3), iterations=1, queries=1))


class Prior(nn.Module):
    """Answers the same to everything, with a gradient of zero."""

    def __init__(self, own_memory):
        super().__init__()
        self.own_memory = own_memory
        self.register_buffer("logits", torch.tensor([0.0, 1.0, 2.0, 3.0]))

    def forward(self, x):
        if torch.is_grad_enabled() or self.own_memory:
            return self.logits + 0 * x.sum((1, 2, 3))[:, None]
        return self.logits.expand(len(x), 4)


@pytest.mark.filterwarnings("ignore:Use of index_put_")
@pytest.mark.parametrize(
    "own_memory",
    [True, pytest.param(False)],
)
def test_a_constant_network_stands_on_its_class_and_keeps_its_logits(own_memory):
    model = Prior(own_memory)
    data = replace(images(), y=torch.arange(11) % 4)
    standing, about, _ = run(model=model, data=data)
    assert standing.answers.tolist() == [3] * 11
    assert standing.after["square"].tolist() == [k % 4 == 3 for k in range(11)]
    assert any("zero gradient" in text for text in about["warnings"])
    assert model.logits.tolist() == [0, 1, 2, 3]


def test_a_network_that_hides_its_gradient_is_attacked_without_one():
    class Detached(nn.Module):
        def forward(self, x):
            return x.detach().flatten(1)[:, :4] * 3 - 1

    standing, about, _ = run(model=Detached())
    assert standing.complete and any("zero gradient" in text for text in about["warnings"])


def test_shards_say_that_they_are_incomplete_until_all_are_there(tmp_path):
    def shard(number, of):
        return evaluate(
            network(),
            images(),
            attacks=[ATTACK],
            state=tmp_path,
            autoattack_chunk=4,
            compile="no",
            trust=False,
            shard=(number, of),
        )

    whole = evaluate(network(), images(), attacks=[ATTACK], autoattack_chunk=4, compile="no", trust=False)
    first = shard(0, 2)
    assert first.label == "AutoAttack, incomplete" and first.ensemble is None
    assert first.autoattack["chunks"] == "2 of 3" and not first.autoattack["complete"]
    with pytest.raises(UsageError, match="no RA-AA"):
        _ = first.ra_aa
    shard(1, 2)
    merged = shard(0, 1)
    assert merged.label == whole.label == ATTACK.label
    assert merged.answers["autoattack_in_part"].tolist() == whole.answers["autoattack_in_part"].tolist()
    assert merged.after["fab-t"].tolist() == whole.after["fab-t"].tolist()


def test_the_seed_of_an_ensemble_that_was_handed_in_is_its_own():
    attack = replace(ATTACK, seed=5)
    found = evaluate(network(), images(), attacks=[attack], autoattack_chunk=4, compile="no", trust=False)
    assert found.autoattack["seed"] == 5
