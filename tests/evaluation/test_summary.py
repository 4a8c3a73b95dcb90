"""The contents of evaluation.json, against scikit-learn and scipy and by hand."""

import json

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score, confusion_matrix

from doubly.attacks.autoattack import STANDARD
from doubly.evaluation import result as result_module
from doubly.evaluation.intervals import weakest_interval
from doubly.evaluation.result import EvalResult


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr(result_module, "weakest_interval", lambda *arguments: weakest_interval(*arguments[:4], 20))


def result(y, correct, classes=4, **fields):
    y = np.asarray(y)
    predictions = {"clean": y, "pgd": np.where(correct, y, (y + 1) % classes)}
    return EvalResult(y, tuple(map(str, range(classes))), predictions, **fields)


def test_the_fields_are_those_of_scikit_learn():
    generator = np.random.default_rng(0)
    y, clean, pgd = generator.integers(0, 10, (3, 300))
    names = [f"class {index}" for index in range(10)]
    summary = EvalResult(y, tuple(names), {"clean": clean, "pgd": pgd}, {"seed": 3}).summary()
    recall = np.array([np.mean(pgd[y == c] == c) for c in range(10)])
    order = np.argsort(recall, kind="stable")
    assert summary["schema"] == 2 and summary["n"] == 300 and summary["protocol"] == {"seed": 3}
    assert summary["sa"] == accuracy_score(y, clean) and summary["ra_pgd"] == accuracy_score(y, pgd)
    assert summary["ra_tail_30"] == pytest.approx(recall[order[:3]].mean())
    assert summary["ra_tail_30_classes"] == [names[index] for index in order[:3]]
    assert summary["worst_class"] == {"name": names[order[0]], "ra_pgd": pytest.approx(recall[order[0]])}
    assert summary["confusion"]["pgd"] == confusion_matrix(y, pgd).tolist()
    assert summary["confusion"]["clean"] == confusion_matrix(y, clean).tolist()
    assert [row["n"] for row in summary["per_class"].values()] == np.bincount(y).tolist()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_intervals_are_wilsons_and_contain_their_numbers():
    y = np.repeat(np.arange(4), 25)
    evaluated = result(y, np.arange(100) % 25 < 6 * y + 3)
    summary = evaluated.summary()
    expected = binomtest(int(evaluated.correct["pgd"].sum()), 100).proportion_ci(method="wilson")
    assert summary["intervals"]["ra_pgd"] == pytest.approx([expected.low, expected.high])
    for label, row in enumerate(summary["per_class"].values()):
        one = binomtest(6 * label + 3, 25).proportion_ci(method="wilson")
        assert row["ra_pgd_interval"] == pytest.approx([one.low, one.high]) and row["ra_pgd"] == (6 * label + 3) / 25
    for name, value in (("ra_tail_30", summary["ra_tail_30"]), ("worst_ra_pgd", summary["worst_class"]["ra_pgd"])):
        low, high = summary["intervals"][name]
        assert low <= value <= high and high > low


def test_every_attack_has_its_average_tail_and_worst_class():
    y = np.repeat(np.arange(4), 5)
    correct = np.concatenate([np.arange(5) < count for count in (5, 4, 1, 3)])
    base, other = result(y, True), np.where(correct, y, (y + 1) % 4)
    third = np.where(np.arange(20) % 5 < 2, other, -1)
    evaluated = EvalResult(
        y,
        base.classes,
        {**base.predictions, "margin": other, "fgsm": other, "autoattack": third},
        robust_after=dict.fromkeys(STANDARD, third == y),
        autoattack={"label": "RA-AA", "complete": True},
    )
    summary = evaluated.summary()
    for key in ("ra_margin", "ra_fgsm"):
        assert summary[key] == pytest.approx(13 / 20) and summary[f"{key}_tail_30"] == pytest.approx(1 / 5)
        assert summary[f"worst_class_{key}"] == {"name": "2", key: pytest.approx(1 / 5)}
    assert (summary["ra_aa"], summary["ra_aa_tail_30"]) == (evaluated.ra_aa, 0.5)
    assert summary["ra_aa_tail_30_classes"] == ["2"] and summary["worst_class_ra_aa"] == {"name": "2", "ra_aa": 0.5}
    assert summary["autoattack"]["accuracy_after"] == dict.fromkeys(STANDARD, evaluated.ra_aa)
    assert [row["n_ra_aa"] for row in summary["per_class"].values()] == [2] * 4


