"""Mean-variance, chi-square DRO and CVaR against convex solvers, and over several batches."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy.optimize import LinearConstraint, linprog, minimize, minimize_scalar

from doubly.bilevel import ChiSquare, ConjugateGradient, CVaR, MeanVariance, RunningMean, Terms, cid

THRESHOLDS = [ChiSquare(0.5), ChiSquare(0.5, cap=2.5), CVaR(0.3)]
ALL = [MeanVariance(0.5), *THRESHOLDS]


def random_losses(count=16, seed=0, scale=3.0):
    return scale * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def changed(composition, **changes):
    return type(composition)(**{**vars(composition), **changes})


def weights_of(composition, losses, state=None):
    return composition.update(losses, losses, state or {})[0]


# Oracles


def penalty(weights, r):
    return r / 2 * (weights - 1).square().mean()


def chi_square_primal(losses, r, cap):
    """Value and weights by sequential quadratic programming."""
    l, n = losses.numpy(), len(losses)
    solution = minimize(
        lambda w: -(w * l).mean() + r / 2 * ((w - 1) ** 2).mean(),
        np.ones(n),
        jac=lambda w: (-l + r * (w - 1)) / n,
        bounds=[(0, cap)] * n,
        constraints=[LinearConstraint(np.ones((1, n)), n, n)],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return -solution.fun, torch.from_numpy(solution.x)


def chi_square_dual(losses, r, cap):
    """min over t of t + the mean of the penalty's conjugate at loss - t."""
    l = losses.numpy()

    def dual(t):
        w = np.clip(1 + (l - t) / r, 0, cap)
        return t + (w * (l - t) - r / 2 * (w - 1) ** 2).mean()

    return minimum(dual, l.min() - 1, l.max() + 1)


def cvar_primal(losses, alpha):
    n = len(losses)
    return -linprog(-losses.numpy() / n, A_eq=np.ones((1, n)), b_eq=[n], bounds=[(0, 1 / alpha)] * n).fun


def cvar_dual(losses, alpha):
    l = losses.numpy()
    return minimum(lambda t: t + np.maximum(l - t, 0).mean() / alpha, l.min() - 1, l.max() + 1)


def minimum(function, low, high):
    return minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-11, "maxiter": 500}).fun


few = settings(max_examples=40)
numbers = st.lists(st.one_of(st.floats(0, 5), st.sampled_from([0.0, 1.0, 2.0])), min_size=1, max_size=12)
offsets = st.sampled_from([0.0, 0.0, 1e6, -1e6])
temperatures = st.sampled_from([0.1, 0.5, 1.0, 10.0])


# One batch


@few
@given(numbers, offsets, temperatures, st.one_of(st.none(), st.floats(1.05, 12), st.sampled_from([1.5, 2.0, 4.0])))
@example([3.0], 0.0, 1.0, 2.0)
@example([2.0] * 6, 1e6, 0.1, 1.5)
@example([4.0, 4.0, 0.0, 0.0], 0.0, 0.1, 2.0)
@example([4.0, 0.0, 0.0, 0.0, 0.0], 0.0, 0.1, None)
def test_chi_square_is_its_primal_and_its_dual(losses, offset, r, cap):
    """The oracles see the losses without the offset, which moves the value and nothing else."""
    plain = torch.tensor(losses, dtype=torch.float64)
    composition, moved = ChiSquare(r, 1.0, cap), plain + offset
    by_primal, best = chi_square_primal(plain, r, cap)
    by_dual = chi_square_dual(plain, r, cap)
    assert by_primal == pytest.approx(by_dual, abs=1e-7)
    lost = 2e-16 * abs(offset) / r  # digits of the weights, in losses that carry sixteen
    weights = weights_of(composition, moved)
    assert torch.allclose(weights, best, atol=1e-5 + 10 * lost)
    assert composition.value(plain).item() == pytest.approx(by_dual, abs=1e-9)
    assert composition.value(moved).item() == pytest.approx(by_dual + offset, abs=1e-9 + lost * abs(offset))
    assert weights.min() >= 0 and weights.max() <= (cap or len(plain)) * (1 + 1e-12) + 10 * lost
    assert weights.mean().item() == pytest.approx(1, abs=1e-12 + 10 * lost)
    assert (weights * plain).mean() - penalty(weights, r) == pytest.approx(by_dual, abs=1e-9 + 100 * lost)


