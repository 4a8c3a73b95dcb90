"""Chi-square DRO and CVaR against convex solvers: primal = dual = ours; then what streaming adds."""

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
named = pytest.mark.parametrize("rule", ALL, ids=str)
with_threshold = pytest.mark.parametrize("rule", THRESHOLDS, ids=str)


def losses_of(count=16, seed=0, scale=3.0):
    return scale * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at_once(rule, **changes):
    """The same rule, without a past."""
    return type(rule)(**{**vars(rule), "eta": 1.0, **changes})


def weights_of(rule, losses, state=None):
    return rule.update(losses, losses, state or {})[0]


# --- oracles ---


def penalty(weights, r):
    return r / 2 * (weights - 1).square().mean()


def chi_square_primal(losses, r, cap):
    """Value and weights by sequential quadratic programming."""
    l, n = losses.numpy(), len(losses)
    found = minimize(
        lambda w: -(w * l).mean() + r / 2 * ((w - 1) ** 2).mean(),
        np.ones(n),
        jac=lambda w: (-l + r * (w - 1)) / n,
        bounds=[(0, cap)] * n,
        constraints=[LinearConstraint(np.ones((1, n)), n, n)],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return -found.fun, torch.from_numpy(found.x)


def chi_square_dual(losses, r, cap):
    """min over t of t + the mean of the penalty's conjugate at loss - t."""
    l = losses.numpy()

    def dual(t):
        w = np.clip(1 + (l - t) / r, 0, cap)
        return t + (w * (l - t) - r / 2 * (w - 1) ** 2).mean()

    return least(dual, l.min() - 1, l.max() + 1)


def cvar_primal(losses, alpha):
    n = len(losses)
    found = linprog(-losses.numpy() / n, A_eq=np.ones((1, n)), b_eq=[n], bounds=[(0, 1 / alpha)] * n)
    return -found.fun


def cvar_dual(losses, alpha):
    l = losses.numpy()
    return least(lambda t: t + np.maximum(l - t, 0).mean() / alpha, l.min() - 1, l.max() + 1)


def least(function, low, high):
    return minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-11, "maxiter": 500}).fun


few = settings(max_examples=60)
numbers = st.lists(st.one_of(st.floats(0, 5), st.sampled_from([0.0, 1.0, 2.0])), min_size=1, max_size=12)
offsets = st.sampled_from([0.0, 0.0, 1e6, -1e6])
temperatures = st.sampled_from([0.1, 0.5, 1.0, 10.0])


# --- the answer of one batch ---


@few
@given(numbers, offsets, temperatures, st.one_of(st.none(), st.floats(1.05, 12), st.sampled_from([1.5, 2.0, 4.0])))
@example([3.0], 0.0, 1.0, 2.0)
@example([2.0] * 6, 1e6, 0.1, 1.5)
@example([4.0, 4.0, 0.0, 0.0], 0.0, 0.1, 2.0)
@example([4.0, 0.0, 0.0, 0.0, 0.0], 0.0, 0.1, None)
def test_chi_square_is_its_primal_and_its_dual(losses, offset, r, cap):
    """The oracles see the losses without the offset: it moves the value and nothing else."""
    plain = torch.tensor(losses, dtype=torch.float64)
    rule, moved = ChiSquare(r, 1.0, cap), plain + offset
    by_primal, best = chi_square_primal(plain, r, cap)
    by_dual = chi_square_dual(plain, r, cap)
    assert by_primal == pytest.approx(by_dual, abs=1e-7)
    lost = 2e-16 * abs(offset) / r  # of the weights, in losses that carry sixteen digits
    weights = weights_of(rule, moved)
    assert torch.allclose(weights, best, atol=1e-5 + 10 * lost)
    assert rule.value(plain).item() == pytest.approx(by_dual, abs=1e-9)
    assert rule.value(moved).item() == pytest.approx(by_dual + offset, abs=1e-9 + lost * abs(offset))
    assert weights.min() >= 0 and weights.max() <= (cap or len(plain)) * (1 + 1e-12) + 10 * lost
    assert weights.mean().item() == pytest.approx(1, abs=1e-12 + 10 * lost)
    assert (weights * plain).mean() - penalty(weights, r) == pytest.approx(by_dual, abs=1e-9 + 100 * lost)


