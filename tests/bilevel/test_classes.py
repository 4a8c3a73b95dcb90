"""DRO over classes and samples: against the formula as it is written, its limits, and its running estimates."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from doubly.bilevel import ClassLogMeanExp, Composition, LogMeanExp, RunningMean, tilted_probabilities

SHARES = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
STRATIFIED = torch.tensor([0, 1, 0, 2, 0, 1, 0, 2])


def rows(classes=STRATIFIED, seed=0, scale=2.0, shift=0.0):
    losses = torch.rand(len(classes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.stack([scale * losses + shift, classes.double()], 1)


def weights_of(composition, values, state=None):
    cotangents, _ = composition.update(values, values, state or {})
    assert (cotangents[:, 1] == 0).all()
    return cotangents[:, 0]


def test_weights_are_the_chain_rule_of_g_and_f_as_they_are_written():
    prior, values = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), rows()
    for big_r, r in ((0.3, 0.5), (2.0, 0.4), (0.5, 5.0)):
        losses = values[:, 0].clone().requires_grad_()
        g = (losses / r).exp()[:, None] / SHARES * torch.nn.functional.one_hot(STRATIFIED, 3)
        literal = RunningMean(lambda u, R=big_r, r=r: R * (prior * u ** (r / R)).sum().log(), 1.0)
        cotangents, _ = literal.update(g.detach(), g.detach(), {})
        (expected,) = torch.autograd.grad((cotangents * g).sum(), losses)
        composition = ClassLogMeanExp(SHARES, big_r, r, prior, 1.0)
        assert torch.allclose(weights_of(composition, values), expected, rtol=1e-12)
        assert composition.value(values).item() == pytest.approx(literal.value(g.detach()).item(), rel=1e-12)


def test_the_limits_are_lme_the_balanced_mean_and_the_worst_class():
    values = rows()
    losses, counts = values[:, 0], torch.tensor([4.0, 2.0, 2.0], dtype=torch.float64)
    means = torch.zeros(3).double().index_add(0, STRATIFIED, losses) / counts
    balanced = weights_of(ClassLogMeanExp(SHARES, math.inf), values)
    assert torch.allclose(balanced, (1 / 3 / SHARES)[STRATIFIED], rtol=1e-15)
    assert torch.allclose(weights_of(ClassLogMeanExp(SHARES, 1e9, 1e9), values), balanced, rtol=1e-7)
    few = rows(torch.tensor([0, 0, 1]))  # whatever the batch is made of
    assert torch.allclose(weights_of(ClassLogMeanExp(SHARES, math.inf), few), (1 / 3 / SHARES)[few[:, 1].long()])
    worst = ClassLogMeanExp(SHARES, 1e-4)
    assert worst.value(values).item() == pytest.approx(means.max().item(), abs=2e-4)
    of_worst = (means.argmax() == STRATIFIED) / SHARES[means.argmax()]
    assert torch.allclose(weights_of(worst, values), of_worst.double())
    for composition, plain, classes in (
        (ClassLogMeanExp(SHARES, 0.4, 0.4, SHARES, 0.6), LogMeanExp(0.4, 0.6), STRATIFIED),
        (ClassLogMeanExp(torch.ones(1).double(), 0.1, 0.4, eta=0.6), LogMeanExp(0.4, 0.6), torch.zeros(7).long()),
        (ClassLogMeanExp(torch.ones(1).double(), r=0.4, eta=0.6, cap=2.0), LogMeanExp(0.4, 0.6, 2.0), torch.zeros(7)),
    ):
        state, expected_state = {}, {}
        for seed in range(4):
            batch = rows(classes, seed, shift=seed % 2)
            weights, state = composition.update(batch, batch, state)
            expected, expected_state = plain.update(batch[:, 0], batch[:, 0], expected_state)
            assert torch.allclose(weights[:, 0], expected, rtol=1e-9)
            assert composition.value(batch).item() == pytest.approx(plain.value(batch[:, 0]).item(), rel=1e-9)


def test_running_means_count_the_samples_of_a_class_by_hand():
    eta, r, big_r = 0.7, 0.5, 0.3
    composition, state = ClassLogMeanExp(SHARES, big_r, r, eta=eta), {}
    sums, mass = torch.zeros(3).double(), torch.zeros(3).double()
    for seed, classes in enumerate(([0, 1, 2, 2], [0, 0, 1, 1], [0, 0, 0, 0], [2, 2, 0, 1])):
        batch = rows(torch.tensor(classes), seed)
        y = batch[:, 1].long()
        decay, rate = (0, 1) if seed == 0 else (1 - eta, eta)  # the first batch initializes
        sums = decay * sums + rate / 4 * torch.zeros(3).double().index_add(0, y, (batch[:, 0] / r).exp())
        mass = decay * mass + rate / 4 * torch.bincount(y, minlength=3).double()
        u = sums / mass
        p = u ** (r / big_r) / (u ** (r / big_r)).sum()
        weights, state = composition.update(batch, batch, state)
        assert torch.allclose(weights[:, 0], (p / SHARES / u)[y] * (batch[:, 0] / r).exp(), rtol=1e-10)
        assert torch.allclose(composition.estimate(state), r * u.log(), rtol=1e-10)


def test_a_class_that_was_not_seen_leaves_the_prior_of_the_others_alone():
    batch = rows(torch.tensor([0, 0, 1, 1]))
    for composition in (ClassLogMeanExp(SHARES, 0.3, 0.5), ClassLogMeanExp(SHARES, 0.3), ClassLogMeanExp(SHARES, 1e9)):
        weights, state = composition.update(batch, batch, {})
        assert (weights[:, 0] * SHARES[batch[:, 1].long()]).view(2, 2).mean(1).sum().item() == pytest.approx(2 / 3)
        assert composition.estimate(state)[2] == -math.inf and composition.value(batch).isfinite()
        later = rows(torch.tensor([2, 2]))
        weights, state = composition.update(later, later, state)  # its first samples define it
        assert weights.isfinite().all() and composition.estimate(state).isfinite().all()
    composition = ClassLogMeanExp(SHARES, 0.3, 0.5, eta=1.0)  # nothing is left of a class but what was known
    first = rows()
    _, state = composition.update(first, first, {})
    before = composition.estimate(state)[1]
    for _ in range(2):
        later = rows(torch.tensor([2, 0]), 5)
        _, state = composition.update(later, later, state)
    assert composition.estimate(state)[1] == before


def test_bounds_inside_a_class_bind_and_keep_the_mean_weight_at_one():
    values, big = rows(scale=4.0), torch.ones(3).double() / 3
    inner = weights_of(ClassLogMeanExp(SHARES, 1.0, 0.3, cap=1.5, floor=0.4, probabilities=big), values)
    inner = inner * SHARES[STRATIFIED] * 3
    assert torch.allclose(
        torch.zeros(3).double().index_add(0, STRATIFIED, inner), torch.tensor([4.0, 2, 2], dtype=torch.float64)
    )
    for bound in (0.4, 1.5):
        assert ((inner - bound).abs() < 1e-9).any()
    assert inner.min() > 0.4 - 1e-9 and inner.max() < 1.5 + 1e-9
    for bounds in ({"cap": 1.0}, {"floor": 1.0}):
        assert torch.equal(
            weights_of(ClassLogMeanExp(SHARES, 0.3, 0.1, **bounds), values),
            weights_of(ClassLogMeanExp(SHARES, 0.3), values),
        )


def test_p_maximizes_the_score_minus_the_divergence_under_its_cap():
    scores, prior = (
        torch.tensor([0.9, 0.5, 0.1, 0.0], dtype=torch.float64),
        torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
    )
    assert torch.allclose(tilted_probabilities(scores, prior, 0.5), (prior.log() + scores / 0.5).softmax(0))
    assert torch.allclose(tilted_probabilities(scores, prior, math.inf), prior)
    p = tilted_probabilities(scores, torch.full((4,), 0.25).double(), 0.2, cap=2.0)  # softmax: .856 .116 .016 .010
    rest = (scores[1:] / 0.2).softmax(0) / 2
    assert torch.allclose(p, torch.cat([torch.tensor([0.5], dtype=torch.float64), rest]))
    assert torch.allclose(tilted_probabilities(scores, prior, 0.01, 1.0), torch.full((4,), 0.25).double())
    some = tilted_probabilities(
        scores, torch.tensor([0.5, 0, 0.5, 0], dtype=torch.float64), 0.2, cap=1.5
    )  # two classes count
    assert torch.allclose(some, torch.tensor([0.75, 0, 0.25, 0], dtype=torch.float64))
    for R in (1e-12, 1e12):
        assert tilted_probabilities(1e6 * scores, prior, R).sum().item() == pytest.approx(1)


def test_losses_up_to_a_million_at_low_temperatures_stay_finite():
    for dtype in (torch.float32, torch.float64):
        for settings in ({"r": 0.01}, {"r": 0.01, "cap": 2.0, "floor": 0.1}, {}, {"r": 0.01, "class_cap": 2.0}):
            composition, state = ClassLogMeanExp(SHARES, 0.01, **settings), {}
            for seed, scale in enumerate((1e6, 0.0, 1e6, 3.0)):
                values = rows(seed=seed, scale=scale).to(dtype)
                cotangents, state = composition.update(values, values, state)
                assert cotangents.dtype is dtype and cotangents.isfinite().all() and (cotangents >= 0).all()
                assert composition.value(values).isfinite() and state["risks"].isfinite().all()


def test_states_are_saved_belong_to_one_r_and_are_those_of_all_ranks(tmp_path):
    first, second, composition = rows(seed=1, shift=3), rows(seed=2), ClassLogMeanExp(SHARES, 0.3, 0.5, eta=0.5)
    _, state = composition.update(first, first, {})
    save_file(state, tmp_path / "state.safetensors")
    weights = weights_of(composition, second, state)
    assert torch.equal(weights, weights_of(composition, second, load_file(tmp_path / "state.safetensors")))
    other = ClassLogMeanExp(SHARES, 0.3, 0.6, eta=0.5)
    assert torch.equal(weights_of(other, second, state), weights_of(other, second))
    assert not torch.allclose(weights, weights_of(composition, second))
    part, _ = composition.update(second[2:5], second, state)
    assert torch.equal(part[:, 0], weights[2:5]) and isinstance(composition, Composition)


def test_refusals():
    for settings, message in [
        ({"class_temperature": 0.0}, "class_temperature=0.0"),
        ({"r": -1.0}, "r=-1.0"),
        ({"eta": 0.0}, "eta=0.0"),
        ({"cap": 0.5}, "cap=0.5"),
        ({"class_cap": 0.5}, "class_cap=0.5"),
        ({"floor": 1.5}, "floor=1.5"),
        ({"prior": torch.ones(2) / 2}, "prior must hold a number from 0 on for each of the 3 classes"),
        ({"prior": torch.tensor([1.5, -0.5, 0.0])}, "prior must hold"),
        ({"prior": torch.ones(3)}, "prior must sum to 1, got 3"),
        ({"shares": torch.tensor([0.5, 0.5, 0.0]), "prior": torch.ones(3) / 3}, "class without data"),
        ({"probabilities": torch.ones(3)}, "probabilities must sum to 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            ClassLogMeanExp(**{"shares": SHARES, **settings})
    composition, values = ClassLogMeanExp(SHARES), rows()
    with pytest.raises(ValueError, match=r"a loss and a class per sample, \(B, 2\)"):
        composition.value(values[:, 0])
    with pytest.raises(ValueError, match="a class that shares does not have"):
        composition.value(rows(torch.tensor([0, 3])))
    with pytest.raises(ValueError, match="leave storm off"):
        composition.update(values, values, {}, values)
