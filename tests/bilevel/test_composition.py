import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, brentq, minimize

from doubly.bilevel import LogMeanExp, RunningMean

settings.register_profile("composition", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("composition")


def losses_of(count=16, seed=0, scale=2.0, dtype=torch.float64):
    return scale * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights_of(composition, losses, state=None):
    return composition.update(losses, losses, state or {})[0]


# --- RunningMean ---


def test_running_mean_starts_with_the_batch_and_then_averages():
    rule = RunningMean(lambda u: u**3, eta=0.7)
    first, second = losses_of(seed=1), losses_of(seed=2)
    cotangents, state = rule.update(first, first, {})
    assert torch.allclose(cotangents, (3 * first.mean() ** 2).expand(16))
    cotangents, state = rule.update(second, second, state)
    u = 0.3 * first.mean() + 0.7 * second.mean()
    assert torch.allclose(state["u"], u) and torch.allclose(cotangents, (3 * u**2).expand(16))


def test_running_mean_takes_vectors_and_any_smooth_f():
    values = torch.rand(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cotangents, _ = RunningMean(lambda u: u[0] * u[1].sin() / u[2]).update(values, values, {})
    a, b, c = values.mean(0)
    by_hand = torch.stack([b.sin() / c, a * b.cos() / c, -a * b.sin() / c**2])
    assert torch.allclose(cotangents, by_hand.expand(8, 3))
    assert not cotangents.requires_grad


def test_running_mean_sees_the_whole_batch_of_all_ranks():
    values = losses_of(8)
    cotangents, _ = RunningMean(lambda u: u**2).update(values[:4], values, {})
    assert cotangents.shape == (4,) and torch.allclose(cotangents, 2 * values.mean().expand(4))


def test_running_mean_takes_any_shape_of_one_number_and_refuses_more():
    values = losses_of(8)[:, None]
    for f in (lambda u: u.sum(), lambda u: u, lambda u: u[None]):
        cotangents, _ = RunningMean(f).update(values, values, {})
        assert torch.equal(cotangents, torch.ones(8, 1).double())
        assert RunningMean(f).value(values).shape == ()
    wide = torch.ones(8, 3)
    for call in (RunningMean().value, lambda wide: RunningMean().update(wide, wide, {})):
        with pytest.raises(ValueError, match=r"f must return one number, got shape \(3,\).*reduce it"):
            call(wide)


@pytest.mark.parametrize("eta", [0.0, -1.0, 1.1, math.nan])
def test_an_eta_that_means_nothing_is_refused(eta):
    with pytest.raises(ValueError, match=r"eta=.* is not allowed: 0 < eta <= 1"):
        RunningMean(eta=eta)


# --- LogMeanExp, the paper's rule ---


@pytest.mark.parametrize("r", [0.1, 1.0, 10.0])
def test_eta_one_is_the_softmax_of_the_batch_whatever_was_before(r):
    losses = losses_of()
    rule = LogMeanExp(r, eta=1.0)
    _, state = rule.update(losses + 7, losses + 7, {})
    assert torch.allclose(weights_of(rule, losses, state), 16 * torch.softmax(losses / r, 0), rtol=1e-12)


@pytest.mark.parametrize("r", [0.1, 1.0, 10.0])
def test_eta_one_has_the_gradient_of_the_objective(r):
    losses = losses_of().requires_grad_()
    value = r * (torch.logsumexp(losses / r, 0) - math.log(16))
    (expected,) = torch.autograd.grad(value, losses)
    assert torch.allclose(weights_of(LogMeanExp(r, 1.0), losses.detach()) / 16, expected, rtol=1e-12)


@pytest.mark.parametrize("eta", [0.1, 0.5, 0.9])
def test_weights_are_those_of_the_running_mean_of_exponentials(eta):
    rule, u, state = LogMeanExp(0.5, eta), None, {}
    for seed in range(5):
        losses = losses_of(seed=seed)
        g = (losses / 0.5).exp()
        u = g.mean() if u is None else (1 - eta) * u + eta * g.mean()
        weights, state = rule.update(losses, losses, state)
        assert torch.allclose(weights, g / u, rtol=1e-12)
        assert state["nu"].item() == pytest.approx(u.log().item(), rel=1e-12)


@given(st.lists(st.floats(0, 30), min_size=1, max_size=20), st.floats(0, 30), st.floats(0.05, 1), st.floats(0.1, 10))
def test_the_mean_weight_is_the_ratio_of_batch_to_average_and_at_most_one_over_eta(numbers, before, eta, r):
    losses = torch.tensor(numbers, dtype=torch.float64)
    rule = LogMeanExp(r, eta)
    _, state = rule.update(torch.tensor([before]).double(), torch.tensor([before]).double(), {})
    weights, state = rule.update(losses, losses, state)
    b = torch.logsumexp(losses / r, 0) - math.log(len(numbers))
    assert weights.mean().item() == pytest.approx((b - state["nu"]).exp().item(), rel=1e-9, abs=1e-300)
    assert weights.mean() <= 1 / eta * (1 + 1e-9)


@pytest.mark.parametrize("cap", [None, 1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_up_to_a_million_at_the_lowest_temperature_stay_finite(dtype, cap):
    rule, state = LogMeanExp(0.01, cap=cap), {}
    for top in (1e6, 0.0, 1e6, 3.0):
        losses = torch.linspace(0, top, 32, dtype=torch.float64).to(dtype)
        weights, state = rule.update(losses, losses, state)
        assert weights.dtype is dtype and weights.isfinite().all() and (weights >= 0).all()
        assert state["nu"].dtype is torch.float64
        if cap is None:
            assert state["nu"].isfinite()
            assert weights.double().mean() <= 1 / 0.9 * (1 + 1e-6)


def test_float32_losses_lose_nothing_in_the_average():
    losses = losses_of(dtype=torch.float32)
    exact = 16 * torch.softmax(losses.double() / 0.01, 0)
    assert torch.allclose(weights_of(LogMeanExp(0.01), losses).double(), exact, rtol=1e-6, atol=1e-30)


def test_large_r_gives_weights_of_one():
    assert torch.allclose(weights_of(LogMeanExp(1e9), losses_of()), torch.ones(16).double(), atol=1e-8)


def test_the_first_batch_seeds_and_a_new_r_seeds_again():
    first, second = losses_of(seed=1) + 20, losses_of(seed=2)
    _, state = LogMeanExp(1.0, 0.5).update(first, first, {})
    assert state["nu"].item() == pytest.approx((first.logsumexp(0) - math.log(16)).item())
    kept, _ = LogMeanExp(1.0, 0.5).update(second, second, state)
    assert kept.mean() < 1e-6  # the first batch still weighs
    anew, state = LogMeanExp(0.1, 0.5).update(second, second, state)
    assert anew.mean().item() == pytest.approx(1.0)
    assert state["r"].item() == 0.1


@pytest.mark.parametrize("r", [0.1, 1 / 3, 10.0])
def test_a_saved_state_goes_on_without_seeding_again(tmp_path, r):
    from safetensors.torch import load_file, save_file

    first, second = losses_of(seed=1) + 1, losses_of(seed=2)
    rule = LogMeanExp(r, 0.5)
    _, state = rule.update(first, first, {})
    save_file(state, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    for (a, b), (c, d) in [(rule.update(second, second, state), rule.update(second, second, loaded))]:
        assert torch.equal(a, c) and torch.equal(b["nu"], d["nu"])
        assert a.mean() != pytest.approx(1.0, abs=1e-3)


def test_a_rank_s_weights_come_from_all_ranks():
    values = losses_of()
    whole, state = LogMeanExp(0.3).update(values, values, {})
    part, same = LogMeanExp(0.3).update(values[4:8], values, {})
    assert torch.equal(part, whole[4:8]) and torch.equal(same["nu"], state["nu"])


@pytest.mark.parametrize(("before", "expected"), [(20.0, 0.1), (-20.0, 1 / 0.5), (0.5, None)])
def test_the_mean_weight_limit_moves_the_mean_and_keeps_the_ratios(before, expected):
    losses = losses_of()
    plain, limited = LogMeanExp(1.0, 0.5), LogMeanExp(1.0, 0.5, mean_weight_limit=10.0)
    _, state = plain.update(losses + before, losses + before, {})
    literal, found = weights_of(plain, losses, state), weights_of(limited, losses, state)
    assert found.mean().item() == pytest.approx(expected or literal.mean().item(), rel=1e-6)
    assert torch.allclose(found / found.sum(), literal / literal.sum())


def test_the_mean_weight_limit_works_upwards_too():
    losses = losses_of()
    _, state = LogMeanExp(1.0, 0.1).update(losses - 50, losses - 50, {})
    found = weights_of(LogMeanExp(1.0, 0.1, mean_weight_limit=2.0), losses, state)
    assert found.mean().item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    "bad",
    [{"r": 0.0}, {"r": -1.0}, {"eta": 0.0}, {"eta": 1.1}, {"cap": 0.5}, {"mean_weight_limit": 0.5}],
)
def test_numbers_that_mean_nothing_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LogMeanExp(**bad)


def test_cap_and_mean_weight_limit_exclude_each_other():
    with pytest.raises(ValueError, match="exclude"):
        LogMeanExp(cap=2.0, mean_weight_limit=2.0)


# --- the cap ---


def primal(weights, losses, r):
    """max over w of sum w l - r sum w log(n w), here of weights = n w."""
    entropy = torch.special.xlogy(weights, weights)
    return (weights * losses - r * entropy).mean().item()


def dual(nu, losses, r, cap):
    """min over nu, the multiplier of sum w = 1; each weight is the best in [0, cap] by itself."""
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
    answer = minimize(
        lambda q: -primal(torch.from_numpy(q), losses, r),
        torch.ones(n).double().numpy(),
        jac=lambda q: -(losses.numpy() - r * (torch.from_numpy(q).log().numpy() + 1)) / n,
        bounds=[(1e-12, cap)] * n,
        constraints=[LinearConstraint(torch.ones(1, n).double().numpy(), n, n)],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return torch.from_numpy(answer.x)


@pytest.mark.parametrize("cap", [1.2, 2.0, 4.0, 7.9])
@pytest.mark.parametrize("r", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("count", [1, 2, 8, 12])
def test_capped_weights_solve_the_convex_problem(count, r, cap):
    for seed in range(3):
        losses = losses_of(count, seed, scale=3.0)
        rule = LogMeanExp(r, cap=cap)
        weights, state = rule.update(losses, losses, {})
        assert torch.allclose(weights, solved(losses, r, cap), atol=1e-5)
        nu = state["nu"].item()
        value = primal(weights, losses, r)
        assert value == pytest.approx(dual(nu, losses, r, cap), abs=1e-10)
        assert value >= primal(solved(losses, r, cap), losses, r) - 1e-9
        assert dual(nu, losses, r, cap) <= min(dual(nu + s, losses, r, cap) for s in (-0.1, 0.1)) + 1e-12


numbers = st.lists(
    st.one_of(st.floats(0, 5), st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 1e8)), min_size=1, max_size=24
)
caps = st.one_of(st.floats(1.001, 30), st.sampled_from([1.5, 2.0, 3.0, 4.0, 10 / 3, 1e6]))


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
    if losses.max() <= 100 * r:  # bisection is in plain numbers
        assert torch.allclose(weights, bisected(losses, r, cap), atol=1e-6)


@given(numbers, caps, st.sampled_from([0.01, 1.0]), st.randoms(use_true_random=False))
def test_capped_weights_follow_the_order_of_the_samples(losses, cap, r, random):
    assume(max(losses) <= 1e4)
    order = list(range(len(losses)))
    random.shuffle(order)
    losses = torch.tensor(losses, dtype=torch.float64)
    rule = LogMeanExp(r, cap=cap)
    assert torch.allclose(weights_of(rule, losses)[order], weights_of(rule, losses[order]), atol=1e-8)


@given(numbers, numbers, caps, st.sampled_from([0.01, 1.0]))
def test_effective_sample_size_is_at_least_the_batch_over_the_cap_times_the_mean_weight(before, now, cap, r):
    rule = LogMeanExp(r, 0.5, cap=cap)
    before, now = torch.tensor(before, dtype=torch.float64), torch.tensor(now, dtype=torch.float64)
    weights = weights_of(rule, now, rule.update(before, before, {})[1])
    if weights.max() > 1e-100:
        size = weights.sum() ** 2 / weights.square().sum()
        assert size >= len(now) / cap * weights.mean() * (1 - 1e-9)
    assert weights.max() <= cap * (1 + 1e-12)


def test_the_average_is_kept_under_a_cap():
    rule = LogMeanExp(1.0, 0.5, cap=3.0)
    first, second = losses_of(seed=1) + 1, losses_of(seed=2)
    _, one = rule.update(first, first, {})
    alone = rule.update(second, second, {})[1]["nu"]
    weights, both = rule.update(second, second, one)
    assert both["nu"].exp().item() == pytest.approx((0.5 * one["nu"].exp() + 0.5 * alone.exp()).item())
    assert torch.allclose(weights, (second - both["nu"]).exp().clamp_max(3.0))


def test_cap_one_is_the_plain_mean_in_every_step():
    rule, state = LogMeanExp(0.1, cap=1.0), {}
    for seed, shift in enumerate([5.0, 0.0, 9.0, 0.0]):
        losses = losses_of(seed=seed) + shift
        weights, state = rule.update(losses, losses, state)
        assert torch.equal(weights, torch.ones_like(losses))


def test_a_cap_that_never_binds_is_the_paper_s_rule():
    losses = losses_of()
    for cap in (16.0, 1e6):  # no weight can exceed the size of the batch
        assert torch.allclose(weights_of(LogMeanExp(0.1, cap=cap), losses), weights_of(LogMeanExp(0.1), losses))


@pytest.mark.parametrize("cap", [1.5, 2.0, 3.0, 5.0, 16.0])
def test_small_r_is_the_mean_of_the_tail_of_mass_one_over_cap(cap):
    losses = losses_of(16)
    weights = weights_of(LogMeanExp(1e-6, cap=cap), losses)
    left, tail = 16 / cap, 0.0
    for loss in losses.sort(descending=True).values.tolist():
        tail += min(left, 1) * loss * cap / 16
        left -= min(left, 1)
    assert (weights * losses).mean().item() == pytest.approx(tail, rel=1e-9)


# --- what a batch and an estimate are worth ---


def test_the_value_is_f_of_the_mean_of_these_samples():
    values, f = losses_of(12).view(6, 2), lambda u: u[0] * u[1].exp()
    assert torch.equal(RunningMean(f).value(values), f(values.mean(0)))
    losses = losses_of(dtype=torch.float32)
    by_hand = 0.3 * ((losses.double() / 0.3).logsumexp(0) - math.log(16))
    found = LogMeanExp(0.3).value(losses)
    assert found.dtype is torch.float32 and found.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert LogMeanExp(0.01).value(1e4 * losses).isfinite()


@pytest.mark.parametrize("cap", [1.0, 1.2, 2.0, 4.0, 16.0, 1e3])
@pytest.mark.parametrize("r", [0.01, 0.3, 5.0])
def test_the_capped_value_is_that_of_the_primal_and_its_gradient_the_weights(cap, r):
    rule, losses = LogMeanExp(r, cap=cap), losses_of(12, scale=3.0)
    value, weights = rule.value(losses), weights_of(rule, losses)
    assert value.item() == pytest.approx(primal(weights, losses, r), rel=1e-10)
    step = 1e-6
    slopes = [
        (rule.value(losses + step * unit) - rule.value(losses - step * unit)) / 2 / step for unit in torch.eye(12)
    ]
    assert torch.allclose(torch.stack(slopes), weights / 12, atol=1e-5)


def test_the_estimate_is_u_itself():
    losses = losses_of()
    _, state = RunningMean().update(losses, losses, {})
    assert torch.equal(RunningMean().estimate(state), losses.mean())
    _, state = LogMeanExp(0.5).update(losses, losses, {})
    assert LogMeanExp(0.5).estimate(state).item() == pytest.approx((losses / 0.5).exp().mean().item(), rel=1e-12)


# --- STORM: u_t = g_t + (1 - eta) (u_{t-1} - g of the same samples at the theta before) ---


@pytest.mark.parametrize("eta", [0.1, 0.6, 1.0])
def test_storm_is_its_formula(eta):
    plain, exponential = RunningMean(lambda u: u**2, eta), LogMeanExp(0.5, eta)
    first, second, before = losses_of(seed=1), losses_of(seed=2) + 0.5, losses_of(seed=3)
    _, state = plain.update(first, first, {})
    cotangents, state = plain.update(second, second, state, before)
    u = second.mean() + (1 - eta) * (first.mean() - before.mean())
    assert torch.allclose(state["u"], u) and torch.allclose(cotangents, (2 * u).expand(16))

    g, g_first, g_before = ((losses / 0.5).exp() for losses in (second, first, before))
    _, state = exponential.update(first, first, {})
    weights, state = exponential.update(second, second, state, before)
    u = g.mean() + (1 - eta) * (g_first.mean() - g_before.mean())
    assert torch.allclose(weights, g / u, rtol=1e-12)
    assert exponential.estimate(state).item() == pytest.approx(u.item(), rel=1e-12)


@pytest.mark.parametrize("rule", [RunningMean(lambda u: u**2, 0.3), LogMeanExp(0.5, 0.3), LogMeanExp(0.5, 0.3, 2.0)])
def test_storm_is_the_moving_average_where_theta_did_nothing_to_the_batch(rule):
    first, second = losses_of(seed=1) + 1, losses_of(seed=2)
    _, state = rule.update(first, first, {})
    plain, after = rule.update(second, second, state)
    storm, same = rule.update(second, second, state, second)
    assert torch.allclose(plain, storm, rtol=1e-12)
    assert all(torch.allclose(after[key], same[key], rtol=1e-12) for key in after)


@pytest.mark.parametrize("rule", [RunningMean(lambda u: u**2, 0.1), LogMeanExp(0.5, 0.1)])
@pytest.mark.parametrize("drift", [0.1, -0.1])
def test_on_a_full_batch_that_drifts_storm_is_exact_and_the_moving_average_lags(rule, drift):
    base, plain, storm = losses_of() + 2, {}, {}
    for step in range(20):
        now, before = base + drift * step, base + drift * (step - 1)
        _, plain = rule.update(now, now, plain)
        _, storm = rule.update(now, now, storm, before)
    exact = rule.estimate(rule.update(now, now, {})[1])
    assert torch.allclose(rule.estimate(storm), exact, rtol=1e-10)
    assert (exact - rule.estimate(plain)) * drift > 0.05 * abs(drift)  # behind, whichever way it goes


def test_storm_takes_vectors():
    rule, state = RunningMean(lambda u: u.prod(), 0.25), {}
    first, second, before = (losses_of(12, seed).view(4, 3) for seed in range(3))
    _, state = rule.update(first, first, state)
    _, state = rule.update(second, second, state, before)
    assert torch.allclose(state["u"], second.mean(0) + 0.75 * (first.mean(0) - before.mean(0)))


@pytest.mark.parametrize(
    ("now", "before", "r"),
    [
        (0.0, 5.0, 1.0),
        (-5.0, 5.0, 0.1),
        (0.0, 1e4, 0.01),
        (3.0, 1e4, 0.01),
        (-5.0, 5.0, 0.01),
    ],
)
def test_storm_of_exponentials_stays_positive_where_the_difference_is_not(now, before, r):
    """A fall of this batch that exceeds the whole of u: then what the moving average gives the batch is left."""
    rule, base = LogMeanExp(r, 0.3), losses_of()
    _, state = rule.update(base, base, {})
    weights, after = rule.update(base + now, base + now, state, base + before)
    batch = rule.batch_value((base + now) / r)
    assert after["nu"].item() == pytest.approx((batch + math.log(0.3)).item(), rel=1e-12)
    assert weights.isfinite().all() and weights.mean().item() == pytest.approx(1 / 0.3, rel=1e-9)


@given(*[st.lists(st.floats(0, 1e4), min_size=3, max_size=3) for _ in range(3)], st.floats(0.01, 1), st.booleans())
def test_storm_of_exponentials_is_finite_whatever_theta_did(first, now, before, eta, capped):
    rule = LogMeanExp(0.01, eta, 2.0 if capped else None)
    first, now, before = (torch.tensor(losses, dtype=torch.float64) for losses in (first, now, before))
    _, state = rule.update(first, first, {})
    weights, after = rule.update(now, now, state, before)
    assert weights.isfinite().all() and (weights >= 0).all() and after["nu"].isfinite()
    assert capped or weights.mean() <= 1 / eta * (1 + 1e-6)


def test_a_new_r_starts_anew_with_storm_too():
    first, second = losses_of(seed=1) + 5, losses_of(seed=2)
    _, state = LogMeanExp(1.0, 0.5).update(first, first, {})
    anew, _ = LogMeanExp(0.1, 0.5).update(second, second, state, first)
    assert torch.equal(anew, weights_of(LogMeanExp(0.1, 0.5), second))


def test_cap_one_is_the_plain_mean_with_storm_too():
    rule, losses = LogMeanExp(0.1, 0.5, cap=1.0), losses_of()
    _, state = rule.update(losses, losses, {})
    assert torch.equal(weights_of(rule, losses, state), torch.ones_like(losses))
    assert torch.equal(rule.update(losses, losses, state, losses + 1)[0], torch.ones_like(losses))
