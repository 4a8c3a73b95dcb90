from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.bilevel import (
    Box,
    CVaR,
    Diagonal,
    LogMeanExp,
    Part,
    RunningMean,
    Terms,
    cid,
    cid_first_order,
    cid_first_order_parts,
)


def network(activation, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    layers = [nn.Flatten(), nn.Linear(12, 20), activation, nn.Linear(20, 20), activation, nn.Linear(20, 4)]
    return nn.Sequential(*layers).to(dtype)


def batch_norm_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 4)).double()


class Setting:
    """An attacked batch of 16 images and the problem of a network on it."""

    def __init__(self, model, dtype=torch.float64, damping=1.0):
        generator = torch.Generator().manual_seed(1)
        self.model, self.parameters = model, list(model.parameters())
        self.x = torch.rand(16, 3, 2, 2, generator=generator).to(dtype)
        self.y = torch.randint(4, (16,), generator=generator)
        box = Box(torch.full_like(self.x, -0.1), torch.full_like(self.x, 0.1), 1e-6)
        self.delta = box.shrunk(0.02).sample(generator)
        self.inverse = box.inverse_curvature(self.delta, damping)

    def problem(self, delta, samples=slice(None)):
        logits = self.model(self.x[samples] + delta)
        return Terms(F.cross_entropy(logits, self.y[samples], reduction="none"), aux=logits.detach())

    def first_order(self, composition, state=None, parameters=None, **options):
        arguments = self.delta, composition, state or {}, options.pop("inverse", self.inverse)
        return cid_first_order(self.problem, self.problem, *arguments, parameters or self.parameters, **options)

    def parts(self, sizes):
        starts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
        assert starts[-1] == len(self.x)
        return [self.part(slice(*ends)) for ends in pairwise(starts)]

    def part(self, samples):
        return Part(
            lambda delta: self.problem(delta, samples),
            lambda delta: self.problem(delta, samples),
            self.delta[samples],
            self.inverse[samples],
        )

    def gradient(self, direction):
        return flat(torch.autograd.grad(direction.loss, self.parameters))


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients])


def implicit_terms(model, damping=1.0, r=0.5, span=1e-4, dtype=torch.float64, limit=float("inf")):
    """The implicit term alone: by the double backward, and by the difference quotient."""
    setting, composition = Setting(model, dtype, damping), LogMeanExp(r)
    none = cid(setting.problem, setting.delta, composition, {})
    exact = cid(setting.problem, setting.delta, composition, {}, Diagonal(setting.inverse))
    quick = setting.first_order(composition, span=span, limit=limit)
    none, exact, quick = (setting.gradient(direction) for direction in (none, exact, quick))
    return exact - none, quick - none


def terms_agree(terms, cosine=0.9999, length=0.01):
    exact, quick = terms
    return F.cosine_similarity(exact, quick, 0) > cosine and abs(quick.norm() / exact.norm() - 1) < length


def test_equals_the_double_backward_on_smooth_networks():
    for activation in (nn.Tanh(), nn.SiLU(), nn.Softplus(), nn.GELU()):
        for damping in (0.0, 1.0, 10.0):
            assert terms_agree(implicit_terms(network(activation), damping)), (activation, damping)


def test_equals_the_double_backward_on_relu_networks_in_single_precision_and_with_vanishing_weights():
    assert terms_agree(implicit_terms(network(nn.ReLU()), span=1e-7))
    assert terms_agree(implicit_terms(network(nn.Tanh(), dtype=torch.float32), dtype=torch.float32), 0.99, 0.05)
    assert terms_agree(implicit_terms(network(nn.Tanh()), r=0.002))


def test_the_difference_shrinks_with_the_span():
    errors = []
    for span in (1e-1, 1e-2, 1e-3):
        exact, quick = implicit_terms(network(nn.Tanh()), span=span)
        errors.append(((quick - exact).norm() / exact.norm()).item())
    assert errors[1] < 0.2 * errors[0] and errors[2] < 0.2 * errors[1]


def test_vanishing_weights_do_not_disturb_the_others_where_batch_norm_couples_the_samples():
    """Dividing the coupled slope by a weight of 1e-20 must not decide the step."""
    for r, cosine in ((10.0, 0.99), (0.02, 0.9)):
        assert terms_agree(implicit_terms(batch_norm_network(), r=r), cosine, float("inf")), r


