"""Weights of extreme losses and temperatures: those of exact arithmetic, or a sentence."""

import math
from decimal import Decimal, localcontext

import pytest
import torch

from doubly.bilevel import ChiSquare, ClassLogMeanExp, CVaR, LogMeanExp, MeanVariance

LOSSES = {
    "spread": [0.5, 0.77, 0.09, 0.13, 0.31, 0.63, 0.5, 0.91],
    "one": [0.7],
    "equal": [2.3] * 5,
    "ties at the top": [3.0, 3.0, 1.0, 0.0],
    "close": [1.0, 1.0 + 2**-20, 1.0],
    "huge": [1e30, 2e30, 1e29],
    "huge beside small": [1e30, 1.0, 0.0],
    "hugely negative": [-1e30, 0.0, 5.0],
    "largest of float32": [3.4e38, 1.0],
}
RS, CAPS = (1e-30, 1e-6, 1.0), (None, 1.0, 1.5, 2.0, 1e9)


def exact_weights(name, losses, r, cap):
    """Return the weights in 50 digits, by bisection for what makes their mean 1."""
    with localcontext() as context:
        context.prec = 50
        n, top = len(losses), Decimal(len(losses) if cap is None else cap)
        pivot = Decimal(sorted(losses, reverse=True)[0 if cap is None else math.ceil(n / cap) - 1])
        scaled = [max(min((Decimal(x) - pivot) / Decimal(r), Decimal(900)), Decimal(-900)) for x in losses]

        def weights(shift):
            if name == "kl":
                return [min(top, (z - shift).exp()) for z in scaled]
            return [min(top, max(Decimal(0), 1 + z - shift)) for z in scaled]

        low, high = Decimal(-2000), Decimal(2000)
        for _ in range(90):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(weights(middle)) > n else (low, middle)
        return [1.0] * n if cap == 1 else [float(weight) for weight in weights(high)]


def exact_cvar(losses, alpha):
    left, weights = float(len(losses)), {}
    for loss in sorted(set(losses), reverse=True):
        weights[loss] = min(left / losses.count(loss), 1 / alpha)
        left -= weights[loss] * losses.count(loss)
    return [weights[loss] for loss in losses]


def check(composition, losses, expected, case):
    weights, _ = composition.update(losses, losses, {})
    torch.testing.assert_close(
        weights.double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-6, msg=lambda text: f"{case}: {text}"
    )
    assert torch.isfinite(composition.value(losses)), case


def test_weights_are_those_of_exact_arithmetic():
    for (name, numbers), dtype in (
        (item, dtype) for item in LOSSES.items() for dtype in (torch.float32, torch.float64)
    ):
        losses = torch.tensor(numbers, dtype=dtype)
        for r in RS:
            for cap in CAPS:
                for kind, composition in (("kl", LogMeanExp(r, 0.9, cap)), ("chi2", ChiSquare(r, 0.9, cap))):
                    expected = exact_weights(kind, losses.tolist(), r, cap)
                    check(composition, losses, expected, (name, dtype, kind, r, cap))
        for alpha in (1e-9, 0.3, 0.5, 1.0):
            check(CVaR(alpha), losses, exact_cvar(losses.tolist(), alpha), (name, dtype, "cvar", alpha))


def test_what_has_no_weight_is_refused_by_a_sentence():
    good, huge = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([1e30, 2e30, 1.0])
    compositions = (LogMeanExp(), LogMeanExp(cap=2.0), ChiSquare(), CVaR(), MeanVariance())
    for composition in compositions:
        _, state = composition.update(good, good, {})
        for bad in (math.nan, math.inf, -math.inf):
            losses = good.clone()
            losses[1] = bad
            for call in (
                lambda c=composition, x=losses: c.update(x, x, {}),
                lambda c=composition, x=losses, s=state: c.update(good, x, s),
                lambda c=composition, x=losses: c.value(x),
            ):
                with pytest.raises(ArithmeticError, match="1 of 3 losses that are NaN or infinite"):
                    call()
        with pytest.raises(ValueError, match="at least one row"):
            composition.update(good[:0], good[:0], {})
    classes = ClassLogMeanExp(torch.tensor([0.5, 0.5]), r=1.0)
    rows = torch.tensor([[math.nan, 0.0], [1.0, 1.0]])
    with pytest.raises(ArithmeticError, match="1 of 2 losses"):
        classes.update(rows, rows, {})
    for composition in (LogMeanExp(1e-6), ChiSquare(1e-6)):
        _, state = composition.update(good, good, {})
        with pytest.raises(ArithmeticError, match="no digits left to be averaged with earlier batches"):
            composition.update(huge, huge, state)
    with pytest.raises(ArithmeticError, match="float32 overflows: take a larger r, or float64"):
        MeanVariance(1e-30).update(huge, huge, {})
    for composition in (LogMeanExp, ChiSquare):
        for settings in ({"r": math.inf}, {"r": math.nan}, {"r": 0.0}, {"cap": math.inf}, {"cap": 0.5}):
            with pytest.raises(ValueError, match="is not allowed"):
                composition(**settings)
