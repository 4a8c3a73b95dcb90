from functools import partial

import pytest
import torch
from torch import nn

from doubly import parallel
from doubly.attacks import PGD
from doubly.attacks.forward import FewShapes, WholeBatch, can_compile, twin
from doubly.data import Images, Splits
from doubly.methods import AT
from doubly.runs import compiling
from doubly.runs.compiling import compiled_for

X = torch.rand(16, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(body, nn.Flatten(), nn.Linear(64, 3)).train()


@pytest.fixture
def stage(monkeypatch):
    """A compiler and a clock that do as they are told: seconds of the network, and of its twin."""

    class Stage:
        plain, quick, made, said = 2.0, 1.0, staticmethod(lambda x: x), "compiled in 3 s"
        compiled = 0

        def twin(self, model, x, mode, backend):
            self.compiled += 1
            return self.made, self.said

        def turns(self, model, x, mode, made=None):
            return [self.plain] * 3, [] if made is None else [self.quick] * 3

    stage = Stage()
    monkeypatch.setattr(compiling, "twin", stage.twin)
    monkeypatch.setattr(compiling, "_turns", stage.turns)
    monkeypatch.setattr(compiling, "can_compile", lambda device: True)
    return stage


def test_what_pays_is_compiled_and_the_saving_said(stage):
    twins, said = compiled_for(network(), X, {"eval": 900, "train": 0})
    assert twins == {"eval": stage.made} and stage.compiled == 1
    assert said == "compiled in 0 s: an attack step takes 0.50 of its time, about 15 min saved from here on"


def test_what_cannot_pay_is_not_tried(stage):
    twins, said = compiled_for(network(), X, {"eval": 14})  # 28 s; of that at most half, and compiling takes 15
    assert twins == {} and stage.compiled == 0
    assert said == "not compiled: the attacks take about 28 s in all, compiling about 15 s"
    assert compiled_for(network(), X, {"eval": 16})[0]


def test_each_mode_is_compiled_and_paid_for(stage):
    assert compiled_for(network(), X, {"eval": 14, "train": 14})[0] == {}
    twins, said = compiled_for(network(), X, {"eval": 30, "train": 90})
    assert set(twins) == {"eval", "train"} and stage.compiled == 2
    assert "takes 0.50 of its time, about 2 min saved" in said


def test_a_twin_that_is_not_faster_is_not_used(stage):
    stage.quick = 1.96
    twins, said = compiled_for(network(), X, {"eval": 900})
    assert twins == {} and said == "compiled in 0 s and not used: an attack step takes 0.98 of its time"


def test_yes_compiles_without_measuring_and_no_never(stage, monkeypatch):
    monkeypatch.setattr(compiling, "_turns", None)
    assert compiled_for(network(), X, {"eval": 1}, "yes") == ({"eval": stage.made}, "compiled in 0 s")
    assert compiled_for(network(), X, {"eval": 1e9}, "no") == ({}, "")
    assert compiled_for(network(), X, {"eval": 0.0, "train": 0.0}) == ({}, "")
    assert stage.compiled == 1


def hooked():
    model = network()
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("setting", ["auto", "yes"])
def test_why_not_is_said(stage, setting, monkeypatch):
    asked = partial(compiled_for, x=X, passes={"eval": 900}, setting=setting)
    assert asked(hooked()) == ({}, "not compiled: the model has hooks, which a compiled one would pass by")
    already = nn.Sequential(torch.compile(network(), backend="eager"))
    assert asked(already) == ({}, "not compiled: the model is compiled already")
    monkeypatch.setattr(parallel, "world", lambda: (0, 2))
    assert asked(network())[0]
    assert asked(network(), passes={"train": 900})[1].startswith("not compiled: an attack in training mode")
    monkeypatch.setattr(compiling, "can_compile", lambda device: False)
    assert asked(network()) == ({}, "not compiled: there is no C++ compiler")
    stage.made, stage.said = None, "not compiled: the compiled network differs by 0.1 from the network itself"
    monkeypatch.setattr(compiling, "can_compile", lambda device: True)
    assert asked(network()) == ({}, stage.said)


@pytest.fixture
def compiles(monkeypatch):
    """Twins by a backend that runs what it is given, and counts how often it is asked to."""
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph.forward

    def made(model, x, mode, given):
        return twin(model, x, mode, backend)

    monkeypatch.setattr(compiling, "twin", made)
    monkeypatch.setattr(compiling, "can_compile", lambda device: True)
    return graphs


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("channels_last", ["yes", "no"])
def test_a_run_compiles_once_whatever_changes_and_learns_the_same(tiny, compiles, mode, channels_last):
    """Three epochs; a last batch of 4; modes, gradients and the counting of passes come and go."""
    rows = tiny.splits.train
    x, y = torch.cat([rows.pixels(slice(0, 60))] * 2), torch.cat([rows.y] * 2)
    tiny.splits = Splits(Images.of(x[:100], y[:100]), tiny.splits.test)
    tiny.network = network
    method = AT(PGD(tiny.attack.threat, 2, tiny.attack.rule, attack_mode=mode))
    said = []
    watch = type(
        "Watch", (), {"step": lambda *_: None, "row": lambda *_: None, "say": lambda _, line: said.append(line)}
    )
    found = {}
    for setting in ("yes", "no"):
        run = tiny.run(method, batch=48, channels_last=channels_last, compile=setting)
        found[setting] = tiny.train(run, watch=watch())
        assert len(compiles) == 1
    assert len(said) == 1 and said[0].startswith("compiled in")
    for ours, theirs in zip(found["yes"].state_dict().values(), found["no"].state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_first_step_of_an_epoch_is_counted_and_so_not_compiled(tiny, compiles, monkeypatch):
    calls = []
    for kind in (FewShapes, WholeBatch):
        before = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda self, x, before=before: (calls.append(len(x)), before(self, x))[1])
    tiny.network = network
    tiny.train(tiny.run(AT(tiny.attack), epochs=2, compile="yes"))
    after_check = calls[1:]
    assert len(after_check) == 2 * (tiny.steps - 1) * tiny.attack.steps


def test_many_networks_in_one_process_are_compiled_each(compiles):
    """torch gives up on a piece of code after 8 times."""
    kept = [network() for _ in range(10)]
    for count, model in enumerate(kept):
        twins, said = compiled_for(model, X, {"eval": 1, "train": 1}, "yes")
        assert set(twins) == {"eval", "train"} and len(compiles) == 2 * count + 2, said


def test_the_choice_is_kept_and_replayed_without_measuring(tiny, tmp_path, monkeypatch):
    asked = []

    def decided(model, x, passes, setting):
        asked.append(setting)
        return ({"eval": model} if answer else {}), "said"

    monkeypatch.setattr(compiling, "compiled_for", decided)
    monkeypatch.setattr(compiling, "MOST", 1e9)  # as if the run were long
    run = tiny.run(AT(tiny.attack))
    for answer in (True, False):
        output = tmp_path / str(answer)
        tiny.stopped(run, output, after=5)
        assert tiny.checkpoint(output)[1]["choices"]["compile"] is answer
        tiny.train(run, output, resume=True)
    assert asked == ["auto", "yes", "auto"]  # no needs not be asked again


def test_a_short_run_asks_nothing_of_its_method(tiny, monkeypatch):
    monkeypatch.setattr(compiling, "attack_passes", lambda *given: pytest.fail("asked"))
    assert tiny.train(tiny.run(AT(tiny.attack)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="no C++ compiler")
def test_a_run_with_the_compiler_itself(tiny):
    tiny.network = network
    found = [tiny.train(tiny.run(AT(tiny.attack), compile=word)) for word in ("yes", "no")]
    for ours, theirs in zip(*(model.state_dict().values() for model in found), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
