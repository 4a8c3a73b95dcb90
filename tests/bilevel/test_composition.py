import math
from itertools import product

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy.optimize import LinearConstraint, brentq, minimize

from doubly.bilevel import Composition, LogMeanExp, RunningMean

few = settings(max_examples=40, deadline=None, derandomize=True)


def random_losses(count=16, seed=0, scale=2.0, dtype=torch.float64):
    return scale * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights_of(composition, losses, state=None):
    return composition.update(losses, losses, state or {})[0]


# RunningMean


def test_running_mean_starts_with_the_batch_and_then_averages():
    composition = RunningMean(lambda u: u**3, eta=0.7)
    first, second = random_losses(seed=1), random_losses(seed=2)
    cotangents, state = composition.update(first, first, {})
    assert torch.allclose(cotangents, (3 * first.mean() ** 2).expand(16))
    cotangents, state = composition.update(second, second, state)
    u = 0.3 * first.mean() + 0.7 * second.mean()
    assert torch.allclose(state["u"], u) and torch.allclose(cotangents, (3 * u**2).expand(16))
    assert torch.equal(composition.estimate(state), state["u"])


def test_running_mean_takes_vectors_and_any_smooth_f():
    values, f = random_losses(24, scale=1.0).view(8, 3), lambda u: u[0] * u[1].sin() / u[2]
    cotangents, _ = RunningMean(f).update(values, values, {})
    a, b, c = values.mean(0)
    by_hand = torch.stack([b.sin() / c, a * b.cos() / c, -a * b.sin() / c**2])
    assert torch.allclose(cotangents, by_hand.expand(8, 3)) and not cotangents.requires_grad
    assert torch.equal(RunningMean(f).value(values), f(values.mean(0)))


def test_running_mean_takes_any_shape_of_one_number_and_refuses_more():
    values = random_losses(8)[:, None]
    for f in (lambda u: u.sum(), lambda u: u, lambda u: u[None]):
        cotangents, _ = RunningMean(f).update(values, values, {})
        assert torch.equal(cotangents, torch.ones(8, 1).double())
        assert RunningMean(f).value(values).shape == ()
    wide = torch.ones(8, 3)
    for call in (RunningMean().value, lambda wide: RunningMean().update(wide, wide, {})):
        with pytest.raises(ValueError, match=r"f must return one number, got shape \(3,\).*reduce it"):
            call(wide)


# LogMeanExp, the paper's rule


def test_eta_one_is_the_softmax_of_the_batch_whatever_was_before():
    losses = random_losses()
    for r in (0.1, 1.0, 10.0):
        composition = LogMeanExp(r, eta=1.0)
        _, state = composition.update(losses + 7, losses + 7, {})
        expected = 16 * torch.softmax(losses / r, 0)
        assert torch.allclose(weights_of(composition, losses, state), expected, rtol=1e-12)


def test_eta_one_has_the_gradient_of_the_objective():
    losses = random_losses().requires_grad_()
    for r in (0.1, 1.0, 10.0):
        value = r * (torch.logsumexp(losses / r, 0) - math.log(16))
        (expected,) = torch.autograd.grad(value, losses)
        assert torch.allclose(weights_of(LogMeanExp(r, 1.0), losses.detach()) / 16, expected, rtol=1e-12)


def test_weights_are_those_of_the_running_mean_of_exponentials():
    for eta in (0.1, 0.5, 0.9):
        composition, u, state = LogMeanExp(0.5, eta), None, {}
        for seed in range(5):
            losses = random_losses(seed=seed)
            g = (losses / 0.5).exp()
            u = g.mean() if u is None else (1 - eta) * u + eta * g.mean()
            weights, state = composition.update(losses, losses, state)
            assert torch.allclose(weights, g / u, rtol=1e-12)
            assert composition.estimate(state).item() == pytest.approx(u.item(), rel=1e-12)


@few
@given(st.lists(st.floats(0, 30), min_size=1, max_size=20), st.floats(0, 30), st.floats(0.05, 1), st.floats(0.1, 10))
def test_the_mean_weight_is_the_ratio_of_batch_to_average_and_at_most_one_over_eta(numbers, before, eta, r):
    losses, composition = torch.tensor(numbers, dtype=torch.float64), LogMeanExp(r, eta)
    _, state = composition.update(torch.tensor([before]).double(), torch.tensor([before]).double(), {})
    weights, state = composition.update(losses, losses, state)
    nu_batch = torch.logsumexp(losses / r, 0) - math.log(len(numbers))
    assert weights.mean().item() == pytest.approx((nu_batch - state["nu"]).exp().item(), rel=1e-9, abs=1e-300)
    assert weights.mean() <= 1 / eta * (1 + 1e-9)


