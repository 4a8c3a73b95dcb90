"""What every constraint promises: suggestion points, and on its faces directions and multipliers that fit a minimizer."""

import pytest
import torch

from doubly.bilevel import Ball, Box, Direct, Face, Simplex, WholeSpace

M, P = 8, 5


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CONSTRAINTS = {
    "whole space": WholeSpace(),
    "box": Box(-0.6 - normal(M, P).abs(), 0.1 + normal(M, P, seed=1).abs()),
    "half space": Box(0.0, torch.inf),
    "ball": Ball(1.5),
    "balls": Ball(torch.linspace(0.5, 4.0, M, dtype=torch.float64)),
    "simplex": Simplex(2.0),
}
each_constraint = pytest.mark.parametrize("limits", CONSTRAINTS.values(), ids=list(CONSTRAINTS))


def at_rest(limits, shape=(M, P)):
    """The minimizers of half the squared distance to a target, and its slope there."""
    target = 1.5 * normal(*shape, seed=2)
    delta = limits.project(target)
    return delta, delta - target


@each_constraint
def test_a_projection_is_idempotent_and_draws_are_inside(limits):
    delta, _ = at_rest(limits)
    assert torch.allclose(limits.project(delta), delta, rtol=1e-14, atol=1e-15)
    drawn = limits.at(torch.rand(M, P, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    assert torch.allclose(limits.project(drawn), drawn, rtol=1e-14, atol=1e-15)


@each_constraint
def test_a_projection_is_the_nearest_point(limits):
    delta, slope = at_rest(limits)
    generator = torch.Generator().manual_seed(4)
    for _ in range(300):  # the angle between the way to the target and the way to any point inside is never sharp
        inside = limits.project(delta + torch.randn(M, P, generator=generator, dtype=torch.float64))
        assert (-slope * (inside - delta)).sum(1).max() < 1e-12


@each_constraint
def test_the_tangent_is_an_orthogonal_projection(limits):
    face = limits.face(*at_rest(limits))
    units = torch.eye(P, dtype=torch.float64)
    matrix = torch.stack([face.tangent(unit.expand(M, P)) for unit in units], 2)
    assert torch.allclose(matrix, matrix.mT, rtol=0, atol=1e-15)
    assert torch.allclose(matrix @ matrix, matrix, rtol=0, atol=1e-15)
    if not isinstance(limits, WholeSpace):
        assert (matrix.diagonal(dim1=1, dim2=2).sum(1) < P - 0.5).any()  # some face is smaller than the space


@each_constraint
def test_a_small_move_along_the_face_stays_on_the_constraint(limits):
    delta, slope = at_rest(limits)
    size = 1e-5
    moved = delta + size * limits.face(delta, slope).tangent(normal(M, P, seed=5))
    assert (moved - limits.project(moved)).norm(dim=1).max() < 20 * size**2  # of second order, on a sphere


@each_constraint
def test_nothing_is_left_of_the_slope_along_the_face(limits):
    delta, slope = at_rest(limits)
    face = limits.face(delta, slope)
    assert face.tangent(slope).abs().max() < 1e-14


@pytest.mark.parametrize("limits", [CONSTRAINTS["ball"], CONSTRAINTS["balls"]], ids=["ball", "balls"])
def test_the_multiplier_of_a_ball_balances_the_slope(limits):
    delta, slope = at_rest(limits)
    multiplier = limits.face(delta, slope).multiplier
    assert torch.allclose(slope + multiplier[:, None] * delta, torch.zeros(M, P).double(), atol=1e-14)
    assert 0 < (multiplier > 0).sum() <= M and (multiplier >= 0).all()


def test_with_a_box_the_multiplier_balances_the_slope_of_the_free_coordinates():
    ball = Ball(1.0, Box(-0.5, 0.5))
    multiplier, delta = 2.0, torch.tensor([[0.5, 0.3, -0.4, -0.5, 0.5]], dtype=torch.float64)
    ball = Ball(delta.norm(dim=1), ball.box)
    slope = -multiplier * delta - torch.tensor([[0.7, 0.0, 0.0, -0.2, 1.0]], dtype=torch.float64)
    face = ball.face(delta, slope)
    assert torch.equal(face.free, torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0]], dtype=torch.float64))
    assert torch.allclose(face.multiplier, torch.tensor([multiplier], dtype=torch.float64))
    assert torch.allclose(face.free * (slope + multiplier * delta), torch.zeros(1, P).double(), atol=1e-15)


def test_without_anything_active_a_face_is_the_whole_space():
    v = normal(M, P)
    assert torch.equal(Face().tangent(v), v)
    assert torch.equal(Face().restrict(lambda v: 3 * v)(v), 3 * v)


@each_constraint
def test_the_restricted_system_is_that_of_the_tangent_space_and_the_identity_across(limits):
    root = normal(M, P, P, seed=6)
    A = root @ root.mT / P + torch.eye(P, dtype=torch.float64)
    face = limits.face(*at_rest(limits))
    restricted = face.restrict(lambda v: torch.einsum("nij,nj->ni", A, v))
    units = torch.eye(P, dtype=torch.float64)
    along = torch.stack([face.tangent(unit.expand(M, P)) for unit in units], 2)
    matrix = torch.stack([restricted(unit.expand(M, P)) for unit in units], 2)
    bent = A if face.multiplier is None else A + face.multiplier[:, None, None] * units
    assert torch.allclose(matrix, along @ bent @ along + units - along, atol=1e-14)
    assert torch.linalg.eigvalsh(matrix).min() > 0.9
    b = face.tangent(normal(M, P, seed=7))
    v = Direct()(restricted, b).v
    assert torch.allclose(face.tangent(v), v, atol=1e-14)


@each_constraint
def test_faces_of_rows_of_any_shape_are_those_of_flat_rows(limits):
    if isinstance(limits, Box) and limits.lower.dim():
        limits, folded = limits, Box(limits.lower.view(M, 1, P, 1), limits.upper.view(M, 1, P, 1))
    else:
        folded = limits
    delta, slope = at_rest(limits)
    v, shape = normal(M, P, seed=8), (M, 1, P, 1)
    flat, other = limits.face(delta, slope), folded.face(delta.view(shape), slope.view(shape))
    assert torch.allclose(flat.tangent(v), other.tangent(v.view(shape)).view(M, P))
    products = flat.restrict(lambda v: 2 * v)(v), other.restrict(lambda v: 2 * v)(v.view(shape)).view(M, P)
    assert torch.allclose(*products)
