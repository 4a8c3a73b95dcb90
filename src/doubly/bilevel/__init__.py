"""The generic optimizer: compositional bilevel problems, as functions of tensors. No images, labels or networks."""

from doubly.bilevel.ball import Ball
from doubly.bilevel.box import Box
from doubly.bilevel.cid import Direction, Terms, cid
from doubly.bilevel.composition import Composition, LogMeanExp, RunningMean
from doubly.bilevel.face import Face
from doubly.bilevel.first_order import cid_first_order
from doubly.bilevel.inner import Constraint, StepRule, projected_descent
from doubly.bilevel.levels import Descent, Processes
from doubly.bilevel.linear_solve import ConjugateGradient, Diagonal, Direct, Neumann, Solution, Solver, SolverWarning
from doubly.bilevel.minimize import Result, Step, minimize
from doubly.bilevel.simplex import Simplex
from doubly.bilevel.step_rules import (
    AdamStep,
    BarrierStep,
    FirstThen,
    GradientStep,
    MomentumStep,
    NormalizedStep,
    SignStep,
)
from doubly.bilevel.threshold import ChiSquare, CVaR, MeanVariance
from doubly.bilevel.whole_space import WholeSpace

STEP_RULES: dict[str, type] = {
    "gradient": GradientStep,
    "momentum": MomentumStep,
    "normalized": NormalizedStep,
    "sign": SignStep,
    "adam": AdamStep,
    "barrier": BarrierStep,
    "first_then": FirstThen,
}

__all__ = [
    "STEP_RULES",
    "AdamStep",
    "Ball",
    "BarrierStep",
    "Box",
    "CVaR",
    "ChiSquare",
    "Composition",
    "ConjugateGradient",
    "Constraint",
    "Descent",
    "Diagonal",
    "Direct",
    "Direction",
    "Face",
    "FirstThen",
    "GradientStep",
    "LogMeanExp",
    "MeanVariance",
    "MomentumStep",
    "Neumann",
    "NormalizedStep",
    "Processes",
    "Result",
    "RunningMean",
    "SignStep",
    "Simplex",
    "Solution",
    "Solver",
    "SolverWarning",
    "Step",
    "StepRule",
    "Terms",
    "WholeSpace",
    "cid",
    "cid_first_order",
    "minimize",
    "projected_descent",
]