def test_values_weights_and_state_are_those_of_cid():
    setting = Setting(network(nn.Tanh()))
    expected = cid(setting.problem, setting.delta, LogMeanExp(0.2), {})
    direction = setting.first_order(LogMeanExp(0.2))
    assert torch.equal(expected.values, direction.values)
    assert torch.equal(expected.cotangents, direction.cotangents)
    assert torch.equal(expected.state["nu"], direction.state["nu"]) and torch.equal(expected.aux, direction.aux)
    assert torch.allclose(expected.loss, direction.loss)


def test_a_scaled_loss_scales_the_gradient_and_backward_adds_up():
    setting = Setting(network(nn.Tanh()))
    gradient = setting.gradient(setting.first_order(LogMeanExp()))
    (3 * setting.first_order(LogMeanExp()).loss).backward()
    setting.first_order(LogMeanExp()).loss.backward()
    assert torch.allclose(flat(p.grad for p in setting.parameters), 4 * gradient, rtol=1e-6)


def test_frozen_and_unused_parameters_are_left_out():
    model, unused = network(nn.Tanh()), nn.Parameter(torch.ones(2).double())
    model[1].weight.requires_grad_(False)
    setting = Setting(model)
    setting.first_order(LogMeanExp(), parameters=[*model.parameters(), unused]).loss.backward()
    assert model[1].weight.grad is None and model[3].weight.grad.norm() > 0
    assert torch.equal(unused.grad, torch.zeros(2).double())


def test_a_zero_inverse_curvature_gives_the_weighted_gradient():
    setting = Setting(network(nn.Tanh()))
    expected = setting.gradient(cid(setting.problem, setting.delta, LogMeanExp(), {}))
    direction = setting.first_order(LogMeanExp(), inverse=torch.zeros_like(setting.delta))
    assert torch.allclose(setting.gradient(direction), expected, rtol=1e-10)


def test_the_term_is_never_longer_than_its_limit_and_keeps_its_direction():
    model = network(nn.Tanh())
    setting = Setting(model)
    plain = setting.gradient(cid(setting.problem, setting.delta, LogMeanExp(0.5), {}))
    for limit in (0.01, 0.5):  # without damping the term is longer than the gradient
        exact, quick = implicit_terms(model, damping=0.0, limit=limit)
        assert exact.norm() > plain.norm()
        assert quick.norm().item() == pytest.approx(limit * plain.norm().item(), rel=1e-6)
        assert F.cosine_similarity(exact, quick, 0) > 0.9999


# Microbatches


def one_batch(problem, delta, composition, state, inverse_curvature, parameters, span=1e-4, limit=1.0):
    """The estimate on one batch as it was written before there were parts: (gradients, loss, state)."""
    delta = delta.detach().requires_grad_()
    outer = problem(delta).outer
    values = outer.detach()
    weights, state = composition.update(values, values, state)
    slope, *plain = torch.autograd.grad((weights * outer).sum(), [delta, *parameters])
    tiny = torch.finfo(delta.dtype).tiny
    faded = weights / weights.abs().clamp_min((0.3 * weights.mean()).clamp_min(tiny)).square()
    v = inverse_curvature * slope * faded.view(-1, 1, 1, 1)
    longest = v.abs().amax().clamp_min(tiny)
    outer = problem(delta.detach() + span / longest * v).outer
    shifted = torch.autograd.grad((weights * outer).sum(), parameters)
    quotients = [(s - p) * (longest / span) / len(values) for s, p in zip(shifted, plain, strict=True)]
    plain = [p / len(values) for p in plain]
    norms = [torch.stack([t.square().sum() for t in ts]).sum().sqrt() for ts in (plain, quotients)]
    shrink = (limit * norms[0] / norms[1].clamp_min(tiny)).clamp_max(1)
    return [p + shrink * q for p, q in zip(plain, quotients, strict=True)], (weights * values).mean(), state


