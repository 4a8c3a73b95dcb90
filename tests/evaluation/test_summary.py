import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score, confusion_matrix

from doubly.errors import UsageError
from doubly.evaluation.result import EvalResult, distinct
from doubly.rundir import read_json, write_json

PROTOCOL = {"attack": "PGD", "steps": 20}


def summarize(y, names, clean, pgd, protocol, margin=None):
    answers = {"clean": clean, "pgd": pgd} | ({} if margin is None else {"margin": margin})
    return EvalResult(y, tuple(names), answers, protocol).summary()


def test_the_fields_against_scikit_learn(tmp_path):
    generator = np.random.default_rng(0)
    y, clean, pgd = generator.integers(0, 10, (3, 300))
    names = [f"class {index}" for index in range(10)]
    summary = summarize(y, names, clean, pgd, PROTOCOL)
    recall = np.array([np.mean(pgd[y == c] == c) for c in range(10)])
    order = np.argsort(recall, kind="stable")
    assert summary["n"] == 300 and summary["protocol"] == PROTOCOL
    assert summary["sa"] == accuracy_score(y, clean) and summary["ra_pgd"] == accuracy_score(y, pgd)
    assert summary["ra_tail_30"] == pytest.approx(recall[order[:3]].mean())
    assert summary["ra_tail_30_classes"] == [names[index] for index in order[:3]]
    assert summary["worst_class"] == {"name": names[order[0]], "ra_pgd": pytest.approx(recall[order[0]])}
    assert summary["confusion"]["pgd"] == confusion_matrix(y, pgd).tolist()
    assert summary["confusion"]["clean"] == confusion_matrix(y, clean).tolist()
    assert [entry["n"] for entry in summary["per_class"].values()] == np.bincount(y).tolist()
    write_json(tmp_path / "evaluation.json", summary)
    assert read_json(tmp_path / "evaluation.json") == summary


def test_a_class_without_samples_is_null():
    summary = summarize(np.array([0, 0]), ["a", "b"], np.array([0, 1]), np.array([1, 1]), PROTOCOL)
    empty = {"n": 0, "sa": None, "sa_interval": None, "ra_pgd": None, "ra_pgd_interval": None}
    assert summary["per_class"]["b"] == empty
    assert summary["worst_class"]["name"] == "a"


@pytest.mark.parametrize("names", [["a", "a"], ["a", "a", "a (1)"], ["", "", ""], ["x", "y"]])
def test_names_become_distinct(names):
    made = distinct(names)
    assert len(set(made)) == len(names)
    assert all(new.startswith(old) for new, old in zip(made, names, strict=True))


def test_shared_names_keep_both_classes():
    y = np.array([0, 1])
    assert list(summarize(y, ["sign", "sign"], y, y, PROTOCOL)["per_class"]) == ["sign (0)", "sign (1)"]


def test_no_images_is_said():
    empty = np.array([], dtype=int)
    with pytest.raises(UsageError):
        summarize(empty, ["a"], empty, empty, PROTOCOL)


def test_an_attack_on_the_margin_has_its_own_average_and_tail():
    y = np.repeat(np.arange(4), 5)
    right = np.concatenate([np.arange(5) < count for count in (5, 4, 1, 3)])
    other = np.where(right, y, (y + 1) % 4)
    found = summarize(y, tuple("abcd"), y, y, {}, other)
    assert found["ra_margin"] == pytest.approx(13 / 20) and found["ra_margin_tail_30"] == pytest.approx(1 / 5)
    assert found["ra_pgd"] == 1 and "ra_margin" not in summarize(y, tuple("abcd"), y, y, {})


def with_answers(y, right, classes, **more):
    y = np.asarray(y)
    given = np.where(right, y, (y + 1) % max(2, classes))
    return EvalResult(y, tuple(map(str, range(max(2, classes)))), {"clean": y, "pgd": given}, **more)


def cross_fitted(result):
    return result.summary()["tail"]["pgd"]["cross_fitted"]


@pytest.fixture
def few_resamples(monkeypatch):
    from doubly.evaluation import result
    from doubly.evaluation.intervals import bootstrap

    monkeypatch.setattr(result, "bootstrap", lambda correct, y, statistic, n: bootstrap(correct, y, statistic, 20))


