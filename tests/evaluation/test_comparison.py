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


def result(right, y, classes=3, protocol=None, **more):
    """`right`: by attack."""
    answers = {name: np.where(given, y, (y + 1) % classes) for name, given in {"clean": y >= 0, **right}.items()}
    return EvalResult(y, tuple("abcdefgh"[:classes]), answers, protocol or {}, **more)


def two(seed=0, n=90, **protocol):
    generator = np.random.default_rng(seed)
    y = np.arange(n) % 3
    return tuple(result({"pgd": generator.random(n) < share}, y, protocol=protocol) for share in (0.8, 0.5))


@given(PAIRS)
def test_mcnemar_is_the_binomial_sum(pairs):
    first, second = np.array(pairs).T
    found = mcnemar(first, second)
    ours, theirs = sum(a > b for a, b in pairs), sum(b > a for a, b in pairs)
    n = ours + theirs
    expected = 2 * sum(comb(n, k) for k in range(min(ours, theirs) + 1)) / 2**n
    assert (found.first_only, found.second_only) == (ours, theirs)
    assert found.p == pytest.approx(min(1.0, expected), rel=1e-9)
    assert mcnemar(second, first) == (theirs, ours, pytest.approx(found.p))


@given(st.integers(0, 10**6), st.integers(1, 30))
@settings(max_examples=15)
def test_the_other_way_round_is_the_other_sign(seed, n):
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 3, n)
    a, b = (result({"pgd": generator.random(n) < 0.6}, y) for _ in range(2))
    there, back = compare(a, b, resamples=20)[1], compare(b, a, resamples=20)[1]
    for one, other in ((there.average, back.average), (there.tail, back.tail), (there.worst, back.worst)):
        assert (one.value, one.low, one.high) == pytest.approx((-other.value, -other.high, -other.low))


def test_a_model_does_not_differ_from_itself():
    first, _ = two()
    for found in compare(first, first, resamples=20):
        assert found.average == found.tail == found.worst == (0, 0, 0) and found.test == (0, 0, 1.0)


def test_the_difference_is_first_minus_second_of_each_statistic():
    first, second = two()
    clean, pgd = compare(first, second, resamples=300)
    assert (clean.attack, pgd.attack, pgd.n) == ("clean", "pgd", 90)
    assert pgd.average.value == pytest.approx(first.ra_pgd - second.ra_pgd)
    assert pgd.tail.value == pytest.approx(first.ra_tail_30 - second.ra_tail_30)
    assert pgd.worst.value == pytest.approx(first.worst("pgd")[1] - second.worst("pgd")[1])
    for found in (pgd.average, pgd.tail, pgd.worst):
        assert 0 < found.low <= found.value <= found.high < 0.7
    assert pgd.test.first_only > pgd.test.second_only and pgd.test.p < 0.01
    assert clean.average == (0, 0, 0)


def test_the_same_images_are_resampled_for_both():
    y = np.zeros(200, dtype=int)
    right = np.random.default_rng(0).random(200) < 0.5
    less = right.copy()
    less[right.nonzero()[0][:4]] = False
    found = compare(result({"pgd": right}, y), result({"pgd": less}, y), resamples=300)[1]
    assert found.average.value == pytest.approx(0.02)
    assert found.average.low >= 0 and found.average.high < 0.05  # two samples of their own would be within 0.1


def test_only_samples_that_both_were_attacked_on_count():
    y = np.arange(60) % 3
    first, second = (result({"pgd": y >= 0, "autoattack": y >= 0}, y) for _ in range(2))
    first.answers["autoattack"][:20] = -1
    second.answers["autoattack"][40:] = -1
    second.answers["autoattack"][25] = (y[25] + 1) % 3
    found = compare(first, second, resamples=20)[2]
    assert (found.attack, found.n) == ("autoattack", 20) and found.test == (1, 0, 1.0)
    assert found.average.value == pytest.approx(1 / 20)


def test_only_attacks_that_both_have_are_compared():
    first, second = two()
    more = replace(second, answers={**second.answers, "margin": second.answers["pgd"]})
    assert [found.attack for found in compare(first, more, resamples=5)] == ["clean", "pgd"]


def aside(**about):
    return lambda found: replace(found, **about)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (aside(y=np.arange(90)[::-1] % 3), "different samples"),
        (aside(classes=("a", "b", "x")), "different samples"),
        (aside(protocol={"data_sha256": "2"}), "data_sha256, 1 and 2"),
        (aside(protocol={"attack": {"steps": 20, "threat": {"radius": 2}}}), "pgd, threat: radius: 1 and 2"),
        (aside(protocol={"attacks": {"fgsm": 2}}), "fgsm, 1 and 2"),
        (aside(autoattack={"epsilon": 2, "label": "RA-AA"}), "autoattack, epsilon: 1 and 2"),
        (aside(autoattack={"epsilon": 1, "label": "RA-APGD"}), "autoattack, label: RA-AA and RA-APGD"),
    ],
)
def test_what_was_not_measured_alike_is_not_compared(change, said):
    first, second = (
        replace(found, answers={**found.answers, "fgsm": found.y, "autoattack": found.y}) for found in two()
    )
    protocol = {"data_sha256": "1", "attack": {"steps": 20, "threat": {"radius": 1}}, "attacks": {"fgsm": 1}}
    about = {"epsilon": 1, "label": "RA-AA"}
    first = replace(first, protocol=protocol, autoattack=about)
    compare(first, replace(second, protocol=protocol, autoattack=about), resamples=1)
    with pytest.raises(UsageError, match=said):
        compare(first, change(replace(second, protocol=protocol, autoattack=about)))


def test_no_shared_sample_is_one_sentence():
    first, second = two()
    elsewhere = replace(second, answers={**second.answers, "pgd": np.full(90, -1)})
    with pytest.raises(UsageError, match="share no sample under pgd"):
        compare(first, elsewhere, resamples=1)


def test_an_evaluation_that_was_saved_is_compared_with_one_that_was_not(tmp_path):
    first, _ = two()
    first = replace(first, classes=("sign", "sign", "stop"))
    first.save(tmp_path)
    assert compare(first, EvalResult.load(tmp_path), resamples=1)[0].average.value == 0


def test_a_network_that_answers_with_a_class_of_its_own_is_compared_too():
    first, second = two(data_sha256="1")
    odd = second.answers["pgd"].copy()
    odd[np.flatnonzero(odd != second.y)[0]] = 3
    second = replace(second, classes=("a", "b", "c", "3"), answers={**second.answers, "pgd": odd})
    assert compare(first, second, resamples=1)[1].n == 90