def test_losses_up_to_a_million_at_the_lowest_temperature_stay_finite():
    for dtype in (torch.float32, torch.float64):
        for cap in (None, 1.0, 5.0):
            composition, state = LogMeanExp(0.01, cap=cap), {}
            for top in (1e6, 0.0, 1e6, 3.0):
                losses = torch.linspace(0, top, 32, dtype=torch.float64).to(dtype)
                weights, state = composition.update(losses, losses, state)
                assert weights.dtype is dtype and weights.isfinite().all() and (weights >= 0).all()
                assert state["nu"].dtype is torch.float64
                assert cap == 1 or state["nu"].isfinite()
                assert cap is not None or weights.double().mean() <= 1 / 0.9 * (1 + 1e-6)


def test_float32_losses_lose_nothing_in_the_average():
    losses = random_losses(dtype=torch.float32)
    exact = 16 * torch.softmax(losses.double() / 0.01, 0)
    assert torch.allclose(weights_of(LogMeanExp(0.01), losses).double(), exact, rtol=1e-6, atol=1e-30)


def test_large_r_gives_weights_of_one():
    assert torch.allclose(weights_of(LogMeanExp(1e9), random_losses()), torch.ones(16).double(), atol=1e-8)


def test_the_first_batch_seeds_and_a_new_r_seeds_again():
    first, second = random_losses(seed=1) + 20, random_losses(seed=2)
    _, state = LogMeanExp(1.0, 0.5).update(first, first, {})
    assert state["nu"].item() == pytest.approx((first.logsumexp(0) - math.log(16)).item())
    assert weights_of(LogMeanExp(1.0, 0.5), second, state).mean() < 1e-6  # the first batch still counts
    for all_previous in (None, first):
        weights, new_state = LogMeanExp(0.1, 0.5).update(second, second, state, all_previous)
        assert torch.equal(weights, weights_of(LogMeanExp(0.1, 0.5), second)) and new_state["r"].item() == 0.1


def test_a_saved_state_continues_without_seeding_again(tmp_path):
    first, second = random_losses(seed=1) + 1, random_losses(seed=2)
    for r in (0.1, 1 / 3, 10.0):
        composition = LogMeanExp(r, 0.5)
        _, state = composition.update(first, first, {})
        save_file(state, tmp_path / "state.safetensors")
        weights, expected = composition.update(second, second, state)
        again, loaded = composition.update(second, second, load_file(tmp_path / "state.safetensors"))
        assert torch.equal(weights, again) and torch.equal(expected["nu"], loaded["nu"])
        assert weights.mean() != pytest.approx(1.0, abs=1e-3)


def test_the_cotangents_of_a_rank_come_from_the_values_of_all_ranks():
    values = random_losses()
    for composition in (RunningMean(lambda u: u**2), LogMeanExp(0.3), LogMeanExp(0.3, cap=2.0)):
        cotangents, state = composition.update(values, values, {})
        part, part_state = composition.update(values[4:8], values, {})
        assert torch.equal(part, cotangents[4:8])
        assert all(torch.equal(part_state[name], state[name]) for name in state)


def test_the_mean_weight_limit_moves_the_mean_and_keeps_the_ratios():
    losses = random_losses()
    for before, expected in ((20.0, 0.1), (-20.0, 1 / 0.5), (0.5, None)):
        plain, limited = LogMeanExp(1.0, 0.5), LogMeanExp(1.0, 0.5, mean_weight_limit=10.0)
        _, state = plain.update(losses + before, losses + before, {})
        literal, weights = weights_of(plain, losses, state), weights_of(limited, losses, state)
        assert weights.mean().item() == pytest.approx(expected or literal.mean().item(), rel=1e-6)
        assert torch.allclose(weights / weights.sum(), literal / literal.sum())
        assert limited.update(losses, losses, state)[1]["limited"] == (expected == 0.1)
        assert "limited" not in state  # without a limit there is nothing to count
    _, state = LogMeanExp(1.0, 0.1).update(losses - 50, losses - 50, {})
    upper = weights_of(LogMeanExp(1.0, 0.1, mean_weight_limit=2.0), losses, state)
    assert upper.mean().item() == pytest.approx(2.0)