def test_one_batch_has_the_bits_of_the_plain_formula():
    for model in (network(nn.Tanh()), network(nn.ReLU(), dtype=torch.float32), batch_norm_network()):
        for composition in (LogMeanExp(0.5, 0.8, cap=2.0), CVaR(0.4, 0.8), RunningMean(torch.log, 0.8)):
            state = {}
            for damping, limit in ((0.0, 0.5), (1.0, 1.0)):
                setting = Setting(model, next(model.parameters()).dtype, damping)
                arguments = setting.delta, composition, state, setting.inverse, setting.parameters
                expected, loss, expected_state = one_batch(setting.problem, *arguments, limit=limit)
                direction = setting.first_order(composition, state, limit=limit)
                gradients = torch.autograd.grad(direction.loss, setting.parameters)
                assert all(torch.equal(g, e) for g, e in zip(gradients, expected, strict=True)), composition
                assert torch.equal(direction.loss, loss)
                assert all(torch.equal(direction.state[key], expected_state[key]) for key in expected_state)
                state = direction.state


def test_microbatches_equal_the_whole_batch():
    for composition in (LogMeanExp(0.5, 0.7, cap=1.5), CVaR(0.4, 0.7)):
        for limit in (0.1, float("inf")):  # bounded, and not
            setting, state = Setting(network(nn.Tanh()), damping=0.0), {}
            for _ in range(2):  # from an empty state and from one that exists
                expected = setting.first_order(composition, state, limit=limit)
                expected_gradient = setting.gradient(expected)
                for sizes in ([5, 11], [7, 1, 8]):
                    parts = setting.parts(sizes)
                    direction = cid_first_order_parts(parts, composition, state, setting.parameters, limit=limit)
                    for name in ("loss", "values", "cotangents", "aux"):
                        one, other = getattr(direction, name), getattr(expected, name)
                        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12), (name, sizes)
                    gradient = setting.gradient(direction)
                    assert (gradient - expected_gradient).norm() < 1e-10 * expected_gradient.norm(), (sizes, limit)
                    assert torch.allclose(*(composition.estimate(d.state) for d in (direction, expected)), rtol=1e-12)
                state = expected.state
                setting.y = setting.y.roll(1)


def test_one_part_costs_two_calls_and_several_parts_three_each():
    setting, calls = Setting(network(nn.Tanh())), []
    for sizes in ([16], [10, 6]):
        parts = [
            part._replace(
                problem=lambda delta, p=part: calls.append("problem") or p.problem(delta),
                shifted=lambda delta, p=part: calls.append("shifted") or p.shifted(delta),
            )
            for part in setting.parts(sizes)
        ]
        cid_first_order_parts(parts, LogMeanExp(), {}, setting.parameters)
    assert calls == ["problem", "shifted", *["shifted"] * 2, *["problem"] * 2, *["shifted"] * 2]


def test_values_and_the_longest_shift_are_gathered_once_and_gradients_averaged_once():
    setting, gathered, averaged = Setting(network(nn.Tanh())), [], []

    def all_gather(values):
        gathered.append(values)
        return torch.cat([values, values])  # as if another process had the same samples

    def mean(tensors):
        averaged.append(tensors)
        return tensors

    direction = cid_first_order_parts(setting.parts([4, 12]), CVaR(0.4), {}, setting.parameters, all_gather, mean)
    assert [values.shape for values in gathered] == [(16,), (1,)]
    assert len(averaged) == 1 and len(averaged[0]) == 2 * len(setting.parameters)
    expected = setting.gradient(setting.first_order(CVaR(0.4)))
    assert torch.allclose(setting.gradient(direction), expected, rtol=1e-9, atol=1e-12)


def test_aux_that_is_no_tensor_is_listed_and_no_parts_are_refused():
    setting = Setting(network(nn.Tanh()))
    parts = [
        part._replace(problem=lambda delta, p=part, name=name: p.problem(delta)._replace(aux=name))
        for name, part in zip("ab", setting.parts([8, 8]), strict=True)
    ]
    assert cid_first_order_parts(parts, LogMeanExp(), {}, setting.parameters).aux == ["a", "b"]
    with pytest.raises(ValueError, match="at least one microbatch"):
        cid_first_order_parts([], LogMeanExp(), {}, setting.parameters)
