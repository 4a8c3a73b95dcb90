import json
import re
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, recall_score

from doubly.attacks.autoattack import STANDARD
from doubly.errors import UsageError
from doubly.evaluation.intervals import wilson
from doubly.evaluation.result import EvalResult
from doubly.rundir import read_json, write_json

WHOLE = {"label": "RA-AA", "complete": True, "warnings": [], "epsilon": 0.1, "norm": "Linf"}


def drawn(n=120, classes=5, seed=0, names=None, **more):
    generator = np.random.default_rng(seed)
    y, clean, pgd = generator.integers(0, classes, (3, n))
    pgd = np.where(generator.random(n) < 0.5, y, pgd)
    names = names or [f"class {index}" for index in range(classes)]
    return EvalResult(y, tuple(names), {"clean": clean, "pgd": pgd}, **more)


def with_autoattack(about=WHOLE, after=True):
    """AutoAttack on every third sample."""
    base = drawn()
    given = np.where(np.arange(base.n) % 3 == 0, base.answers["pgd"], -1)
    standing = dict.fromkeys(STANDARD, given == base.y) if after else {}
    answers = {**base.answers, "autoattack": given}
    return EvalResult(base.y, base.classes, answers, after=standing, autoattack=about)


def test_every_number_derives_from_the_answers():
    found = drawn()
    assert found.n == 120 and found.attacks == ["pgd"]
    assert found.sa == accuracy_score(found.y, found.answers["clean"])
    assert found.ra_pgd == accuracy_score(found.y, found.answers["pgd"])
    recall = recall_score(found.y, found.answers["pgd"], average=None)
    np.testing.assert_allclose(found.per_class("pgd"), recall, rtol=1e-12)
    assert found.ra_tail_30 == pytest.approx(np.sort(recall)[:2].mean())
    assert found.worst("pgd") == (found.classes[recall.argmin()], pytest.approx(recall.min()))


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 40))
@settings(max_examples=60)
def test_the_tail_is_the_mean_of_the_lowest_classes_and_names_them(seed, classes, n):
    found = drawn(n, classes, seed)
    value, names = found.tail("pgd")
    by_name = dict(zip(found.classes, found.per_class("pgd"), strict=True))
    known = sorted(accuracy for accuracy in by_name.values() if not np.isnan(accuracy))
    k = max(1, int(0.3 * len(known) + 0.5 + 1e-9))
    assert value == pytest.approx(np.mean(known[:k]))
    assert [by_name[name] for name in names] == known[:k] and len(set(names)) == k


def test_an_attack_is_measured_where_it_was_run():
    found = with_autoattack()
    run = np.arange(120) % 3 == 0
    correct, y = found.measured("autoattack")
    np.testing.assert_array_equal(y, found.y[run])
    np.testing.assert_array_equal(correct, found.answers["pgd"][run] == y)
    assert found.ra_aa == correct.mean() and np.sum(found.confusion("autoattack")) == 40
    assert not found.correct["autoattack"][~run].any()
    assert found.interval("autoattack")[1:] == wilson(int(correct.sum()), 40)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda y: EvalResult(y, ("a", "b"), {"pgd": y}), "answers to the clean images"),
        (lambda y: EvalResult(y, ("a", "b"), {"clean": y, "pgd": y[:1]}), "1 answers under pgd for 2 labels"),
        (lambda y: EvalResult(y, ("a", "b"), {"clean": y}).ra_pgd, "no 'pgd': it has clean"),
        (lambda y: EvalResult(y, ("a", "b"), {"clean": y, "pgd": y - 9}).per_class("x"), "it has clean, pgd"),
        (lambda y: EvalResult(y, ("a", "b"), {"clean": y, "pgd": 0 * y - 1}).ra_pgd, "run on no sample"),
        (lambda y: EvalResult(y, ("a", "b"), {"clean": y, "pgd": y}).ra_aa, "no RA-AA"),
        (lambda y: EvalResult(y, ("a", "b"), {"clean": y, "pgd": y}).weights(), "kept no losses under 'pgd'"),
    ],
)
def test_what_an_evaluation_does_not_hold_is_one_sentence(wrong, said):
    with pytest.raises(UsageError, match=said):
        wrong(np.array([0, 1]))