@few
@given(numbers, offsets, st.one_of(st.floats(0.02, 1), st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0])))
@example([3.0], 0.0, 0.3)
@example([2.0] * 6, 1e6, 0.3)
@example([4.0, 2.0, 2.0, 2.0, 0.0], 0.0, 0.5)  # n alpha is no integer, and the threshold is a tie
@example([0.0, 1.0, 2.0, 4.0], -1e6, 0.5)  # and here it is one
def test_cvar_is_its_primal_and_its_dual(losses, offset, alpha):
    plain = torch.tensor(losses, dtype=torch.float64)
    rule, moved = CVaR(alpha, 1.0), plain + offset
    by_primal, by_dual = cvar_primal(plain, alpha), cvar_dual(plain, alpha)
    assert by_primal == pytest.approx(by_dual, abs=1e-7)
    lost = 1e-15 * abs(offset)
    weights = weights_of(rule, moved)
    assert rule.value(plain).item() == pytest.approx(by_primal, abs=1e-9)
    assert rule.value(moved).item() == pytest.approx(by_primal + offset, abs=1e-9 + 100 * lost)
    assert weights.min() >= 0 and weights.max() <= 1 / alpha * (1 + 1e-12)
    assert weights.mean().item() == pytest.approx(1, abs=1e-12)
    assert (weights * plain).mean().item() == pytest.approx(by_primal, abs=1e-9 + 100 * lost)
    for loss in moved.unique():
        assert len(weights[moved == loss].unique()) == 1  # those on the threshold share alike


@few
@given(numbers, offsets, temperatures)
def test_mean_variance_is_its_formula_and_chi_square_with_no_bound_on_the_weights(losses, offset, r):
    plain = torch.tensor(losses, dtype=torch.float64)
    rule, moved = MeanVariance(r, 1.0), plain + offset
    weights = weights_of(rule, moved)
    best = 1 + (plain - plain.mean()) / r
    lost = 1e-15 * abs(offset)
    assert torch.allclose(weights, best, rtol=1e-12, atol=1e-12 + 10 * lost / r)
    primal = (best * plain).mean() - penalty(best, r)  # of the one maximizer over w of mean 1, of either sign
    assert rule.value(moved).item() == pytest.approx((primal + offset).item(), abs=1e-9 + 100 * lost / r)
    assert weights.mean().item() == pytest.approx(1, abs=1e-12 + 10 * lost / r)


@pytest.mark.parametrize(
    "rule",
    [MeanVariance(0.5), MeanVariance(5.0), ChiSquare(0.5), ChiSquare(5.0), ChiSquare(0.5, cap=1.7)]
    + [CVaR(alpha) for alpha in (0.1, 0.25, 0.33, 0.9, 1.0)],
    ids=str,
)
def test_the_weights_are_the_gradient_of_the_value(rule):
    losses, step = losses_of(12), 1e-6
    slopes = [
        (rule.value(losses + step * unit) - rule.value(losses - step * unit)) / 2 / step for unit in torch.eye(12)
    ]
    assert torch.allclose(torch.stack(slopes), weights_of(rule, losses) / 12, atol=1e-7)
    assert rule.value(losses.float()).dtype is torch.float32


@named
def test_the_order_of_the_samples_means_nothing(rule):
    losses, order = losses_of(), torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(weights_of(rule, losses)[order], weights_of(rule, losses[order]), atol=1e-12)
    assert rule.value(losses).item() == pytest.approx(rule.value(losses[order]).item(), rel=1e-13)