@few
@given(numbers, offsets, st.one_of(st.floats(0.02, 1), st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0])))
@example([3.0], 0.0, 0.3)
@example([2.0] * 6, 1e6, 0.3)
@example([4.0, 2.0, 2.0, 2.0, 0.0], 0.0, 0.5)  # n alpha is no integer, and the threshold is a tie
@example([0.0, 1.0, 2.0, 4.0], -1e6, 0.5)  # n alpha is an integer
def test_cvar_is_its_primal_and_its_dual(losses, offset, alpha):
    plain = torch.tensor(losses, dtype=torch.float64)
    composition, moved = CVaR(alpha, 1.0), plain + offset
    by_primal, by_dual = cvar_primal(plain, alpha), cvar_dual(plain, alpha)
    assert by_primal == pytest.approx(by_dual, abs=1e-7)
    lost = 1e-15 * abs(offset)
    weights = weights_of(composition, moved)
    assert composition.value(plain).item() == pytest.approx(by_primal, abs=1e-9)
    assert composition.value(moved).item() == pytest.approx(by_primal + offset, abs=1e-9 + 100 * lost)
    assert weights.min() >= 0 and weights.max() <= 1 / alpha * (1 + 1e-12)
    assert weights.mean().item() == pytest.approx(1, abs=1e-12)
    assert (weights * plain).mean().item() == pytest.approx(by_primal, abs=1e-9 + 100 * lost)
    for loss in moved.unique():
        assert len(weights[moved == loss].unique()) == 1  # samples on the threshold share alike


@few
@given(numbers, offsets, temperatures)
def test_mean_variance_is_its_formula_and_chi_square_with_no_bound_on_the_weights(losses, offset, r):
    plain = torch.tensor(losses, dtype=torch.float64)
    composition, moved = MeanVariance(r, 1.0), plain + offset
    weights, best = weights_of(composition, moved), 1 + (plain - plain.mean()) / r
    lost = 1e-15 * abs(offset)
    assert torch.allclose(weights, best, rtol=1e-12, atol=1e-12 + 10 * lost / r)
    primal = (best * plain).mean() - penalty(best, r)  # at the maximizer over w of mean 1, of either sign
    assert composition.value(moved).item() == pytest.approx((primal + offset).item(), abs=1e-9 + 100 * lost / r)
    assert weights.mean().item() == pytest.approx(1, abs=1e-12 + 10 * lost / r)


def test_the_weights_are_the_gradient_of_the_value():
    losses, step = random_losses(12), 1e-6
    capped = ChiSquare(0.5, cap=1.7)
    shares = [CVaR(alpha) for alpha in (0.1, 0.25, 0.33, 0.9, 1.0)]
    for composition in (MeanVariance(0.5), MeanVariance(5.0), ChiSquare(0.5), ChiSquare(5.0), capped, *shares):
        slopes = [
            (composition.value(losses + step * unit) - composition.value(losses - step * unit)) / 2 / step
            for unit in torch.eye(12)
        ]
        assert torch.allclose(torch.stack(slopes), weights_of(composition, losses) / 12, atol=1e-7), composition
        assert composition.value(losses.float()).dtype is torch.float32


def test_the_order_of_the_samples_changes_nothing():
    losses, order = random_losses(), torch.randperm(16, generator=torch.Generator().manual_seed(1))
    for composition in ALL:
        weights = weights_of(composition, losses)
        assert torch.allclose(weights[order], weights_of(composition, losses[order]), atol=1e-12), composition
        assert composition.value(losses).item() == pytest.approx(composition.value(losses[order]).item(), rel=1e-13)