@pytest.mark.parametrize("label", ["RA-APGD", "RA-AA, incomplete", "RA-(square; 100 iterations, 5000 queries)"])
def test_less_than_autoattack_is_no_ra_aa(label):
    found = with_autoattack({**WHOLE, "label": label})
    assert "ra_aa" not in found.summary()
    with pytest.raises(UsageError, match="no RA-AA"):
        found.ra_aa  # noqa: B018


@pytest.mark.parametrize(("about", "after"), [({**WHOLE, "complete": False}, True), (WHOLE, False)])
def test_an_ensemble_that_did_not_end_is_no_ra_aa_whatever_its_label(about, after):
    found = with_autoattack(about, after)
    assert "ra_aa" not in found.summary()
    with pytest.raises(UsageError, match="no RA-AA"):
        found.ra_aa  # noqa: B018


def test_autoattack_has_its_tail_worst_class_and_count():
    found = with_autoattack()
    summary = found.summary()
    value, names = found.tail("autoattack")
    assert summary["ra_aa"] == found.ra_aa and summary["autoattack"]["n"] == 40
    assert (summary["ra_aa_tail_30"], summary["ra_aa_tail_30_classes"]) == (value, names)
    assert summary["worst_class_ra_aa"] == dict(zip(("name", "ra_aa"), found.worst("autoattack"), strict=True))
    assert summary["autoattack"]["accuracy_after"] == dict.fromkeys(STANDARD, found.ra_aa)
    rows = summary["per_class"].values()
    assert sum(row["n_ra_aa"] for row in rows) == 40 and sum(row["n"] for row in rows) == 120


@pytest.mark.parametrize("of", ["tail", "worst"])
@pytest.mark.parametrize("right", [False, True])
def test_classes_that_do_not_vary_get_wilson_s_interval(of, right):
    y = np.repeat(np.arange(4), 25)
    found = EvalResult(y, tuple("abcd"), {"clean": y, "pgd": y if right else (y + 1) % 4})
    assert found.interval("pgd", of) == (float(right), *wilson(25 * right, 25))


def test_the_interval_of_a_tail_holds_its_value_where_the_classes_differ():
    y = np.repeat(np.arange(10), 40)
    right = np.tile(np.arange(40), 10) < 4 * y + 2
    found = EvalResult(y, tuple("abcdefghij"), {"clean": y, "pgd": np.where(right, y, (y + 1) % 10)})
    for of in ("tail", "worst"):
        value, low, high = found.interval("pgd", of, 300)
        assert low <= value <= high and 0.01 < high - low < 0.3
    assert found.interval("pgd", "worst", 300).value == 0.05 != found.interval("pgd", "tail", 300).value


@pytest.mark.parametrize("of", ["tail", "worst"])
def test_the_interval_of_equal_classes_holds_its_value(of):
    y = np.repeat(np.arange(20), 10)
    right = np.tile(np.arange(10), 20) < 7
    found = EvalResult(y, tuple(map(str, range(20))), {"clean": y, "pgd": np.where(right, y, (y + 1) % 20)})
    value, low, high = found.interval("pgd", of, 300)
    assert low <= value <= high


@pytest.mark.parametrize("of", ["tail", "worst"])
def test_the_interval_of_equally_hard_classes_covers_the_truth(of):
    y, covered = np.repeat(np.arange(10), 100), 0
    for trial in range(30):
        right = np.random.default_rng(trial).random(1000) < 0.5
        found = EvalResult(y, tuple("abcdefghij"), {"clean": y, "pgd": np.where(right, y, (y + 1) % 10)})
        _, low, high = found.interval("pgd", of, 100)
        covered += low <= 0.5 <= high
    assert covered >= 20  # and not all: the bootstrap takes out most of the bias of picking, not all of it