@pytest.mark.parametrize("cap", [None, 30.0])
def test_chi_square_that_clips_nothing_is_mean_variance(cap):
    narrow, wide, past, other = ChiSquare(10.0, 0.6, cap), MeanVariance(10.0, 0.6), {}, {}
    for seed in range(4):
        losses = losses_of(seed=seed)
        found, past = narrow.update(losses, losses, past)
        expected, other = wide.update(losses, losses, other)
        assert torch.allclose(found, expected, rtol=1e-12)
        assert narrow.value(losses).item() == pytest.approx(wide.value(losses).item(), rel=1e-12)
    assert weights_of(MeanVariance(0.1), losses).min() < 0 == weights_of(ChiSquare(0.1), losses).min()


@pytest.mark.parametrize("rule", [ChiSquare(0.1, 1.0, 1.0), CVaR(1.0, 1.0), ChiSquare(0.1, 0.9, 1.0), CVaR(1.0, 0.9)])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_cap_one_and_alpha_one_are_the_plain_mean(rule, scale):
    losses = scale * torch.cat([losses_of(), losses_of()[:3], torch.zeros(2).double()])  # with ties
    assert torch.allclose(weights_of(rule, losses), torch.ones_like(losses), atol=1e-10)
    assert rule.value(losses).item() == pytest.approx(losses.mean().item(), rel=1e-10)


@pytest.mark.parametrize("rule", [ChiSquare(0.1, 0.9, 1.0), CVaR(1.0, 0.9)], ids=str)
def test_cap_one_and_alpha_one_are_the_plain_mean_in_every_step(rule):
    state = {}
    for seed, shift in enumerate([5.0, 0.0, 9.0, 0.0]):
        losses = losses_of(seed=seed) + shift
        weights, state = rule.update(losses, losses, state)
        assert torch.allclose(weights, torch.ones_like(losses))


@pytest.mark.parametrize(("r", "alpha"), [(1e-9, 1 / 4), (1e-9, 1 / 3)])
def test_capped_chi_square_of_small_r_is_cvar(r, alpha):
    losses = losses_of()
    assert torch.allclose(weights_of(ChiSquare(r, cap=1 / alpha), losses), weights_of(CVaR(alpha), losses), atol=1e-6)


# --- the estimate over several batches ---


@pytest.mark.parametrize("eta", [0.05, 0.5, 0.9, 1.0])
def test_mean_variance_is_a_running_mean_of_two_moments(eta):
    """As any other g of width two: same gradient, implicit term and all."""
    r, generator = 0.7, torch.Generator().manual_seed(0)
    theta = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    solve = ConjugateGradient(20, 1e-14)
    special, general = {}, {}
    for _ in range(4):
        x, delta = (torch.randn(6, 2, generator=generator, dtype=torch.float64) for _ in range(2))

        def problem(delta, x=x, width=1):
            loss = (x + delta).matmul(theta).exp()
            inner = delta.square().sum(1) + delta.matmul(theta.sin())
            return Terms(loss if width == 1 else torch.stack([loss, loss.square()], 1), inner)

        one = cid(problem, delta, MeanVariance(r, eta), special, solve)
        f = RunningMean(lambda u: u[0] + (u[1] - u[0] ** 2) / (2 * r), eta)
        other = cid(lambda d, problem=problem: problem(d, width=2), delta, f, general, solve)
        found, expected = (torch.autograd.grad(d.loss, theta)[0] for d in (one, other))
        assert torch.allclose(found, expected, rtol=1e-10)
        special, general = one.state, other.state
        assert torch.allclose(special["u"], general["u"], rtol=1e-14)
        assert torch.equal(MeanVariance(r, eta).estimate(special), special["u"])


@pytest.mark.parametrize("eta", [0.1, 0.5, 0.9])
def test_unclipped_chi_square_keeps_the_running_mean_of_eq_10(eta):
    rule, state, u = ChiSquare(20.0, eta), {}, None
    for seed in range(6):
        losses = losses_of(seed=seed) + seed
        weights, state = rule.update(losses, losses, state)
        u = losses.mean() if u is None else (1 - eta) * u + eta * losses.mean()
        assert rule.estimate(state).item() == pytest.approx(u.item(), rel=1e-13)
        assert torch.allclose(weights, 1 + (losses - u) / 20, rtol=1e-12)