def test_settings_out_of_range_are_refused():
    for eta in (0.0, -1.0, 1.1, math.nan):
        for make in (RunningMean, LogMeanExp):
            with pytest.raises(ValueError, match=r"eta=.* is not allowed: 0 < eta <= 1"):
                make(eta=eta)
    for settings_, message in [
        ({"r": 0.0}, "r=0.0"),
        ({"r": -1.0}, "r=-1.0"),
        ({"cap": 0.5}, "cap=0.5"),
        ({"mean_weight_limit": 0.5}, "mean_weight_limit=0.5"),
        ({"cap": 2.0, "mean_weight_limit": 2.0}, "exclude each other"),
    ]:
        with pytest.raises(ValueError, match=message):
            LogMeanExp(**settings_)


def test_a_composition_has_update_value_estimate_and_eta():
    assert isinstance(LogMeanExp(), Composition) and isinstance(RunningMean(), Composition)
    assert not isinstance(torch.log, Composition)


# The cap


def primal(weights, losses, r):
    """mean(w * loss) - r mean(w log w), which the weights maximize."""
    return (weights * losses - r * torch.special.xlogy(weights, weights)).mean().item()


def dual(nu, losses, r, cap):
    """The dual objective of nu, the multiplier of mean w = 1; each weight is the best in [0, cap] for itself."""
    q = (losses / r - nu).clamp_max(math.log(cap)).exp()
    inner = q * losses / r - torch.special.xlogy(q, q) - q * (nu - 1)
    return r * (nu - 1 + inner.mean().item())


def bisected(losses, r, cap):
    """The weights by a scalar root search on the mass, in units in which nothing overflows."""
    a = (losses - losses.max()) / r

    def mass(nu):
        return (a - nu).clamp_max(math.log(cap)).exp().mean().item() - 1

    nu = brentq(mass, a.min().item() - 50, math.log(len(a)) + 1, xtol=1e-13, rtol=1e-14)
    return (a - nu).clamp_max(math.log(cap)).exp()


def solved(losses, r, cap):
    """The weights by sequential quadratic programming on the primal problem."""
    n = len(losses)
    solution = minimize(
        lambda q: -primal(torch.from_numpy(q), losses, r),
        torch.ones(n).double().numpy(),
        jac=lambda q: -(losses.numpy() - r * (torch.from_numpy(q).log().numpy() + 1)) / n,
        bounds=[(1e-12, cap)] * n,
        constraints=[LinearConstraint(torch.ones(1, n).double().numpy(), n, n)],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return torch.from_numpy(solution.x)


def test_capped_weights_solve_the_convex_problem():
    for cap, r, count in product((1.2, 2.0, 4.0, 7.9), (0.3, 1.0, 5.0), (1, 2, 8, 12)):
        losses = random_losses(count, scale=3.0)
        weights, state = LogMeanExp(r, cap=cap).update(losses, losses, {})
        best, nu, value = solved(losses, r, cap), state["nu"].item(), primal(weights, losses, r)
        assert torch.allclose(weights, best, atol=1e-5), (cap, r, count)
        assert value == pytest.approx(dual(nu, losses, r, cap), abs=1e-10)
        assert value >= primal(best, losses, r) - 1e-9
        assert dual(nu, losses, r, cap) <= min(dual(nu + s, losses, r, cap) for s in (-0.1, 0.1)) + 1e-12


numbers = st.lists(
    st.one_of(st.floats(0, 5), st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 1e8)), min_size=1, max_size=24
)
caps = st.one_of(st.floats(1.001, 30), st.sampled_from([1.5, 2.0, 3.0, 4.0, 10 / 3, 1e6]))


