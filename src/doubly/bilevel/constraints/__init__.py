"""Convex sets that delta is constrained to: one set for each sample."""

from doubly.bilevel.constraints.ball import Ball
from doubly.bilevel.constraints.box import Box
from doubly.bilevel.constraints.cross_polytope import CrossPolytope
from doubly.bilevel.constraints.face import Face
from doubly.bilevel.constraints.protocol import Constraint
from doubly.bilevel.constraints.simplex import Simplex
from doubly.bilevel.constraints.whole_space import WholeSpace

__all__ = ["Ball", "Box", "Constraint", "CrossPolytope", "Face", "Simplex", "WholeSpace"]