@named
def test_eta_one_has_no_past(rule):
    rule, losses = at_once(rule), losses_of()
    _, state = rule.update(losses + 7, losses + 7, {})
    assert torch.allclose(weights_of(rule, losses, state), weights_of(rule, losses), atol=1e-12)


@pytest.mark.parametrize("rule", [ChiSquare(0.5, 0.3), ChiSquare(0.5, 0.3, 2.0), CVaR(0.3, 0.3)], ids=str)
def test_the_threshold_minimises_the_dual_of_the_batch_plus_a_pull_to_where_it_was(rule):
    first, second = losses_of(seed=1) + 1, losses_of(seed=2)
    _, past = rule.update(first, first, {})
    _, now = rule.update(second, second, past)
    chi = isinstance(rule, ChiSquare)
    unit = rule.r if chi else past["scale"].item()
    pull = (1 - rule.eta) / rule.eta / unit

    def objective(t):
        if chi:
            w = (1 + (second - t) / rule.r).clamp(0, rule.cap)
            dual = t + (w * (second - t)).mean().item() - penalty(w, rule.r).item()
        else:
            dual = t + (second - t).clamp_min(0).mean().item() / rule.alpha
        return dual + pull / 2 * (t - past["threshold"].item()) ** 2

    t = now["threshold"].item()
    assert objective(t) == pytest.approx(least(objective, -1, 6), abs=1e-9)
    assert second.min() < t < past["threshold"].item()


@named
def test_a_threshold_restarts_when_what_it_was_gathered_under_changes(rule):
    first, second = losses_of(seed=1) + 20, losses_of(seed=2)
    rule = at_once(rule, eta=0.1)
    _, state = rule.update(first, first, {})
    kept, _ = rule.update(second, second, state)
    assert kept.mean() < 0.5  # the first batch still weighs
    name = "alpha" if isinstance(rule, CVaR) else "r"
    other = at_once(rule, eta=0.1, **{name: 0.4})
    anew, after = other.update(second, second, state)
    if isinstance(rule, MeanVariance):  # its moments belong to every r
        assert torch.allclose(anew - 1, (kept - 1) * 0.5 / 0.4)
    else:
        assert torch.equal(anew, weights_of(other, second)) and after[name].item() == 0.4


@named
@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_the_unit_of_the_losses_means_nothing(rule, unit):
    """To CVaR, which measures its steps by the spread of the losses; and to the others if r has the same unit."""
    rule = at_once(rule, eta=0.2)
    scaled = rule if isinstance(rule, CVaR) else at_once(rule, eta=0.2, r=0.5 * unit)
    state, other = {}, {}
    for seed in range(4):
        losses = losses_of(seed=seed) + 0.3 * seed
        weights, state = rule.update(losses, losses, state)
        same, other = scaled.update(unit * losses, unit * losses, other)
        assert torch.allclose(weights, same, atol=1e-9)


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_up_to_a_million_temperatures_stay_finite(rule, dtype):
    rule = at_once(rule, eta=0.9) if isinstance(rule, CVaR) else at_once(rule, eta=0.9, r=0.01)
    state = {}
    for top in (1e4, 0.0, 1e4, -1e4, 3.0):
        losses = torch.linspace(0, top, 32, dtype=torch.float64).to(dtype)
        weights, state = rule.update(losses, losses, state)
        assert weights.dtype is dtype and weights.isfinite().all() and rule.value(losses).isfinite()
        assert all(value.isfinite().all() and value.dtype is torch.float64 for value in state.values())
        if not isinstance(rule, MeanVariance):
            highest = rule.cap if isinstance(rule, ChiSquare) else 1 / rule.alpha
            assert weights.min() >= 0 and (highest is None or weights.max() <= highest * (1 + 1e-6))


