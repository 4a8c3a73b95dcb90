import torch

from doubly.bilevel import WholeSpace


def test_every_point_is_inside():
    delta = 1e30 * torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(WholeSpace().project(delta), delta)


def test_draws_lie_around_zero():
    fraction = torch.tensor([[0.0, 0.5, 1.0]])
    assert torch.equal(WholeSpace().at(fraction), torch.tensor([[-1.0, 0.0, 1.0]]))


def test_nothing_holds_delta():
    delta, slope = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    face = WholeSpace().face(delta, slope)
    assert torch.equal(face.tangent(delta), delta)
    assert torch.allclose(face.restrict(lambda v: 2 * v)(delta), 2 * delta)