def test_an_interval_of_something_unknown_is_one_sentence():
    with pytest.raises(UsageError, match="median"):
        drawn().interval("pgd", "median", 5)


def test_the_confusion_under_an_unknown_attack_is_one_sentence():
    with pytest.raises(UsageError, match="it has clean, pgd"):
        drawn().confusion("margin")


def test_ra_tail_30_is_the_tail_of_thirty_percent():
    most, thirds = drawn(tail_share=0.8), drawn()
    assert most.tail("pgd")[0] != thirds.tail("pgd")[0]
    with suppress(UsageError):
        assert most.ra_tail_30 == thirds.ra_tail_30


def test_what_is_saved_comes_back(tmp_path):
    losses = np.random.default_rng(1).random(120)
    base = with_autoattack()
    found = EvalResult(
        base.y,
        base.classes,
        base.answers,
        {"seed": 3, "attack": {"steps": 20}},
        np.arange(120) * 7,
        {"pgd": losses},
        base.after,
        base.autoattack,
        None,
        {"n": 120, "asked": 120, "outside": 0, "changed": 0, "largest": 1.0},
        {"verdict": "fine", "lines": []},
        0.5,
        "floor",
        margins={"clean": losses - 0.5, "pgd": np.full(120, np.inf)},
    )
    found.save(tmp_path / "new" / "folder", epoch=4)
    again = EvalResult.load(tmp_path / "new" / "folder")
    assert again.summary() == json.loads(json.dumps(found.summary(), allow_nan=False))
    assert read_json(tmp_path / "new" / "folder" / "evaluation.json") == {"epoch": 4, **again.summary()}
    assert (again.tail_share, again.tail_rounding, again.classes) == (0.5, "floor", base.classes)
    for kept in ("answers", "losses", "after", "margins"):
        ours, theirs = getattr(found, kept), getattr(again, kept)
        assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    np.testing.assert_array_equal(again.ids, found.ids)
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == [
        "evaluation.json",
        "evaluation.npz",
    ]


def test_an_evaluation_from_before_there_were_margins_has_none(tmp_path):
    drawn().save(tmp_path)
    assert EvalResult.load(tmp_path).margins == {}


@pytest.mark.parametrize("names", [["s"] * 5, ["", "\n", "<b>", "ß \U0001f600", '"'], ["n", "sa", "a", "a", "a (2)"]])
def test_hostile_names_come_back_distinct(tmp_path, names):
    found = drawn(names=names)
    found.save(tmp_path)
    again = EvalResult.load(tmp_path)
    assert list(again.classes) == found.names and again.names == found.names
    assert again.summary() == found.summary()


def test_a_name_that_is_no_utf_8_can_be_saved(tmp_path):
    drawn(names=["\udcff", *"bcde"]).save(tmp_path)
    assert len(EvalResult.load(tmp_path).classes) == 5


@pytest.mark.parametrize("about", [{}, {"schema": 99}, {"schema": None}, [1], "text"])
def test_another_version_says_what_to_do(tmp_path, about):
    write_json(tmp_path / "evaluation.json", about)
    with pytest.raises(UsageError, match="of another version: run `doubly evaluate` again"):
        EvalResult.load(tmp_path)


def spoilt(folder, how):
    drawn().save(folder)
    file = folder / "evaluation.npz"
    if how == "gone":
        file.unlink()
    elif how == "no evaluation":
        (folder / "evaluation.json").unlink()
    elif how == "without clean":
        np.savez(file, y=np.array([0]), ids=np.array([0]))
    elif how == "without classes":
        about = read_json(folder / "evaluation.json")
        write_json(folder / "evaluation.json", {"schema": about["schema"]})
    else:
        file.write_bytes({"text": b"not arrays", "empty": b"", "half": file.read_bytes()[:200]}[how])


@pytest.mark.parametrize("how", ["gone", "no evaluation", "text", "empty", "half", "without clean", "without classes"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_files_are_one_sentence(tmp_path, how):
    spoilt(tmp_path, how)
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        EvalResult.load(tmp_path)
