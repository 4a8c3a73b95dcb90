"""What every constraint promises: nearest points, and faces with the directions and multipliers of a minimizer."""

import pytest
import torch

from doubly.bilevel import Ball, Box, Constraint, Direct, Face, SignStep, Simplex, WholeSpace

M, P = 8, 5
UNITS = torch.eye(P, dtype=torch.float64)


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
each_constraint = pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=list(CONSTRAINTS))


def minimizer(constraint):
    """Minimizers of half the squared distance to a target, and its gradients there."""
    target = 1.5 * normal(M, P, seed=2)
    delta = constraint.project(target)
    return delta, delta - target


def columns(linear):
    """The matrices of a linear map of rows."""
    return torch.stack([linear(unit.expand(M, P)) for unit in UNITS], 2)


@each_constraint
def test_a_projection_is_idempotent_and_the_nearest_point_and_draws_are_inside(constraint):
    delta, slope = minimizer(constraint)
    assert isinstance(constraint, Constraint)
    assert torch.allclose(constraint.project(delta), delta, rtol=1e-14, atol=1e-15)
    drawn = constraint.at(torch.rand(M, P, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    assert torch.allclose(constraint.project(drawn), drawn, rtol=1e-14, atol=1e-15)
    generator = torch.Generator().manual_seed(4)
    for _ in range(100):  # no point of a convex set lies in the direction of the target
        inside = constraint.project(delta + torch.randn(M, P, generator=generator, dtype=torch.float64))
        assert (-slope * (inside - delta)).sum(1).max() < 1e-12


@each_constraint
def test_the_tangent_is_an_orthogonal_projection_along_the_face(constraint):
    delta, slope = minimizer(constraint)
    face = constraint.face(delta, slope)
    matrix = columns(face.tangent)
    assert torch.allclose(matrix, matrix.mT, rtol=0, atol=1e-15)
    assert torch.allclose(matrix @ matrix, matrix, rtol=0, atol=1e-15)
    if not isinstance(constraint, WholeSpace):
        assert (matrix.diagonal(dim1=1, dim2=2).sum(1) < P - 0.5).any()  # some face is smaller than the space
    assert face.tangent(slope).abs().max() < 1e-14  # a minimizer has no slope along its face
    size = 1e-5
    moved = delta + size * face.tangent(normal(M, P, seed=5))
    assert (moved - constraint.project(moved)).norm(dim=1).max() < 20 * size**2  # second order, on a sphere


def test_the_multiplier_of_a_ball_balances_the_slope():
    for name in ("ball", "balls"):
        delta, slope = minimizer(CONSTRAINTS[name])
        multiplier = CONSTRAINTS[name].face(delta, slope).multiplier
        assert torch.allclose(slope + multiplier[:, None] * delta, torch.zeros(M, P).double(), atol=1e-14)
        assert 0 < (multiplier > 0).sum() <= M and (multiplier >= 0).all()


def test_with_a_box_the_multiplier_balances_the_slope_of_the_free_coordinates():
    multiplier, delta = 2.0, torch.tensor([[0.5, 0.3, -0.4, -0.5, 0.5]], dtype=torch.float64)
    ball = Ball(delta.norm(dim=1), Box(-0.5, 0.5))
    slope = -multiplier * delta - torch.tensor([[0.7, 0.0, 0.0, -0.2, 1.0]], dtype=torch.float64)
    face = ball.face(delta, slope)
    assert torch.equal(face.free, torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0]], dtype=torch.float64))
    assert torch.allclose(face.multiplier, torch.tensor([multiplier], dtype=torch.float64))
    assert torch.allclose(face.free * (slope + multiplier * delta), torch.zeros(1, P).double(), atol=1e-15)


@each_constraint
def test_the_restricted_system_is_that_of_the_tangent_space_and_the_identity_across(constraint):
    root = normal(M, P, P, seed=6)
    A = root @ root.mT / P + UNITS
    face = constraint.face(*minimizer(constraint))
    restricted = face.restrict(lambda v: torch.einsum("nij,nj->ni", A, v))
    along, matrix = columns(face.tangent), columns(restricted)
    curved = A if face.multiplier is None else A + face.multiplier[:, None, None] * UNITS
    assert torch.allclose(matrix, along @ curved @ along + UNITS - along, atol=1e-14)
    assert torch.linalg.eigvalsh(matrix).min() > 0.9
    v = Direct()(restricted, face.tangent(normal(M, P, seed=7))).v
    assert torch.allclose(face.tangent(v), v, atol=1e-14)


def test_rows_may_have_any_shape():
    v, shape = normal(M, P, seed=8), (M, 1, P, 1)
    for name, constraint in CONSTRAINTS.items():
        folded = constraint
        if name == "box":
            folded = Box(constraint.lower.view(shape), constraint.upper.view(shape))
        delta, slope = minimizer(constraint)
        face, other = constraint.face(delta, slope), folded.face(delta.view(shape), slope.view(shape))
        products = face.restrict(lambda v: 2 * v)(v), other.restrict(lambda v: 2 * v)(v.view(shape)).view(M, P)
        assert torch.allclose(face.tangent(v), other.tangent(v.view(shape)).view(M, P)), name
        assert torch.allclose(*products), name


def test_without_a_constraint_nothing_is_projected_or_held():
    v, space = normal(M, P), WholeSpace()
    assert torch.equal(space.project(1e30 * v), 1e30 * v)
    assert torch.equal(space.at(torch.tensor([[0.0, 0.5, 1.0]])), torch.tensor([[-1.0, 0.0, 1.0]]))
    for face in (Face(), space.face(v, v)):
        assert torch.equal(face.tangent(v), v)
        assert torch.equal(face.restrict(lambda v: 3 * v)(v), 3 * v)


def test_a_step_rule_is_no_constraint():
    assert not isinstance(SignStep(), Constraint)


def test_empty_sets_are_refused():
    for make in (lambda: Ball(-1.0), lambda: Ball(0.0), lambda: Box(1.0, -1.0), lambda: Simplex(0.0)):
        with pytest.raises(ValueError, match=r"is not allowed|leave nothing between"):
            make()
