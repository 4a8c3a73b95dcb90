import numpy as np
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix

from doubly.errors import UsageError
from doubly.evaluation.result import EvalResult, distinct
from doubly.rundir import read_json, write_json

PROTOCOL = {"attack": "PGD", "steps": 20}


def summarise(y, names, clean, pgd, protocol, margin=None):
    answers = {"clean": clean, "pgd": pgd} | ({} if margin is None else {"margin": margin})
    return EvalResult(y, tuple(names), answers, protocol).summary()


def test_the_fields_against_scikit_learn(tmp_path):
    generator = np.random.default_rng(0)
    y, clean, pgd = generator.integers(0, 10, (3, 300))
    names = [f"class {index}" for index in range(10)]
    summary = summarise(y, names, clean, pgd, PROTOCOL)
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
    summary = summarise(np.array([0, 0]), ["a", "b"], np.array([0, 1]), np.array([1, 1]), PROTOCOL)
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
    assert list(summarise(y, ["sign", "sign"], y, y, PROTOCOL)["per_class"]) == ["sign (0)", "sign (1)"]


def test_no_images_is_said():
    empty = np.array([], dtype=int)
    with pytest.raises(UsageError):
        summarise(empty, ["a"], empty, empty, PROTOCOL)


def test_an_attack_on_the_margin_has_its_own_average_and_tail():
    y = np.repeat(np.arange(4), 5)
    right = np.concatenate([np.arange(5) < count for count in (5, 4, 1, 3)])
    other = np.where(right, y, (y + 1) % 4)
    found = summarise(y, tuple("abcd"), y, y, {}, other)
    assert found["ra_margin"] == pytest.approx(13 / 20) and found["ra_margin_tail_30"] == pytest.approx(1 / 5)
    assert found["ra_pgd"] == 1 and "ra_margin" not in summarise(y, tuple("abcd"), y, y, {})
