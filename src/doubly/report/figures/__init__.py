"""Figures drawn from the files of runs, one function each: the paper's figures 1 to 6, and six more.

Paths are given without an ending: each figure is written as PNG, for print, and as SVG, for the page. A function
returns True if it wrote the files, and False if the runs do not hold the data that it draws.
"""

from doubly.report.figures.bars import per_class, per_class_panels
from doubly.report.figures.curves import epsilon_curve, learning_curves
from doubly.report.figures.frontier import frontier
from doubly.report.figures.images import gallery
from doubly.report.figures.margins import margin_histograms
from doubly.report.figures.matrices import confusion
from doubly.report.figures.style import INK
from doubly.report.figures.trade_offs import cost, pareto
from doubly.report.figures.values import ByMethod
from doubly.report.figures.weighting import weight_against_margin, weights

__all__ = [
    "INK",
    "ByMethod",
    "confusion",
    "cost",
    "epsilon_curve",
    "frontier",
    "gallery",
    "learning_curves",
    "margin_histograms",
    "pareto",
    "per_class",
    "per_class_panels",
    "weight_against_margin",
    "weights",
]