def test_chi_square_that_clips_nothing_is_mean_variance():
    for cap in (None, 30.0):
        bounded, unbounded, state, other = ChiSquare(10.0, 0.6, cap), MeanVariance(10.0, 0.6), {}, {}
        for seed in range(4):
            losses = random_losses(seed=seed)
            weights, state = bounded.update(losses, losses, state)
            expected, other = unbounded.update(losses, losses, other)
            assert torch.allclose(weights, expected, rtol=1e-12)
            assert bounded.value(losses).item() == pytest.approx(unbounded.value(losses).item(), rel=1e-12)
    assert weights_of(MeanVariance(0.1), losses).min() < 0 == weights_of(ChiSquare(0.1), losses).min()


def test_cap_one_and_alpha_one_are_the_plain_mean_in_every_step():
    for composition in (ChiSquare(0.1, 1.0, 1.0), CVaR(1.0, 1.0), ChiSquare(0.1, 0.9, 1.0), CVaR(1.0, 0.9)):
        state = {}
        for seed, (scale, shift) in enumerate([(1.0, 5.0), (1e-3, 0.0), (1e3, 9.0), (1.0, 0.0)]):
            losses = random_losses(seed=seed)
            losses = shift + scale * torch.cat([losses, losses[:3], torch.zeros(2).double()])  # with ties
            weights, state = composition.update(losses, losses, state)
            assert torch.allclose(weights, torch.ones_like(losses), atol=1e-10), composition
            assert composition.value(losses).item() == pytest.approx(losses.mean().item(), rel=1e-10)


def test_capped_chi_square_of_small_r_is_cvar():
    losses = random_losses()
    for alpha in (1 / 4, 1 / 3):
        chi_square = weights_of(ChiSquare(1e-9, cap=1 / alpha), losses)
        assert torch.allclose(chi_square, weights_of(CVaR(alpha), losses), atol=1e-6)


# Several batches


def test_mean_variance_is_a_running_mean_of_two_moments():
    """It has the same gradient as that g of width two, with the implicit term."""
    r, solve = 0.7, ConjugateGradient(20, 1e-14)
    theta = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    for eta in (0.05, 0.5, 0.9, 1.0):
        generator, special, general = torch.Generator().manual_seed(0), {}, {}
        for _ in range(4):
            x, delta = (torch.randn(6, 2, generator=generator, dtype=torch.float64) for _ in range(2))

            def problem(delta, x=x, width=1):
                loss = (x + delta).matmul(theta).exp()
                inner = delta.square().sum(1) + delta.matmul(theta.sin())
                return Terms(loss if width == 1 else torch.stack([loss, loss.square()], 1), inner)

            one = cid(problem, delta, MeanVariance(r, eta), special, solve)
            f = RunningMean(lambda u: u[0] + (u[1] - u[0] ** 2) / (2 * r), eta)
            other = cid(lambda d, problem=problem: problem(d, width=2), delta, f, general, solve)
            gradient, expected = (torch.autograd.grad(d.loss, theta)[0] for d in (one, other))
            assert torch.allclose(gradient, expected, rtol=1e-10)
            special, general = one.state, other.state
            assert torch.allclose(special["u"], general["u"], rtol=1e-14)
            assert torch.equal(MeanVariance(r, eta).estimate(special), special["u"])


def test_unclipped_chi_square_keeps_the_running_mean_of_eq_10():
    for eta in (0.1, 0.5, 0.9):
        composition, state, u = ChiSquare(20.0, eta), {}, None
        for seed in range(6):
            losses = random_losses(seed=seed) + seed
            weights, state = composition.update(losses, losses, state)
            u = losses.mean() if u is None else (1 - eta) * u + eta * losses.mean()
            assert composition.estimate(state).item() == pytest.approx(u.item(), rel=1e-13)
            assert torch.allclose(weights, 1 + (losses - u) / 20, rtol=1e-12)


