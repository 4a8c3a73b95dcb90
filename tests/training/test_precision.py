"""Half precision, on the CPU: what autocast may touch, and the decisions of the scaler. CUDA takes the same path."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD, Attack
from doubly.bilevel import BarrierStep, SignStep
from doubly.errors import NonFiniteError, UsageError
from doubly.methods import AT, AWP, DONE, FastATGA, FastBAT
from doubly.models import NarrowResNet, SmallCNN
from doubly.rundir import read_metrics
from doubly.threat import LinfBall
from doubly.training.precision import MAX_SKIPPED, Precision
from doubly.types import Batch, TrainStep

CPU = torch.device("cpu")
HALF = ("bf16", "fp16")
each_half = pytest.mark.parametrize("half", HALF)


def problem(network):
    torch.manual_seed(0)
    model = network.build(1, 3, [0.5], [0.25])
    x, y = torch.rand(16, 1, 8, 8), torch.arange(16) % 3
    return model, Batch(x, y, torch.arange(16))


class FixedAttack(Attack):
    """Always returns the same delta, so that both precisions train on the same images."""

    threat, loss, attack_mode = LinfBall(0.1), PGD().loss, "eval"

    def __call__(self, model, x, y, generator):
        return self.threat.around(x).at(torch.full_like(x, 0.3))


def gradients(method, name, network=None):
    """Return the objective and the gradient in this precision."""
    model, batch = problem(network or NarrowResNet(4, 1))
    with Precision(name, CPU).autocast():
        result = method.objective(model, batch, {}, TrainStep(progress=0.7))
    result.loss.backward()
    return result, torch.cat([p.grad.flatten() for p in model.parameters()])


@each_half
def test_implicit_terms_and_alignment_are_those_of_float32_to_the_bit(half):
    for implicit in ("exact", "first_order"):
        method = DONE(FixedAttack(), implicit=implicit)
        (plain, exact), (result, gradient) = gradients(method, "float32"), gradients(method, half)
        assert torch.equal(gradient, exact) and torch.equal(plain.weights, result.weights)
        assert all(result.state[name].dtype is plain.state[name].dtype for name in plain.state)
        assert all(torch.equal(result.state[name], plain.state[name]) for name in plain.state)
    aligned = FastATGA(FixedAttack(), strength=0.2)
    (plain, _), (result, _) = gradients(aligned, "float32"), gradients(aligned, half)
    assert torch.equal(plain.record["alignment"], result.record["alignment"])


@each_half
def test_without_an_implicit_term_the_pass_is_in_half_and_the_weights_are_not(half):
    method = DONE(FixedAttack(), implicit="none")
    (plain, exact), (result, gradient) = (gradients(method, name, SmallCNN()) for name in ("float32", half))
    assert 0 < (gradient - exact).norm() < {"bf16": 0.1, "fp16": 0.01}[half] * exact.norm()
    assert result.sample_losses.dtype is result.weights.dtype is torch.float32
    assert result.state["nu"].dtype is plain.state["nu"].dtype is torch.float64


@each_half
def test_gradients_in_half_are_near_those_of_float32(half):
    attack = PGD(LinfBall(0.1), 2, SignStep(0.05))
    for method in (
        AT(attack),
        DONE(PGD(LinfBall(0.1), 2, BarrierStep())),
        FastBAT(),
        FastATGA(FGSM(LinfBall(0.1), 1.25)),
        AWP(AT(attack)),
    ):
        (_, exact), (_, gradient) = gradients(method, "float32", SmallCNN()), gradients(method, half, SmallCNN())
        # Most of the difference is the attack's: where a gradient is near 0, its sign turns.
        assert (gradient - exact).norm() < {"bf16": 0.35, "fp16": 0.15}[half] * exact.norm(), method


def test_weights_that_a_pass_without_graph_has_cast_are_not_reused():
    layer, x = nn.Linear(4, 3), torch.rand(2, 4)
    with Precision("bf16", CPU).autocast():
        with torch.no_grad():
            layer(x)
        layer(x).float().sum().backward()
    assert layer.weight.grad is not None


@each_half
def test_a_run_in_half_precision_learns_as_well_and_resumes_to_the_same_bits(
    tiny, tmp_path, adversarial, half, same_bits
):
    tiny.train(tiny.run(adversarial, epochs=6), tmp_path / "float32")
    run = tiny.run(adversarial, epochs=6, precision=half)
    tiny.train(run, tmp_path / "whole")
    plain, rows = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("float32", "whole"))
    assert rows[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=0.02) and rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[-1]["loss"] != plain[-1]["loss"]
    assert rows[-1].get("skipped_steps") == (0 if half == "fp16" else None)
    tiny.stopped(run, tmp_path / "parts", after=6)
    tiny.train(run, tmp_path / "parts", resume=True)
    (whole, info), (parts, resumed) = (tiny.checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert same_bits(whole, parts) and info["scaler"] == resumed["scaler"]
    assert info["scaler"] == ({} if half == "bf16" else {**info["scaler"], "scale": 2.0**16, "_growth_tracker": 24})


class Overflowing(nn.Module):
    """Its gradient overflows at some of its steps, as fp16 does where the scale is too large."""

    def __init__(self, steps):
        super().__init__()
        self.flat, self.inside, self.steps, self.passes = nn.Flatten(), nn.Linear(16, 3), steps, 0

    def forward(self, x):
        logits = self.inside(self.flat(x))
        if self.training and torch.is_grad_enabled():
            self.passes += 1
            if self.passes in self.steps:
                logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits


def test_an_overflow_skips_the_step_and_halves_the_scale_also_after_a_resume(tiny, tmp_path, same_bits):
    """One process per step, each of which resumes where the last one stopped."""
    tiny.network = lambda: Overflowing({2, 3, 6})
    run = tiny.run(precision="fp16", ema_decay=0.9, epochs=2)
    tiny.train(run, tmp_path / "whole")
    assert [row["skipped_steps"] for row in read_metrics(tmp_path / "whole" / "metrics.jsonl")] == [2, 1]
    checkpoints = []
    for step in range(1, 8):
        tiny.network = lambda step=step: Overflowing({1} if step in (2, 3, 6) else set())
        tiny.stopped(run, tmp_path / "parts", after=1, resume=True)
        checkpoints.append(tiny.checkpoint(tmp_path / "parts"))
    weights = [tensors["model/inside.weight"] for tensors, _ in checkpoints]
    moved = [not torch.equal(one, other) for one, other in pairwise(weights)]
    assert moved == [False, False, True, True, False, True]
    averages = [tensors["ema/inside.weight"] for tensors, _ in checkpoints]
    assert torch.equal(averages[0], averages[2]) and torch.equal(averages[4], averages[5])
    assert [info["scaler"]["scale"] for _, info in checkpoints] == [2.0**k for k in (16, 15, 14, 14, 14, 13, 13)]
    assert [info["scaler"]["skipped"] for _, info in checkpoints] == [0, 1, 2, 0, 0, 1, 0]
    tiny.train(run, tmp_path / "parts", resume=True)
    (whole, info), (parts, resumed) = (tiny.checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert same_bits(whole, parts) and info["scaler"] == resumed["scaler"]


def test_steps_skipped_without_end_stop_the_run(tiny):
    tiny.network = lambda: Overflowing(range(4, 1000))
    with pytest.raises(NonFiniteError, match=rf"epoch 5, step 2: {MAX_SKIPPED} steps in a row were skipped.*bf16"):
        tiny.train(tiny.run(precision="fp16", epochs=9))


def test_without_a_scale_an_overflow_is_an_error(tiny):
    for precision in ("float32", "bf16"):
        tiny.network = lambda: Overflowing({2})
        with pytest.raises(NonFiniteError, match=r"epoch 0, step 1: the gradient of inside.weight"):
            tiny.train(tiny.run(precision=precision))


def test_clipping_sees_gradients_without_the_scale(tiny):
    weights = {}
    for precision in ("float32", "fp16"):
        run = tiny.run(precision=precision, epochs=1)
        run = replace(run, optimizer=replace(run.optimizer, clip=0.05))
        weights[precision] = torch.cat([p.detach().flatten() for p in tiny.train(run).parameters()])
    assert (weights["fp16"] - weights["float32"]).norm() < 1e-3


def test_a_device_that_cannot_compute_in_half_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="precision bf16 is for CUDA and the CPU, not for mps: use float32"):
        Precision("bf16", torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UsageError, match="does not compute in bf16: use precision fp16 or float32"):
        Precision("bf16", torch.device("cuda"))