@named
def test_a_saved_state_goes_on_as_if_nothing_had_happened(tmp_path, rule):
    first, second = losses_of(seed=1) + 1, losses_of(seed=2)
    rule = at_once(rule, eta=0.4)
    _, state = rule.update(first, first, {})
    save_file(state, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    weights, after = rule.update(second, second, state)
    again, same = rule.update(second, second, loaded)
    assert torch.equal(weights, again) and all(torch.equal(after[key], same[key]) for key in after)
    assert not torch.allclose(weights, weights_of(rule, second))  # there was something to go on from


@named
def test_an_update_leaves_what_it_was_given_alone(rule):
    losses, (_, state) = losses_of(), rule.update(losses_of(seed=3), losses_of(seed=3), {})
    kept = {key: value.clone() for key, value in state.items()}
    rule.update(losses, losses, state)
    assert all(torch.equal(state[key], kept[key]) for key in kept) and torch.equal(losses, losses_of())


@named
def test_a_rank_s_weights_come_from_all_ranks(rule):
    values = losses_of()
    whole, state = rule.update(values, values, {})
    part, same = rule.update(values[4:8], values, {})
    assert torch.equal(part, whole[4:8]) and all(torch.equal(same[key], state[key]) for key in state)


def streamed(rule, population, steps, size=4):
    """The mean of the threshold over a stream of small batches, the first quarter left out."""
    generator, state, seen = torch.Generator().manual_seed(0), {}, []
    for _ in range(steps):
        batch = population[torch.randperm(len(population), generator=generator)[:size]]
        _, state = rule.update(batch, batch, state)
        seen.append(rule.estimate(state).item())
    return sum(seen[steps // 4 :]) / (steps - steps // 4)


@pytest.mark.parametrize("rule", [ChiSquare(0.1, 0.1), ChiSquare(0.1, 0.1, 2.0), CVaR(0.25, 0.1)], ids=str)
def test_small_batches_find_the_threshold_of_the_whole_and_not_the_average_of_theirs(rule):
    population = -losses_of(200, scale=1.0).clamp_min(1e-3).log()  # a long tail
    whole = at_once(rule).update(population, population, {})[1]["threshold"].item()
    far = abs(streamed(at_once(rule), population, 150) - whole)
    near = abs(streamed(rule, population, 500) - whole)
    assert far > 0.2 and near < far / 2


# --- STORM ---


def test_mean_variance_with_storm_is_the_formula():
    rule, eta = MeanVariance(0.5, 0.3), 0.3
    first, second, before = losses_of(seed=1), losses_of(seed=2), losses_of(seed=3)
    _, state = rule.update(first, first, {})
    weights, after = rule.update(second, second, state, before)

    def moments(losses):
        return torch.stack([losses.mean(), losses.square().mean()])

    u = moments(second) + (1 - eta) * (moments(first) - moments(before))
    assert torch.allclose(after["u"], u, rtol=1e-14)
    assert torch.allclose(weights, 1 + (second - u[0]) / 0.5, rtol=1e-12)
    plain, unmoved = (rule.update(second, second, state, previous) for previous in (None, second))
    assert torch.allclose(plain[0], unmoved[0]) and torch.allclose(plain[1]["u"], unmoved[1]["u"])


def test_mean_variance_with_storm_does_not_lag_behind_a_drift():
    rule, base, plain, storm = MeanVariance(1.0, 0.1), losses_of(), {}, {}
    for step in range(20):
        now, before = base + 0.1 * step, base + 0.1 * (step - 1)
        _, plain = rule.update(now, now, plain)
        _, storm = rule.update(now, now, storm, before)
    assert storm["u"][0].item() == pytest.approx(now.mean().item(), rel=1e-12)
    assert now.mean() - plain["u"][0] > 0.7  # towards 0.1 (1 - eta) / eta


@with_threshold
def test_a_threshold_has_no_storm(rule):
    losses = losses_of()
    with pytest.raises(ValueError, match=rf"{type(rule).__name__} keeps a threshold: leave storm off"):
        rule.update(losses, losses, {}, losses)


# --- numbers that mean nothing ---


@pytest.mark.parametrize(
    ("make", "bad"),
    [
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
    ],
)
def test_numbers_that_mean_nothing_are_refused(make, bad):
    with pytest.raises(ValueError, match=rf"{next(iter(bad))}=.* is not allowed"):
        make(**bad)
