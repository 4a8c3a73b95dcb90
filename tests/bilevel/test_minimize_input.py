"""What `minimize` accepts, leaves unchanged and refuses."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from doubly.bilevel import (
    Ball,
    Box,
    ConjugateGradient,
    CVaR,
    Descent,
    Direct,
    GradientStep,
    RunningMean,
    Simplex,
    SolverWarning,
    Terms,
)
from doubly.bilevel.progress_bar import ProgressBar
from toy_bilevel import DATA, ONE, RIDGE, ROWS, SGD, START, B, D, N, alike, quadratic, reachable, run, without_ridge


class Sample(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor


def test_data_may_be_any_collection_of_rows_or_nothing():
    expected = run(batch_size=4, steps=6)
    named = dict(zip("abc", DATA, strict=True))
    table = [
        (Sample(*DATA), lambda batch: (batch.a, batch.b, batch.c)),
        (named, lambda batch: tuple(batch[name] for name in "abc")),
        (torch.arange(N), lambda batch: [part[batch] for part in DATA]),
    ]
    for data, read in table:
        result = run(data=data, problem=lambda t, d, b, read=read: quadratic(t, d, read(b)), batch_size=4, steps=6)
        assert alike(result, expected), type(data)

    def all_data(theta, delta, batch):
        return quadratic(theta, delta, DATA)

    assert alike(run(data=None, problem=all_data), run())
    assert alike(run(delta=ONE, data=None, problem=all_data, shared=True), run(delta=ONE, shared=True))


def test_a_loader_begins_again_and_a_generator_ends_the_run():
    loader = DataLoader(TensorDataset(*reachable()[1]), 4, shuffle=True, generator=torch.Generator().manual_seed(0))
    result = run(delta=ROWS[:4], data=loader, problem=without_ridge, steps=60)
    assert torch.allclose(result.theta, reachable()[0], atol=1e-5)
    assert result.delta.shape == (4, D) and len(result.history["value"]) == 60
    batches = (tuple(part[first : first + 4] for part in DATA) for first in (0, 4, 8))
    result = run(delta=ROWS[:4], data=batches, steps=100)
    assert all(len(column) == 3 for column in result.history.values())


def test_a_row_of_delta_may_have_any_shape():
    def spread(theta, delta, batch):
        return Terms((delta - 1).square().flatten(1).sum(1), (delta - theta).square().flatten(1).sum(1))

    sgd, descent = partial(torch.optim.SGD, lr=0.1), Descent(GradientStep(0.5), 2)
    for delta in (torch.zeros(N, 2, 3), torch.zeros(N, 1)):
        result = run(torch.zeros(()), delta, None, spread, sgd, 60, descent)
        assert result.theta.item() == pytest.approx(1, abs=1e-5) and result.delta.shape == delta.shape

    def scalar(theta, delta, batch):  # one number per sample, or one number
        a, b, c = (part.flatten(1)[:, 0] for part in batch)
        return Terms((delta - c).square() / 2 + RIDGE / 2 * theta.square(), (delta - a * theta - b).square() / 2)

    for shared in (False, True):
        start = torch.zeros(() if shared else N, dtype=torch.float64)
        result = run(torch.zeros((), dtype=torch.float64), start, problem=scalar, steps=60, shared=shared)
        a, b, c = (part.flatten(1)[:, 0].mean() if shared else part.flatten(1)[:, 0] for part in DATA)
        expected = (a * (c - b)).mean() / ((a * a).mean() + RIDGE)
        assert result.theta.item() == pytest.approx(expected.item(), abs=1e-6)


# What belongs to the caller


def test_flags_gradients_delta_data_and_state_are_left_unchanged():
    theta, other = START[:1].clone(), START[1:].clone().requires_grad_()
    other.grad = gradient = torch.full((1,), 7.0, dtype=torch.float64)
    delta, copies = ROWS.clone().requires_grad_(), [part.clone() for part in DATA]
    state = {"u": torch.tensor(3.0, dtype=torch.float64)}
    result = run(
        [theta, other],
        delta,
        problem=lambda t, d, batch: quadratic(torch.cat(t), d, batch),
        steps=3,
        batch_size=4,
        state=state,
        storm=True,
    )
    assert not theta.requires_grad and theta.grad is None
    assert other.requires_grad and other.grad is gradient and gradient.item() == 7
    assert delta.requires_grad and torch.equal(delta, ROWS) and delta.grad is None
    assert all(torch.equal(part, copy) for part, copy in zip(DATA, copies, strict=True))
    assert state["u"].item() == 3 and not torch.equal(theta, START[:1])
    assert not any(t.requires_grad for t in (result.delta, result.u, *result.history.values()))


def test_the_global_generator_is_left_alone_and_the_seed_decides():
    before = torch.get_rng_state()
    one, same, other = (run(batch_size=4, steps=7, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert alike(one, same) and not alike(one, other)


def test_single_precision_stays_single():
    def single(theta, delta, batch):
        a, b, c = batch
        return Terms((delta - c).square().sum(1) / 2, (delta - a @ theta - b).square().sum(1) / 2)

    result = run(START.float(), ROWS.float(), tuple(part.float() for part in DATA), single, steps=3)
    assert {result.theta.dtype, result.delta.dtype, result.u.dtype} == {torch.float32}


def test_the_progress_bar_is_on_stderr_and_ends_its_line(capfd):
    def failing(step):
        raise KeyError

    run(steps=5)
    assert capfd.readouterr() == ("", "")
    run(steps=5, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1 and "5/5" in err and "value" in err
    with pytest.raises(KeyError):
        run(steps=5, progress=True, callback=failing)
    assert capfd.readouterr().err.endswith("\n")


def test_the_progress_bar_is_not_drawn_more_often_than_it_can_be_read(capfd, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("doubly.bilevel.progress_bar.time.monotonic", lambda: clock[0])
    with ProgressBar(4, True) as bar:
        for done, seconds in enumerate((0.05, 0.2, 0.25, 0.26), 1):
            clock[0] = seconds
            bar.draw(done, {"value": 1.0, "gradient": 2.0})
    err = capfd.readouterr().err
    assert [f"{done}/4" in err for done in (1, 2, 3, 4)] == [False, True, False, True] and "0 s left" in err


# What goes wrong


def test_numbers_that_are_not_finite_stop_the_run_name_the_step_and_keep_theta():
    def in_the_value(theta, delta, batch):
        terms = quadratic(theta, delta, DATA)
        return terms._replace(outer=terms.outer + (batch * theta).sum(1))

    def in_the_inner_gradient(theta, delta, batch):
        terms = quadratic(theta, delta, DATA)
        return terms._replace(inner=terms.inner * batch[:, 0])

    for problem, message in (
        (in_the_value, "in the outer problem, .* not finite: take smaller steps of the optimizer"),
        (in_the_inner_gradient, "in the inner problem, .* those of descent"),
    ):
        batches = (torch.full((N, 1), torch.nan if step == 3 else 1.0, dtype=torch.float64) for step in range(100))
        theta = START.clone()
        with pytest.raises(ArithmeticError, match=f"step 3: .*{message}"):
            run(theta, data=batches, problem=problem)
        assert theta.isfinite().all() and not theta.requires_grad and theta.grad is None


def test_a_solve_that_misses_its_tolerance_in_every_step_warns_once_and_does_not_explode():
    def flat_in_one_coordinate(theta, delta, batch):
        """h is linear in the last coordinate of delta, and g pulls there."""
        terms = quadratic(theta, delta, batch)
        return terms._replace(inner=(delta[:, :2] - theta).square().sum(1) + 0 * delta.sum(1))

    with pytest.warns(SolverWarning) as caught:
        result = run(problem=flat_in_one_coordinate, steps=5)
    assert (
        sum("linear solve" in str(warning.message) for warning in caught) == 1
        and (result.history["residual"] > 0.1).all()
    )
    assert result.theta.isfinite().all() and result.theta.norm() < 10


def mean_of(part):
    def problem(theta, delta, batch):
        terms = quadratic(theta, delta, batch)
        return terms._replace(**{part: getattr(terms, part).mean()})

    return problem


def test_bad_input_is_refused_with_the_remedy():
    differentiable = "f must be a differentiable function of u"
    table = [
        (
            TypeError,
            "optimizer must be a torch optimizer or a function .* got 'adam'",
            {"optimizer": "adam"},
        ),
        (TypeError, r"solve must be a solver or None, got 'cg': pass ConjugateGradient\(\)", {"solve": "cg"}),
        (TypeError, r"got <class .*: pass ConjugateGradient\(\)", {"solve": ConjugateGradient}),
        (TypeError, r"descent must be .*, got 10: pass Descent\(GradientStep\(0\.1\), steps=10\)", {"descent": 10}),
        (TypeError, r"composition must be a value, got the class: write CVaR\(…\)", {"composition": CVaR}),
        (TypeError, "delta must be a floating-point tensor, .*, got NoneType", {"delta": None}),
        (TypeError, "delta must be a floating-point tensor, .*, got ndarray", {"delta": ROWS.numpy()}),
        (TypeError, "theta must be a module", {"theta": ["a"]}),
        (TypeError, r"must return Terms\(outer, inner\)", {"problem": lambda *given: quadratic(*given).outer}),
        (TypeError, r"got function: for a function f pass RunningMean\(f\)", {"composition": lambda u: u}),
        (TypeError, r"write Simplex\(…\)", {"constraint": Simplex}),
        (TypeError, r"torch\.as_tensor makes one", {"data": B.numpy()}),
        (TypeError, "an iterable of batches has no batch_size", {"data": [DATA], "batch_size": 4}),
        (ValueError, "does not hold all tensors", {"optimizer": SGD([torch.ones(2, requires_grad=True)])}),
        (ValueError, "batch_size=13 is not allowed: 1 to 12", {"batch_size": 13}),
        (ValueError, r"equally many rows.*\[5, 12\]", {"delta": ROWS[:5]}),
        (ValueError, r"in 12 of 12 .*project", {"delta": ROWS + 3, "constraint": Box(-1.0, 1.0)}),
        (ValueError, "outside .* in 1 of 1", {"delta": ONE + 3, "shared": True, "constraint": Ball(1.0)}),
        (ValueError, "steps must be positive", {"steps": 0}),
        (ValueError, "data must hold a batch", {"data": iter([])}),
        (ValueError, r"outer must hold one g_i per sample", {"problem": mean_of("outer")}),
        (ValueError, r"inner must hold one h_i per sample", {"problem": mean_of("inner")}),
        (ValueError, "inner must hold one h_i", {"inner": lambda *given: quadratic(*given).inner.mean()}),
        (ValueError, r"eta=1\.5 is not allowed", {"eta": lambda step: 1.5}),
        (TypeError, r"optimizer\(tensors\) must return a torch optimizer, got None", {"optimizer": lambda _: None}),
        (TypeError, "eta must return a number, got 'x' at step 0", {"eta": lambda step: "x"}),
        (TypeError, r"step_size must be a function of the step alone \(too many", {"step_size": lambda: 0.1}),
        (TypeError, "step_size must return a number, got None", {"step_size": print}),
        (TypeError, r"theta holds an expanded tensor.*clone\(\)", {"theta": torch.ones(1).expand(2)}),
        (TypeError, "Direct factorizes matrices of float32", {"delta": ROWS.half(), "solve": Direct()}),
        (ValueError, "f must return one number", {"composition": RunningMean(lambda u: u.expand(2))}),
        (ValueError, differentiable, {"composition": RunningMean(lambda u: 1.0)}),
        (ValueError, differentiable, {"composition": RunningMean(lambda u: torch.ones(()))}),
        (ValueError, "leave storm off", {"composition": CVaR(), "storm": True}),
        (ValueError, "does not depend on theta", {"problem": lambda t, d, b: quadratic(START, d, b)}),
        (
            ValueError,
            "does not depend on theta",
            {"problem": lambda t, d, b: Terms((d - 1).sum(1), quadratic(t, d, b).inner), "solve": None},
        ),
        (
            ValueError,
            "inner does not depend on delta",
            {"problem": lambda t, d, b: Terms(t.sum() + B[:, 0], B[:, 0])},
        ),
        (
            ValueError,
            "return h_i, one number per sample, as inner",
            {"problem": lambda t, d, b: Terms(torch.stack([quadratic(t, d, b).outer] * 2, 1))},
        ),
    ]
    for error, message, options in table:
        with pytest.raises(error, match=message):
            run(**options)