def test_eta_one_forgets_earlier_batches():
    losses = random_losses()
    for composition in ALL:
        composition = changed(composition, eta=1.0)
        _, state = composition.update(losses + 7, losses + 7, {})
        weights = weights_of(composition, losses, state)
        assert torch.allclose(weights, weights_of(composition, losses), atol=1e-12), composition


def test_the_threshold_minimizes_the_dual_of_the_batch_plus_a_pull_to_the_old_threshold():
    first, second = random_losses(seed=1) + 1, random_losses(seed=2)
    for composition in (ChiSquare(0.5, 0.3), ChiSquare(0.5, 0.3, 2.0), CVaR(0.3, 0.3)):
        _, old = composition.update(first, first, {})
        _, new = composition.update(second, second, old)
        chi_square = isinstance(composition, ChiSquare)
        unit = composition.r if chi_square else old["scale"].item()
        pull = (1 - composition.eta) / composition.eta / unit

        def objective(t, rule=composition, old=old, chi_square=chi_square, pull=pull):
            if chi_square:
                w = (1 + (second - t) / rule.r).clamp(0, rule.cap)
                dual = t + (w * (second - t)).mean().item() - penalty(w, rule.r).item()
            else:
                dual = t + (second - t).clamp_min(0).mean().item() / rule.alpha
            return dual + pull / 2 * (t - old["threshold"].item()) ** 2

        t = new["threshold"].item()
        assert objective(t) == pytest.approx(minimum(objective, -1, 6), abs=1e-9), composition
        assert second.min() < t < old["threshold"].item()


def test_a_threshold_restarts_when_r_or_alpha_changes():
    first, second = random_losses(seed=1) + 20, random_losses(seed=2)
    for composition in ALL:
        composition = changed(composition, eta=0.1)
        _, state = composition.update(first, first, {})
        continued, _ = composition.update(second, second, state)
        assert continued.mean() < 0.5  # the first batch still counts
        name = "alpha" if isinstance(composition, CVaR) else "r"
        other = changed(composition, **{name: 0.4})
        weights, new_state = other.update(second, second, state)
        if isinstance(composition, MeanVariance):  # its moments do not depend on r
            assert torch.allclose(weights - 1, (continued - 1) * 0.5 / 0.4)
        else:
            assert torch.equal(weights, weights_of(other, second)) and new_state[name].item() == 0.4


def test_the_unit_of_the_losses_does_not_matter():
    """CVaR measures its steps by the spread of the losses; for the others r has the same unit."""
    for composition in ALL:
        for unit in (1e-3, 1e3):
            composition = changed(composition, eta=0.2)
            scaled = composition if isinstance(composition, CVaR) else changed(composition, r=0.5 * unit)
            state, scaled_state = {}, {}
            for seed in range(4):
                losses = random_losses(seed=seed) + 0.3 * seed
                weights, state = composition.update(losses, losses, state)
                same, scaled_state = scaled.update(unit * losses, unit * losses, scaled_state)
                assert torch.allclose(weights, same, atol=1e-9), (composition, unit)


def test_losses_up_to_a_million_temperatures_stay_finite():
    for composition in ALL:
        composition = composition if isinstance(composition, CVaR) else changed(composition, r=0.01)
        for dtype in (torch.float32, torch.float64):
            state = {}
            for top in (1e4, 0.0, 1e4, -1e4, 3.0):
                losses = torch.linspace(0, top, 32, dtype=torch.float64).to(dtype)
                weights, state = composition.update(losses, losses, state)
                assert weights.dtype is dtype and weights.isfinite().all() and composition.value(losses).isfinite()
                assert all(value.isfinite().all() and value.dtype is torch.float64 for value in state.values())
                if not isinstance(composition, MeanVariance):
                    highest = composition.cap if isinstance(composition, ChiSquare) else 1 / composition.alpha
                    assert weights.min() >= 0 and (highest is None or weights.max() <= highest * (1 + 1e-6))


