"""The numbers of a result, against scikit-learn and by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, recall_score

from doubly.attacks.autoattack import STANDARD
from doubly.errors import UsageError
from doubly.evaluation.intervals import wilson
from doubly.evaluation.result import EvalResult

COMPLETE = {"label": "RA-AA", "complete": True, "warnings": [], "epsilon": 0.1, "norm": "Linf"}


def random_result(n=120, classes=5, seed=0, **fields):
    generator = np.random.default_rng(seed)
    y, clean, pgd = generator.integers(0, classes, (3, n))
    pgd = np.where(generator.random(n) < 0.5, y, pgd)
    names = tuple(f"class {index}" for index in range(classes))
    return EvalResult(y, names, {"clean": clean, "pgd": pgd}, **fields)


def with_autoattack(info=COMPLETE, parts=STANDARD):
    """A result with AutoAttack on every third sample."""
    base = random_result()
    predictions = np.where(np.arange(base.n) % 3 == 0, base.predictions["pgd"], -1)
    robust = dict.fromkeys(parts, predictions == base.y)
    return EvalResult(
        base.y, base.classes, {**base.predictions, "autoattack": predictions}, robust_after=robust, autoattack=info
    )


def test_every_number_derives_from_the_predictions():
    result = random_result()
    assert result.n == 120 and result.attacks == ["pgd"]
    assert result.sa == accuracy_score(result.y, result.predictions["clean"])
    assert result.ra_pgd == accuracy_score(result.y, result.predictions["pgd"])
    recall = recall_score(result.y, result.predictions["pgd"], average=None)
    np.testing.assert_allclose(result.per_class("pgd"), recall, rtol=1e-12)
    assert result.ra_tail_30 == pytest.approx(np.sort(recall)[:2].mean())
    assert result.worst("pgd") == (result.classes[recall.argmin()], pytest.approx(recall.min()))


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 40))
@settings(max_examples=60)
def test_the_tail_is_the_mean_of_the_weakest_classes_and_names_them(seed, classes, n):
    result = random_result(n, classes, seed)
    value, names = result.tail("pgd")
    by_name = dict(zip(result.classes, result.per_class("pgd"), strict=True))
    accuracies = sorted(accuracy for accuracy in by_name.values() if not np.isnan(accuracy))
    size = max(1, int(0.3 * len(accuracies) + 0.5 + 1e-9))
    assert value == pytest.approx(np.mean(accuracies[:size]))
    assert [by_name[name] for name in names] == accuracies[:size] and len(set(names)) == size


def test_an_attack_counts_on_the_samples_that_it_was_run_on():
    result = with_autoattack()
    run = np.arange(120) % 3 == 0
    correct, y = result.attacked_samples("autoattack")
    np.testing.assert_array_equal(y, result.y[run])
    np.testing.assert_array_equal(correct, result.predictions["pgd"][run] == y)
    assert result.ra_aa == correct.mean() and np.sum(result.confusion("autoattack")) == 40
    assert not result.correct["autoattack"][~run].any()
    assert result.interval("autoattack")[1:] == wilson(int(correct.sum()), 40)
    robust = result.correct["clean"] & result.correct["pgd"] & result.correct["autoattack"]
    assert result.worst_case() == (robust[run].mean(), 40)


def test_only_the_whole_of_autoattack_is_ra_aa():
    for label in ("RA-APGD", "RA-AA, incomplete", "RA-(square; 100 iterations, 5000 queries)"):
        assert not with_autoattack({**COMPLETE, "label": label}).autoattack_complete
    incomplete = with_autoattack({**COMPLETE, "complete": False})
    for result in (incomplete, with_autoattack(parts=()), with_autoattack(parts=STANDARD[:3])):
        assert "ra_aa" not in result.summary() and result.summary()["autoattack"]["n"] == 40
        with pytest.raises(UsageError, match="no RA-AA"):
            _ = result.ra_aa


def test_refusals():
    y = np.array([0, 1])

    def result(**predictions):
        return EvalResult(y, ("a", "b"), predictions)

    for call, message in (
        (lambda: result(pgd=y), "needs the predictions of the clean images"),
        (lambda: result(clean=y, pgd=y[:1]), "1 predictions under pgd for 2 labels"),
        (lambda: result(clean=y).ra_pgd, "no 'pgd': it has clean"),
        (lambda: result(clean=y, pgd=y).per_class("x"), "it has clean, pgd"),
        (lambda: result(clean=y, pgd=y).confusion("margin"), "it has clean, pgd"),
        (lambda: result(clean=y, pgd=0 * y - 1).ra_pgd, "run on no sample"),
        (lambda: result(clean=y, pgd=y).ra_aa, "no RA-AA"),
        (lambda: result(clean=y, pgd=y).weights(), "no losses under 'pgd'"),
        (lambda: random_result(tail_share=0.8).ra_tail_30, "here it is 80%: use tail"),
        (lambda: EvalResult(y[:0], ("a",), {"clean": y[:0], "pgd": y[:0]}).summary(), "on no sample"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_what_a_person_sees_is_short_and_names_every_tied_class():
    y = np.repeat(np.arange(4), 5)
    pgd = np.where(y == 3, 3, 0)  # all of class 0 and 3 are right, none of 1 and 2
    result = EvalResult(y, ("cat", "<dog>", "ship", "car"), {"clean": y, "pgd": pgd})
    value, classes = result.tail("pgd")
    name, worst = result.worst("pgd")
    assert (value, classes, name, worst) == (0.0, ["<dog>"], "<dog>", 0.0)
    assert result.tail().tied == ["ship"] == result.worst().tied and str(result.worst()) == "<dog>, ship"
    assert result.summary()["tail"]["pgd"]["tied"] == result.summary()["worst_class"]["tied"] == ["ship"]
    assert result.clean_accuracy == 1 and result.robust_accuracy("pgd") == 0.5
    assert repr(result) == (
        "EvalResult(n=20, 4 classes: clean 100.0 %, pgd 50.0 %, tail of pgd 0.0 %: <dog> (equally weak: ship))"
    )
    assert "<td>&lt;dog&gt;</td><td>5</td><td>100.0</td><td>0.0</td>" in result._repr_html_()
    table = result.table()
    rows = table if isinstance(table, list) else table.reset_index().to_dict("records")
    assert rows[1] == {"class": "<dog>", "n": 5, "clean": 1.0, "pgd": 0.0} and rows[-1]["pgd"] == 0.5
    bars = [bar.get_height() for bar in result.plot().axes[0].patches]
    assert bars == [100.0] * 4 + [100.0, 0.0, 0.0, 100.0]
    for call in (lambda: result.robust_accuracy("clean"), lambda: result.robust_accuracy("aa")):
        with pytest.raises(UsageError, match=r"clean is no attack|has no 'aa'"):
            call()
