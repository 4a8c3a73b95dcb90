"""A generic optimizer for compositional bilevel problems, written in terms of functions of tensors.

It minimizes F(theta) = f(mean_i g_i(theta, delta_i*(theta))), where delta_i* minimizes h_i(theta, .) over a set V_i.
`minimize` runs the whole algorithm; `cid` computes one gradient estimate for a loop of your own.
"""

from doubly.bilevel.barrier_steps import BarrierStep, WithBarrier
from doubly.bilevel.cid import Direction, Terms, cid
from doubly.bilevel.classes import ClassLogMeanExp, tilted_probabilities
from doubly.bilevel.communicator import Communicator, SingleProcess
from doubly.bilevel.composition import Composition, LogMeanExp, RunningMean
from doubly.bilevel.constraints import Ball, Box, Constraint, Face, Simplex, WholeSpace
from doubly.bilevel.first_order import Part, cid_first_order, cid_first_order_parts
from doubly.bilevel.inner import Descent, projected_descent
from doubly.bilevel.linear_solve import ConjugateGradient, Diagonal, Direct, Neumann, Solution, Solver, SolverWarning
from doubly.bilevel.minimize import Result, Step, minimize
from doubly.bilevel.step_rules import (
    AdamStep,
    FirstThen,
    GradientStep,
    MomentumStep,
    NormalizedStep,
    SignStep,
    SparseStep,
    StepRule,
)
from doubly.bilevel.threshold import ChiSquare, CVaR, MeanVariance

STEP_RULES: dict[str, type] = {
    "gradient": GradientStep,
    "momentum": MomentumStep,
    "normalized": NormalizedStep,
    "sign": SignStep,
    "sparse": SparseStep,
    "adam": AdamStep,
    "barrier": BarrierStep,
    "first_then": FirstThen,
    "with_barrier": WithBarrier,
}
"""The step rules by the names that they have in configuration files and on the command line."""

__all__ = [
    "STEP_RULES",
    "AdamStep",
    "Ball",
    "BarrierStep",
    "Box",
    "CVaR",
    "ChiSquare",
    "ClassLogMeanExp",
    "Communicator",
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
    "Part",
    "Result",
    "RunningMean",
    "SignStep",
    "Simplex",
    "SingleProcess",
    "Solution",
    "Solver",
    "SolverWarning",
    "SparseStep",
    "Step",
    "StepRule",
    "Terms",
    "WholeSpace",
    "WithBarrier",
    "cid",
    "cid_first_order",
    "cid_first_order_parts",
    "minimize",
    "projected_descent",
    "tilted_probabilities",
]
