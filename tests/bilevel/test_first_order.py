import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.bilevel import Box, Diagonal, LogMeanExp, Terms, cid, cid_first_order


def network(activation, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    layers = [nn.Flatten(), nn.Linear(12, 20), activation, nn.Linear(20, 20), activation, nn.Linear(20, 4)]
    return nn.Sequential(*layers).to(dtype)


def setting(dtype=torch.float64, count=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 3, 2, 2, generator=generator).to(dtype)
    y = torch.randint(4, (count,), generator=generator)
    box = Box(torch.full_like(x, -0.1), torch.full_like(x, 0.1), 1e-6)
    return x, y, box.shrunk(0.02).sample(generator), box


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients])


def implicit_terms(model, damping=1.0, r=0.5, span=1e-4, dtype=torch.float64, limit=float("inf")):
    """The implicit term alone: by the double backward, and by the difference quotient."""
    x, y, delta, box = setting(dtype)
    inverse = box.inverse_curvature(delta, damping)
    parameters = list(model.parameters())

    def problem(delta):
        return Terms(F.cross_entropy(model(x + delta), y, reduction="none"))

    rule = LogMeanExp(r)
    none = cid(problem, delta, rule, {})
    exact = cid(problem, delta, rule, {}, Diagonal(inverse))
    first = cid_first_order(problem, problem, delta, rule, {}, inverse, parameters, span=span, limit=limit)
    none, exact, quick = (flat(torch.autograd.grad(d.loss, parameters)) for d in (none, exact, first))
    return exact - none, quick - none


def compare(exact, quick):
    return F.cosine_similarity(exact, quick, 0).item(), (quick.norm() / exact.norm()).item()


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.SiLU(), nn.Softplus(), nn.GELU()])
@pytest.mark.parametrize("damping", [0.0, 1.0, 10.0])
def test_equals_the_double_backward_on_smooth_networks(activation, damping):
    cosine, length = compare(*implicit_terms(network(activation), damping))
    assert cosine > 0.9999 and length == pytest.approx(1, abs=0.01)


def test_the_difference_shrinks_with_the_span():
    model = network(nn.Tanh())
    errors = []
    for span in (1e-1, 1e-2, 1e-3):
        exact, quick = implicit_terms(model, span=span)
        errors.append(((quick - exact).norm() / exact.norm()).item())
    assert errors[1] < 0.2 * errors[0] and errors[2] < 0.2 * errors[1]


def test_a_tiny_span_equals_the_double_backward_on_relu_networks():
    cosine, length = compare(*implicit_terms(network(nn.ReLU()), span=1e-7))
    assert cosine > 0.9999 and length == pytest.approx(1, abs=0.01)


def test_single_precision_is_enough():
    cosine, length = compare(*implicit_terms(network(nn.Tanh(), dtype=torch.float32), 1.0, dtype=torch.float32))
    assert cosine > 0.99 and length == pytest.approx(1, abs=0.05)


def test_values_weights_and_state_are_those_of_cid():
    model = network(nn.Tanh())
    x, y, delta, box = setting()

    def problem(delta):
        return Terms(F.cross_entropy(model(x + delta), y, reduction="none"), aux="aux")

    one = cid(problem, delta, LogMeanExp(0.2), {})
    other = cid_first_order(
        problem, problem, delta, LogMeanExp(0.2), {}, box.inverse_curvature(delta, 1.0), model.parameters()
    )
    assert torch.equal(one.values, other.values) and torch.equal(one.cotangents, other.cotangents)
    assert torch.equal(one.state["nu"], other.state["nu"]) and other.aux == "aux"
    assert torch.allclose(one.loss, other.loss)


def test_a_scaled_scalar_scales_the_gradient_and_backward_adds_up():
    model = network(nn.Tanh())
    x, y, delta, box = setting()
    inverse = box.inverse_curvature(delta, 1.0)

    def problem(delta):
        return Terms(F.cross_entropy(model(x + delta), y, reduction="none"))

    def direction():
        return cid_first_order(problem, problem, delta, LogMeanExp(), {}, inverse, model.parameters()).loss

    once = flat(torch.autograd.grad(direction(), list(model.parameters())))
    (3 * direction()).backward()
    direction().backward()
    assert torch.allclose(flat(p.grad for p in model.parameters()), 4 * once, rtol=1e-6)


def test_frozen_and_unused_parameters_are_left_out():
    model = network(nn.Tanh())
    model[1].weight.requires_grad_(False)
    spare = nn.Parameter(torch.ones(2).double())
    x, y, delta, box = setting()

    def problem(delta):
        return Terms(F.cross_entropy(model(x + delta), y, reduction="none"))

    everything = [*model.parameters(), spare]
    inverse = box.inverse_curvature(delta, 1.0)
    cid_first_order(problem, problem, delta, LogMeanExp(), {}, inverse, everything).loss.backward()
    assert model[1].weight.grad is None and model[3].weight.grad.norm() > 0
    assert spare.grad is None or torch.equal(spare.grad, torch.zeros(2).double())


def test_a_zero_inverse_curvature_gives_the_weighted_gradient():
    model = network(nn.Tanh())
    x, y, delta, _ = setting()

    def problem(delta):
        return Terms(F.cross_entropy(model(x + delta), y, reduction="none"))

    parameters = list(model.parameters())
    plain = cid(problem, delta, LogMeanExp(), {}).loss
    quick = cid_first_order(problem, problem, delta, LogMeanExp(), {}, torch.zeros_like(delta), parameters).loss
    expected, found = (flat(torch.autograd.grad(s, parameters)) for s in (plain, quick))
    assert torch.allclose(found, expected, rtol=1e-10)


def test_samples_whose_weight_vanishes_do_not_disturb_the_others():
    cosine, length = compare(*implicit_terms(network(nn.Tanh()), r=0.002))
    assert cosine > 0.9999 and length == pytest.approx(1, abs=0.01)


def test_weights_that_vanish_do_not_disturb_the_others_where_samples_see_each_other():
    """Batch norm couples the samples: dividing the coupled slope by a weight of 1e-20 must not set the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 4)).double()
    evenly = compare(*implicit_terms(model, r=10.0))
    sharply = compare(*implicit_terms(model, r=0.02))
    print(f"\nbatch norm, first_order against exact (cosine, length): r=10 {evenly}, r=0.02 {sharply}")
    assert evenly[0] > 0.99 and sharply[0] > 0.9


def test_the_term_is_never_longer_than_its_limit_and_keeps_its_direction():
    model = network(nn.Tanh())
    x, y, delta, _ = setting()
    losses = F.cross_entropy(model(x + delta), y, reduction="none")
    plain = flat(torch.autograd.grad(0.5 * (losses / 0.5).exp().mean().log(), list(model.parameters())))
    for limit in (0.01, 0.5):  # undamped, the term is longer than the gradient
        exact, quick = implicit_terms(model, damping=0.0, limit=limit)
        assert exact.norm() > plain.norm()
        assert quick.norm().item() == pytest.approx(limit * plain.norm().item(), rel=1e-6)
        assert F.cosine_similarity(exact, quick, 0) > 0.9999