@few
@given(numbers, caps, st.sampled_from([0.01, 0.1, 1.0, 10.0]))
@example([0.0], 2.0, 1.0)
@example([1.0] * 8, 2.0, 0.1)
@example([5.0, 5.0, 0.0, 0.0], 2.0, 0.01)
@example([9.0, 5.0, 0.0, 0.0], 2.0, 0.01)
@example([1e8, 9e7, 8e7, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 10 / 3, 0.01)
@example([1e8, 0.0, 0.0], 1.5, 0.01)
def test_capped_weights_have_mass_one_respect_the_cap_and_match_bisection(losses, cap, r):
    losses = torch.tensor(losses, dtype=torch.float64)
    weights, state = LogMeanExp(r, cap=cap).update(losses, losses, {})
    digits = 1e-7 + 1e-15 * losses.max().item() / r  # losses / r carry sixteen digits
    assert state["nu"].isfinite() and weights.isfinite().all()
    assert weights.min() >= 0 and weights.max() <= cap * (1 + 1e-12)
    assert weights.mean().item() == pytest.approx(1, abs=10 * digits)
    if losses.max() <= 100 * r:  # bisection works with plain numbers
        assert torch.allclose(weights, bisected(losses, r, cap), atol=1e-6)


@few
@given(numbers, caps, st.sampled_from([0.01, 1.0]), st.integers(0, 1000))
def test_the_order_of_the_samples_does_not_change_capped_weights(losses, cap, r, seed):
    assume(max(losses) <= 1e4)
    losses, composition = torch.tensor(losses, dtype=torch.float64), LogMeanExp(r, cap=cap)
    order = torch.randperm(len(losses), generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(weights_of(composition, losses)[order], weights_of(composition, losses[order]), atol=1e-8)


@few
@given(numbers, numbers, caps, st.sampled_from([0.01, 1.0]))
def test_effective_sample_size_is_at_least_the_batch_over_the_cap_times_the_mean_weight(before, now, cap, r):
    composition = LogMeanExp(r, 0.5, cap=cap)
    before, now = torch.tensor(before, dtype=torch.float64), torch.tensor(now, dtype=torch.float64)
    weights = weights_of(composition, now, composition.update(before, before, {})[1])
    if weights.max() > 1e-100:
        size = weights.sum() ** 2 / weights.square().sum()
        assert size >= len(now) / cap * weights.mean() * (1 - 1e-9)
    assert weights.max() <= cap * (1 + 1e-12)


def test_the_estimate_is_averaged_under_a_cap_too():
    composition = LogMeanExp(1.0, 0.5, cap=3.0)
    first, second = random_losses(seed=1) + 1, random_losses(seed=2)
    _, state = composition.update(first, first, {})
    own_nu = composition.update(second, second, {})[1]["nu"]
    weights, averaged = composition.update(second, second, state)
    expected = 0.5 * state["nu"].exp() + 0.5 * own_nu.exp()
    assert averaged["nu"].exp().item() == pytest.approx(expected.item())
    assert torch.allclose(weights, (second - averaged["nu"]).exp().clamp_max(3.0))


def test_cap_one_is_the_plain_mean_in_every_step():
    composition, state = LogMeanExp(0.1, 0.5, cap=1.0), {}
    for seed, shift in enumerate([5.0, 0.0, 9.0, 0.0]):
        losses = random_losses(seed=seed) + shift
        for all_previous in (None, losses + 1):
            weights, state = composition.update(losses, losses, state, all_previous)
            assert torch.equal(weights, torch.ones_like(losses))


def test_a_cap_that_never_binds_is_the_paper_s_rule():
    losses = random_losses()
    for cap in (16.0, 1e6):  # no weight can exceed the size of the batch
        assert torch.allclose(weights_of(LogMeanExp(0.1, cap=cap), losses), weights_of(LogMeanExp(0.1), losses))


def test_small_r_is_the_mean_of_the_tail_of_mass_one_over_cap():
    losses = random_losses(16)
    for cap in (1.5, 2.0, 3.0, 5.0, 16.0):
        weights = weights_of(LogMeanExp(1e-6, cap=cap), losses)
        left, tail = 16 / cap, 0.0
        for loss in losses.sort(descending=True).values.tolist():
            tail += min(left, 1) * loss * cap / 16
            left -= min(left, 1)
        assert (weights * losses).mean().item() == pytest.approx(tail, rel=1e-9), cap


# The value of a batch


def test_the_value_is_the_objective_of_these_losses():
    losses = random_losses(dtype=torch.float32)
    by_hand = 0.3 * ((losses.double() / 0.3).logsumexp(0) - math.log(16))
    value = LogMeanExp(0.3).value(losses)
    assert value.dtype is torch.float32 and value.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert LogMeanExp(0.01).value(1e4 * losses).isfinite()


def test_the_capped_value_is_that_of_the_primal_and_its_gradient_the_weights():
    losses, step = random_losses(12, scale=3.0), 1e-6
    for cap in (1.0, 1.2, 2.0, 4.0, 16.0, 1e3):
        for r in (0.01, 0.3, 5.0):
            composition = LogMeanExp(r, cap=cap)
            weights = weights_of(composition, losses)
            assert composition.value(losses).item() == pytest.approx(primal(weights, losses, r), rel=1e-10)
            slopes = [
                (composition.value(losses + step * unit) - composition.value(losses - step * unit)) / 2 / step
                for unit in torch.eye(12)
            ]
            assert torch.allclose(torch.stack(slopes), weights / 12, atol=1e-5), (cap, r)


# STORM: u_t = g_t + (1 - eta) (u_{t-1} - g of the same samples at the theta before)


def test_storm_is_its_formula():
    first, second, before = random_losses(seed=1), random_losses(seed=2) + 0.5, random_losses(seed=3)
    g, g_first, g_before = ((losses / 0.5).exp() for losses in (second, first, before))
    for eta in (0.1, 0.6, 1.0):
        plain, exponential = RunningMean(lambda u: u**2, eta), LogMeanExp(0.5, eta)
        _, state = plain.update(first, first, {})
        cotangents, state = plain.update(second, second, state, before)
        u = second.mean() + (1 - eta) * (first.mean() - before.mean())
        assert torch.allclose(state["u"], u) and torch.allclose(cotangents, (2 * u).expand(16))

        _, state = exponential.update(first, first, {})
        weights, state = exponential.update(second, second, state, before)
        u = g.mean() + (1 - eta) * (g_first.mean() - g_before.mean())
        assert torch.allclose(weights, g / u, rtol=1e-12)
        assert exponential.estimate(state).item() == pytest.approx(u.item(), rel=1e-12)

    wide = RunningMean(lambda u: u.prod(), 0.25)
    first, second, before = (random_losses(12, seed).view(4, 3) for seed in range(3))
    _, state = wide.update(first, first, {})
    _, state = wide.update(second, second, state, before)
    assert torch.allclose(state["u"], second.mean(0) + 0.75 * (first.mean(0) - before.mean(0)))


def test_storm_is_the_moving_average_where_theta_did_not_change_the_batch():
    first, second = random_losses(seed=1) + 1, random_losses(seed=2)
    for composition in (RunningMean(lambda u: u**2, 0.3), LogMeanExp(0.5, 0.3), LogMeanExp(0.5, 0.3, 2.0)):
        _, state = composition.update(first, first, {})
        plain, plain_state = composition.update(second, second, state)
        storm, storm_state = composition.update(second, second, state, second)
        assert torch.allclose(plain, storm, rtol=1e-12)
        assert all(torch.allclose(plain_state[key], storm_state[key], rtol=1e-12) for key in plain_state)


def test_on_a_full_batch_that_drifts_storm_is_exact_and_the_moving_average_lags():
    base = random_losses() + 2
    for composition in (RunningMean(lambda u: u**2, 0.1), LogMeanExp(0.5, 0.1)):
        for drift in (0.1, -0.1):
            plain, storm = {}, {}
            for step in range(20):
                now, before = base + drift * step, base + drift * (step - 1)
                _, plain = composition.update(now, now, plain)
                _, storm = composition.update(now, now, storm, before)
            exact = composition.estimate(composition.update(now, now, {})[1])
            assert torch.allclose(composition.estimate(storm), exact, rtol=1e-10)
            assert (exact - composition.estimate(plain)) * drift > 0.05 * abs(drift)  # behind in either direction


def test_storm_of_exponentials_stays_positive_where_the_difference_is_not():
    """The batch falls by more than the whole of u: what is left is its share in the moving average."""
    for now, before, r in ((0.0, 5.0, 1.0), (-5.0, 5.0, 0.1), (0.0, 1e4, 0.01), (3.0, 1e4, 0.01), (-5.0, 5.0, 0.01)):
        composition, base = LogMeanExp(r, 0.3), random_losses()
        _, state = composition.update(base, base, {})
        weights, storm = composition.update(base + now, base + now, state, base + before)
        nu_batch = composition.batch_value((base + now) / r)
        assert storm["nu"].item() == pytest.approx((nu_batch + math.log(0.3)).item(), rel=1e-12)
        assert weights.isfinite().all() and weights.mean().item() == pytest.approx(1 / 0.3, rel=1e-9)


@few
@given(*[st.lists(st.floats(0, 1e4), min_size=3, max_size=3) for _ in range(3)], st.floats(0.01, 1), st.booleans())
def test_storm_of_exponentials_is_finite_for_any_losses(first, now, before, eta, capped):
    composition = LogMeanExp(0.01, eta, 2.0 if capped else None)
    first, now, before = (torch.tensor(losses, dtype=torch.float64) for losses in (first, now, before))
    _, state = composition.update(first, first, {})
    weights, storm = composition.update(now, now, state, before)
    assert weights.isfinite().all() and (weights >= 0).all() and storm["nu"].isfinite()
    assert capped or weights.mean() <= 1 / eta * (1 + 1e-6)
