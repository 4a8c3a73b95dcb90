"""Comparison of two evaluations: McNemar's test by its definition, paired differences, and what is refused."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubly.errors import UsageError
from doubly.evaluation.comparison import compare, mcnemar
from doubly.evaluation.result import EvalResult

PAIRS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def result(correct, y, protocol=None, **fields):
    """A result of three classes; `correct`: booleans by attack."""
    predictions = {name: np.where(right, y, (y + 1) % 3) for name, right in {"clean": y >= 0, **correct}.items()}
    return EvalResult(y, ("a", "b", "c"), predictions, protocol or {}, **fields)


def two_results(seed=0, n=90, **protocol):
    generator = np.random.default_rng(seed)
    y = np.arange(n) % 3
    return tuple(result({"pgd": generator.random(n) < share}, y, protocol) for share in (0.8, 0.5))


@given(PAIRS)
def test_mcnemar_is_the_binomial_sum(pairs):
    first, second = np.array(pairs).T
    compared = mcnemar(first, second)
    ours, theirs = sum(a > b for a, b in pairs), sum(b > a for a, b in pairs)
    n = ours + theirs
    expected = 2 * sum(comb(n, k) for k in range(min(ours, theirs) + 1)) / 2**n
    assert (compared.first_only, compared.second_only) == (ours, theirs)
    assert compared.p == pytest.approx(min(1.0, expected), rel=1e-9)
    assert mcnemar(second, first) == (theirs, ours, pytest.approx(compared.p))


@given(st.integers(0, 10**6), st.integers(1, 30))
@settings(max_examples=15)
def test_exchanging_the_models_changes_the_sign(seed, n):
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 3, n)
    a, b = (result({"pgd": generator.random(n) < 0.6}, y) for _ in range(2))
    ab, ba = compare(a, b, resamples=20)[1], compare(b, a, resamples=20)[1]
    for one, other in ((ab.average, ba.average), (ab.tail, ba.tail), (ab.worst, ba.worst)):
        assert (one.value, one.low, one.high) == pytest.approx((-other.value, -other.high, -other.low))


def test_the_difference_is_first_minus_second_of_each_statistic():
    first, second = two_results()
    clean, pgd = compare(first, second, resamples=300)
    assert (clean.attack, pgd.attack, pgd.n) == ("clean", "pgd", 90)
    assert pgd.average.value == pytest.approx(first.ra_pgd - second.ra_pgd)
    assert pgd.tail.value == pytest.approx(first.ra_tail_30 - second.ra_tail_30)
    assert pgd.worst.value == pytest.approx(first.worst("pgd")[1] - second.worst("pgd")[1])
    for interval in (pgd.average, pgd.tail, pgd.worst):
        assert 0 < interval.low <= interval.value <= interval.high < 0.7
    assert pgd.test.first_only > pgd.test.second_only and pgd.test.p < 0.01
    for same in (clean, *compare(first, first, resamples=20)):
        assert same.average == same.tail == same.worst == (0, 0, 0) and same.test == (0, 0, 1.0)


def test_only_samples_and_attacks_that_both_have_are_compared():
    y = np.arange(60) % 3
    first, second = (result({"pgd": y >= 0, "autoattack": y >= 0}, y) for _ in range(2))
    first.predictions["autoattack"][:20] = -1
    second.predictions["autoattack"][40:] = -1
    second.predictions["autoattack"][25] = (y[25] + 1) % 3
    second = replace(second, predictions={**second.predictions, "margin": y})
    *_, compared = differences = compare(first, second, resamples=20)
    assert [one.attack for one in differences] == ["clean", "pgd", "autoattack"]
    assert compared.n == 20 and compared.test == (1, 0, 1.0) and compared.average.value == pytest.approx(1 / 20)


def test_a_result_from_a_file_can_be_compared(tmp_path):
    first = replace(two_results()[0], classes=("sign", "sign", "stop"))
    first.save(tmp_path)
    assert compare(first, EvalResult.load(tmp_path), resamples=1)[0].average.value == 0


def test_a_network_that_predicts_a_further_class_can_be_compared():
    first, second = two_results(data_sha256="1")
    predictions = second.predictions["pgd"].copy()
    predictions[np.flatnonzero(predictions != second.y)[0]] = 3
    second = replace(second, classes=("a", "b", "c", "3"), predictions={**second.predictions, "pgd": predictions})
    assert compare(first, second, resamples=1)[1].n == 90


def test_refusals():
    protocol = {"data_sha256": "1", "attack": {"steps": 20, "threat": {"radius": 1}}, "attacks": {"fgsm": 1}}
    first, second = (
        replace(
            one,
            predictions={**one.predictions, "fgsm": one.y, "autoattack": one.y},
            protocol=protocol,
            autoattack={"epsilon": 1, "label": "RA-AA"},
        )
        for one in two_results()
    )
    compare(first, second, resamples=1)
    for changes, message in (
        ({"y": np.arange(90)[::-1] % 3}, "different samples"),
        ({"classes": ("a", "b", "x")}, "different samples"),
        ({"protocol": {"data_sha256": "2"}}, "data_sha256, 1 and 2"),
        ({"protocol": {"attack": {"steps": 20, "threat": {"radius": 2}}}}, "pgd, threat: radius: 1 and 2"),
        ({"protocol": {"attacks": {"fgsm": 2}}}, "fgsm, 1 and 2"),
        ({"autoattack": {"epsilon": 2, "label": "RA-AA"}}, "autoattack, epsilon: 1 and 2"),
        ({"autoattack": {"epsilon": 1, "label": "RA-APGD"}}, "autoattack, label: RA-AA and RA-APGD"),
        ({"predictions": {**second.predictions, "pgd": np.full(90, -1)}}, "share no sample under pgd"),
    ):
        with pytest.raises(UsageError, match=message):
            compare(first, replace(second, **changes), resamples=1)