def test_a_class_without_samples_is_null():
    summary = result([0, 0], [True, False], 2).summary()
    empty = {"n": 0, "sa": None, "sa_interval": None, "ra_pgd": None, "ra_pgd_interval": None}
    assert summary["per_class"]["1"] == empty and summary["worst_class"]["name"] == "0"


def test_a_tail_of_another_share_is_not_called_30():
    y = np.repeat(np.arange(4), 5)
    for share, is_30 in ((0.3, True), (0.5, False)):
        summary = result(y, np.arange(20) % 5 < y, tail_share=share).summary()
        assert ("ra_tail_30" in summary) == ("ra_tail_30" in summary["intervals"]) == is_30
        assert summary["tail"]["share"] == share
        assert summary["tail"]["pgd"]["classes"] == ["0", "1"][: 1 if is_30 else 2]


def test_classes_selected_on_validation_are_scored_on_test():
    y = np.repeat(np.arange(4), 5)
    validation = result(y, np.arange(20) % 5 < 3 - y + 1)  # class 3 is the weakest there, and 0 here
    tail = result(y, np.arange(20) % 5 < y + 1, validation=validation, tail_share=0.5).summary()["tail"]["pgd"]
    assert (tail["value"], tail["classes"]) == (pytest.approx(0.3), ["0", "1"])
    assert tail["validated"] == {"value": pytest.approx(0.7), "classes": ["3", "2"], "n_validation": 20}
    # A class without test samples is not selected; the validation images may have fewer or more classes.
    validation = result([0, 1, 1], [True, False, False], 3)
    tail = result([0, 0], [True, False], 2, validation=validation).summary()["tail"]["pgd"]
    assert tail["validated"] == {"value": 0.5, "classes": ["0"], "n_validation": 3}


def cross_fitted(evaluated):
    return evaluated.summary()["tail"]["pgd"]["cross_fitted"]


def test_cross_fitting_scores_on_the_images_that_it_did_not_select_on():
    """Class 0 is weak on the first of every two images, class 1 on the second."""
    evaluated = result(np.repeat([0, 1], 4), [False, True, False, True, True, False, True, False], 2)
    assert evaluated.ra_tail_30 == 0.5 and cross_fitted(evaluated) == 1.0


def test_cross_fitting_of_images_in_pairs_is_the_tail_itself(few_resamples):
    correct = np.random.default_rng(0).random(100) < np.repeat(np.linspace(0.1, 1, 10), 10)
    evaluated = result(np.repeat(np.arange(10), 20), np.repeat(correct, 2), 10)
    assert cross_fitted(evaluated) == pytest.approx(evaluated.ra_tail_30)


def test_cross_fitting_removes_the_bias_of_selecting_the_weakest(few_resamples):
    """The three weakest of ten equally hard classes look weaker than they are."""
    y, plain, fair = np.repeat(np.arange(10), 40), [], []
    for seed in range(30):
        evaluated = result(y, np.random.default_rng(seed).random(400) < 0.6, 10)
        plain.append(evaluated.ra_tail_30)
        fair.append(cross_fitted(evaluated))
    assert np.mean(plain) < 0.55 and np.mean(fair) == pytest.approx(0.6, abs=0.015)


def test_what_cannot_be_divided_has_no_cross_fitted_tail():
    for y in ([0], [0, 1], [0, 1, 1, 1]):
        assert cross_fitted(result(y, np.zeros(len(y), dtype=bool), 2)) is None
