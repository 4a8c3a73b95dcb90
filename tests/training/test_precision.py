"""Half precision, on the CPU: what autocast may touch, and the scaler's decisions. CUDA takes the same path."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import BarrierStep, SignStep
from doubly.errors import NonFiniteError, UsageError
from doubly.methods import AT, AWP, DONE, FastATGA, FastBAT
from doubly.models import NarrowResNet, SmallCNN
from doubly.rundir import read_metrics
from doubly.threat import LinfBall
from doubly.training.precision import MOST_SKIPPED, Precision
from doubly.types import Batch, TrainStep

CPU = torch.device("cpu")
HALF = pytest.mark.parametrize("half", ["bf16", "fp16"])


def problem(network):
    torch.manual_seed(0)
    model = network.build(1, 3, [0.5], [0.25])
    x, y = torch.rand(16, 1, 8, 8), torch.arange(16) % 3
    return model, Batch(x, y, torch.arange(16))


class Still:
    """An attack that is at its end where it starts, so that both precisions look at the same delta."""

    threat, loss, attack_mode = LinfBall(0.1), PGD().loss, "eval"

    def __call__(self, model, x, y, generator):
        return self.threat.around(x).at(torch.full_like(x, 0.3))


NARROW = NarrowResNet(4, 1)


def gradients(method, name, network=NARROW):
    model, batch = problem(network)
    with Precision(name, CPU).autocast():
        found = method.objective(model, batch, {}, TrainStep(progress=0.7))
    found.loss.backward()
    return found, torch.cat([p.grad.flatten() for p in model.parameters()])


@HALF
@pytest.mark.parametrize("implicit", ["exact", "first_order"])
def test_the_implicit_term_is_that_of_float32_to_the_bit(half, implicit):
    method = DONE(Still(), implicit=implicit)
    (plain, exact), (found, gradient) = gradients(method, "float32"), gradients(method, half)
    assert torch.equal(gradient, exact) and torch.equal(plain.weights, found.weights)
    assert {name: value.dtype for name, value in found.state.items()} == {
        name: value.dtype for name, value in plain.state.items()
    }
    assert all(torch.equal(found.state[name], plain.state[name]) for name in plain.state)


@HALF
def test_without_an_implicit_term_the_pass_is_in_half_and_the_weights_are_not(half):
    method = DONE(Still(), implicit="none")
    (plain, exact), (found, gradient) = (gradients(method, name, SmallCNN()) for name in ("float32", half))
    assert 0 < (gradient - exact).norm() < {"bf16": 0.1, "fp16": 0.01}[half] * exact.norm()
    assert found.sample_losses.dtype is found.weights.dtype is torch.float32
    assert found.state["nu"].dtype is plain.state["nu"].dtype is torch.float64


@HALF
@pytest.mark.parametrize(
    "method",
    [
        AT(PGD(LinfBall(0.1), 2, SignStep(0.05))),
        DONE(PGD(LinfBall(0.1), 2, BarrierStep())),
        FastBAT(),
        FastATGA(FGSM(LinfBall(0.1), 1.25)),
        AWP(AT(PGD(LinfBall(0.1), 2, SignStep(0.05)))),
    ],
    ids=lambda method: type(method).__name__,
)
def test_gradients_in_half_are_near_those_of_float32(half, method):
    (_, exact), (_, gradient) = gradients(method, "float32", SmallCNN()), gradients(method, half, SmallCNN())
    # Most of it is the attack's: where a gradient is near 0, its sign turns.
    assert (gradient - exact).norm() < {"bf16": 0.35, "fp16": 0.15}[half] * exact.norm()


@HALF
def test_the_alignment_of_gradients_is_taken_in_float32(half):
    method = FastATGA(Still(), strength=0.2)
    (plain, _), (found, _) = gradients(method, "float32"), gradients(method, half)
    assert torch.equal(plain.record["alignment"], found.record["alignment"])


def test_weights_that_a_pass_without_graph_has_cast_are_not_reused():
    layer, x = nn.Linear(4, 3), torch.rand(2, 4)
    with Precision("bf16", CPU).autocast():
        with torch.no_grad():
            layer(x)
        layer(x).float().sum().backward()
    assert layer.weight.grad is not None


# --- runs ------------------------------------------------------------------------------------------------------------


@HALF
def test_a_run_in_half_precision_learns_as_well(tiny, tmp_path, adversarial, half):
    tiny.train(tiny.run(adversarial, epochs=6), tmp_path / "float32")
    tiny.train(tiny.run(adversarial, epochs=6, precision=half), tmp_path / half)
    plain, rows = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("float32", half))
    assert rows[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=0.02) and rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[-1]["loss"] != plain[-1]["loss"]
    assert rows[-1].get("skipped_steps") == (0 if half == "fp16" else None)


@HALF
def test_it_resumes_to_the_same_bits(tiny, tmp_path, adversarial, half, same_bits):
    run = tiny.run(adversarial, precision=half, average=0.9)
    tiny.train(run, tmp_path / "whole")
    tiny.stopped(run, tmp_path / "parts", after=6)
    tiny.train(run, tmp_path / "parts", resume=True)
    (whole, info), (parts, resumed) = (tiny.checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert same_bits(whole, parts) and info["scaler"] == resumed["scaler"]
    assert info["scaler"] == ({} if half == "bf16" else {**info["scaler"], "scale": 2.0**16, "_growth_tracker": 12})


class Overflowing(nn.Module):
    """Its gradient overflows at some of its steps, as fp16 does where the scale is too large."""

    def __init__(self, at):
        super().__init__()
        self.flat, self.inside, self.at, self.passes = nn.Flatten(), nn.Linear(16, 3), at, 0

    def forward(self, x):
        logits = self.inside(self.flat(x))
        if self.training and torch.is_grad_enabled():
            self.passes += 1
            if self.passes in self.at:
                logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits


def test_an_overflow_skips_the_step_and_halves_the_scale(tiny, tmp_path):
    tiny.network = lambda: Overflowing({2, 3, 6})
    run = tiny.run(precision="fp16", average=0.9, epochs=2)
    steps = []
    for after in range(1, 8):
        output = tmp_path / str(after)
        tiny.stopped(run, output, after=after)
        steps.append(tiny.checkpoint(output))
    moved = [
        not torch.equal(one[0]["model/inside.weight"], two[0]["model/inside.weight"]) for one, two in pairwise(steps)
    ]
    assert moved == [False, False, True, True, False, True]
    averages = [tensors["average/inside.weight"] for tensors, _ in steps]
    assert torch.equal(averages[0], averages[2]) and torch.equal(averages[4], averages[5])
    assert [info["scaler"]["scale"] for _, info in steps] == [2.0**k for k in (16, 15, 14, 14, 14, 13, 13)]
    assert [info["scaler"]["skipped"] for _, info in steps] == [0, 1, 2, 0, 0, 1, 0]
    tiny.train(run, tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [2, 1]


def test_the_scale_comes_back_on_resume(tiny, tmp_path, same_bits):
    tiny.network = lambda: Overflowing({2, 3})
    run = tiny.run(precision="fp16", epochs=2)
    tiny.train(run, tmp_path / "whole")
    tiny.stopped(run, tmp_path / "parts", after=3)
    tiny.network = lambda: Overflowing(set())
    tiny.train(run, tmp_path / "parts", resume=True)
    (whole, info), (parts, resumed) = (tiny.checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert same_bits(whole, parts) and info["scaler"] == resumed["scaler"] and info["scaler"]["scale"] == 2.0**14


def test_steps_skipped_without_end_stop_the_run(tiny, tmp_path):
    tiny.network = lambda: Overflowing(range(4, 1000))
    with pytest.raises(NonFiniteError, match=rf"epoch 5, step 2: {MOST_SKIPPED} steps in a row were skipped.*bf16"):
        tiny.train(tiny.run(precision="fp16", epochs=9), tmp_path)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_without_a_scale_an_overflow_is_an_error(tiny, precision):
    tiny.network = lambda: Overflowing({2})
    with pytest.raises(NonFiniteError, match=r"epoch 0, step 1: the gradient of inside.weight"):
        tiny.train(tiny.run(precision=precision))


def test_clipping_sees_gradients_without_the_scale(tiny):
    found = {}
    for precision in ("float32", "fp16"):
        run = tiny.run(precision=precision, epochs=1)
        run = replace(run, optimizer=replace(run.optimizer, clip=0.05))
        found[precision] = torch.cat([p.detach().flatten() for p in tiny.train(run).parameters()])
    assert (found["fp16"] - found["float32"]).norm() < 1e-3


# --- what a device cannot do -----------------------------------------------------------------------------------------


def test_what_a_device_cannot_do_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="precision bf16 is for CUDA and the CPU, not for mps: use float32"):
        Precision("bf16", torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UsageError, match="does not compute in bf16: use precision fp16 or float32"):
        Precision("bf16", torch.device("cuda"))