def test_cross_fitting_scores_on_the_images_that_it_did_not_pick_on():
    """Class 0 is weak on the first of every two images, class 1 on the second."""
    y = np.repeat([0, 1], 4)
    right = np.array([False, True, False, True, True, False, True, False])
    result = with_answers(y, right, 2)
    assert result.ra_tail_30 == 0.5 and cross_fitted(result) == 1.0


def test_cross_fitting_of_images_in_pairs_is_the_tail_itself(few_resamples):
    generator = np.random.default_rng(0)
    y, right = (
        np.repeat(np.arange(10), 20),
        np.repeat(generator.random(100) < np.repeat(np.linspace(0.1, 1, 10), 10), 2),
    )
    result = with_answers(y, right, 10)
    assert cross_fitted(result) == pytest.approx(result.ra_tail_30)


def test_cross_fitting_takes_out_the_luck_of_the_choice(few_resamples):
    """Ten classes that are equally hard: the lowest three of a sample look weaker than they are."""
    y, plain, fair = np.repeat(np.arange(10), 40), [], []
    for seed in range(30):
        result = with_answers(y, np.random.default_rng(seed).random(400) < 0.6, 10)
        plain.append(result.ra_tail_30)
        fair.append(cross_fitted(result))
    assert np.mean(plain) < 0.55 and np.mean(fair) == pytest.approx(0.6, abs=0.015)


@pytest.mark.parametrize("y", [[0], [0, 1], [0, 1, 1, 1]])
def test_what_cannot_be_cut_in_two_has_no_cross_fitted_tail(y):
    assert cross_fitted(with_answers(y, np.zeros(len(y), dtype=bool), 2)) is None


@pytest.mark.parametrize(("share", "field"), [(0.3, True), (0.5, False)])
def test_a_tail_of_another_share_does_not_go_by_the_name_of_30(share, field):
    y = np.repeat(np.arange(4), 5)
    found = with_answers(y, np.arange(20) % 5 < y, 4, tail_share=share).summary()
    assert ("ra_tail_30" in found) == field and ("ra_tail_30" in found["intervals"]) == field
    assert found["tail"]["share"] == share and found["tail"]["pgd"]["classes"] == ["0", "1"][: 1 if field else 2]


def test_classes_picked_on_validation_are_scored_on_test():
    y = np.repeat(np.arange(4), 5)
    validation = with_answers(y, np.arange(20) % 5 < 3 - y + 1, 4)  # class 3 is the weakest there, and 0 here
    found = with_answers(y, np.arange(20) % 5 < y + 1, 4, validation=validation, tail_share=0.5).summary()["tail"][
        "pgd"
    ]
    assert (found["value"], found["classes"]) == (pytest.approx(0.3), ["0", "1"])
    assert found["validated"] == {"value": pytest.approx(0.7), "classes": ["3", "2"], "n_validation": 20}


def test_a_class_that_nobody_tested_is_not_picked():
    validation = with_answers([0, 1, 1], [True, False, False], 2)
    found = with_answers([0, 0], [True, False], 2, validation=validation).summary()["tail"]["pgd"]
    assert found["validated"] == {"value": 0.5, "classes": ["0"], "n_validation": 3}


def test_intervals_of_the_summary_are_wilson_s_and_hold_their_numbers():
    y = np.repeat(np.arange(4), 25)
    result = with_answers(y, np.arange(100) % 25 < 6 * y + 3, 4)
    found = result.summary()
    expected = binomtest(int(result.correct["pgd"].sum()), 100).proportion_ci(method="wilson")
    assert found["intervals"]["ra_pgd"] == pytest.approx([expected.low, expected.high]) and found["schema"] == 2
    for label, row in enumerate(found["per_class"].values()):
        one = binomtest(6 * label + 3, 25).proportion_ci(method="wilson")
        assert row["ra_pgd_interval"] == pytest.approx([one.low, one.high]) and row["ra_pgd"] == (6 * label + 3) / 25
    for name, value in (("ra_tail_30", found["ra_tail_30"]), ("worst_ra_pgd", found["worst_class"]["ra_pgd"])):
        low, high = found["intervals"][name]
        assert low <= value <= high and high > low