def test_a_saved_state_continues_and_an_update_changes_no_argument(tmp_path):
    first, second = random_losses(seed=1) + 1, random_losses(seed=2)
    for composition in ALL:
        composition = changed(composition, eta=0.4)
        _, state = composition.update(first, first, {})
        save_file(state, tmp_path / "state.safetensors")
        loaded = load_file(tmp_path / "state.safetensors")
        weights, expected = composition.update(second, second, state)
        assert all(torch.equal(state[key], loaded[key]) for key in loaded)
        assert torch.equal(second, random_losses(seed=2))
        again, new_state = composition.update(second, second, loaded)
        assert torch.equal(weights, again) and all(torch.equal(expected[key], new_state[key]) for key in expected)
        assert not torch.allclose(weights, weights_of(composition, second))  # the state matters


def test_the_weights_of_a_rank_come_from_the_losses_of_all_ranks():
    losses = random_losses()
    for composition in ALL:
        weights, state = composition.update(losses, losses, {})
        part, part_state = composition.update(losses[4:8], losses, {})
        assert torch.equal(part, weights[4:8]) and all(torch.equal(part_state[key], state[key]) for key in state)


def mean_threshold(composition, population, steps, size=4):
    """The mean of the threshold over small batches, without the first quarter."""
    generator, state, thresholds = torch.Generator().manual_seed(0), {}, []
    for _ in range(steps):
        batch = population[torch.randperm(len(population), generator=generator)[:size]]
        _, state = composition.update(batch, batch, state)
        thresholds.append(composition.estimate(state).item())
    return sum(thresholds[steps // 4 :]) / (steps - steps // 4)


def test_small_batches_find_the_threshold_of_all_samples_and_not_the_average_of_theirs():
    population = -random_losses(200, scale=1.0).clamp_min(1e-3).log()  # a long tail
    for composition in (ChiSquare(0.1, 0.1), ChiSquare(0.1, 0.1, 2.0), CVaR(0.25, 0.1)):
        batch_only = changed(composition, eta=1.0)
        exact = batch_only.update(population, population, {})[1]["threshold"].item()
        far = abs(mean_threshold(batch_only, population, 100) - exact)
        near = abs(mean_threshold(composition, population, 300) - exact)
        assert far > 0.2 and near < far / 2, composition


# STORM and refusals


def test_mean_variance_with_storm_is_the_formula():
    composition, eta = MeanVariance(0.5, 0.3), 0.3
    first, second, before = random_losses(seed=1), random_losses(seed=2), random_losses(seed=3)
    _, state = composition.update(first, first, {})
    weights, new_state = composition.update(second, second, state, before)

    def moments(losses):
        return torch.stack([losses.mean(), losses.square().mean()])

    u = moments(second) + (1 - eta) * (moments(first) - moments(before))
    assert torch.allclose(new_state["u"], u, rtol=1e-14)
    assert torch.allclose(weights, 1 + (second - u[0]) / 0.5, rtol=1e-12)


def test_storm_and_settings_out_of_range_are_refused():
    losses = random_losses()
    for composition in THRESHOLDS:
        with pytest.raises(ValueError, match=rf"{type(composition).__name__} keeps a threshold: leave storm off"):
            composition.update(losses, losses, {}, losses)
    table = [
        (MeanVariance, {"r": 0.0}),
        (MeanVariance, {"eta": 0.0}),
        (ChiSquare, {"r": -1.0}),
        (ChiSquare, {"r": float("nan")}),
        (ChiSquare, {"eta": 1.1}),
        (ChiSquare, {"cap": 0.5}),
        (CVaR, {"alpha": 0.0}),
        (CVaR, {"alpha": 1.5}),
        (CVaR, {"alpha": float("nan")}),
        (CVaR, {"eta": -0.1}),
    ]
    for make, arguments in table:
        with pytest.raises(ValueError, match=rf"{next(iter(arguments))}=.* is not allowed"):
            make(**arguments)
