"""The generic optimiser: compositional bilevel problems, as functions of tensors. No images, labels or networks."""

from doubly.bilevel.ball import BoxedBall
from doubly.bilevel.box import Box
from doubly.bilevel.cid import Direction, Terms, cid
from doubly.bilevel.composition import Composition, LogMeanExp, RunningMean
from doubly.bilevel.first_order import cid_first_order
from doubly.bilevel.inner import Constraint, StepRule, projected_descent
from doubly.bilevel.linear_solve import ConjugateGradient, Diagonal, Neumann, Solver
from doubly.bilevel.step_rules import AdamStep, BarrierStep, GradientStep, NormalisedStep, SignStep

STEP_RULES: dict[str, type] = {
    "gradient": GradientStep,
    "normalised": NormalisedStep,
    "sign": SignStep,
    "adam": AdamStep,
    "barrier": BarrierStep,
}

__all__ = [
    "STEP_RULES",
    "AdamStep",
    "BarrierStep",
    "Box",
    "BoxedBall",
    "Composition",
    "ConjugateGradient",
    "Constraint",
    "Diagonal",
    "Direction",
    "GradientStep",
    "LogMeanExp",
    "Neumann",
    "NormalisedStep",
    "RunningMean",
    "SignStep",
    "Solver",
    "StepRule",
    "Terms",
    "cid",
    "cid_first_order",
    "projected_descent",
]
