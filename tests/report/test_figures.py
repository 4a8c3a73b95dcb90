from xml.etree import ElementTree

import pytest

from doubly.report import figures
from doubly.report.collect import collect, compare


def words(path):
    """The text of a picture; parsing it also shows that it is well-formed."""
    return " ".join(ElementTree.parse(path).getroot().itertext())


@pytest.fixture
def methods(make_run):
    for name in ("at", "done_pgd"):
        for seed in (0, 1):
            path = make_run(f"digits.imbalanced.{name}", seed=seed, classes=["cat", "$dog_", "<b>"])
    return compare(collect([path.parent]))[0].methods


def test_per_class_names_classes_methods_and_attack(methods, tmp_path):
    figures.per_class(methods, tmp_path / "bars")
    text = words(tmp_path / "bars.svg")
    for expected in ("cat", "$dog_", "<b>", "AT", "DONE-PGD", "robust accuracy under PGD-20 (%)"):
        assert expected in text
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_curves_show_what_was_recorded(methods, tmp_path):
    figures.learning_curves(methods, tmp_path / "new" / "curves")
    text = words(tmp_path / "new" / "curves.svg")
    for expected in ("accuracy on the clean probe", "under PGD-20", "training loss", "effective sample size", "epoch"):
        assert expected in text
    figures.learning_curves({"AT": methods["AT"]}, tmp_path / "plain")
    assert "effective sample size" not in words(tmp_path / "plain.svg")


def test_the_same_runs_give_the_same_bytes(methods, tmp_path):
    for folder in ("a", "b"):
        figures.per_class(methods, tmp_path / folder / "bars")
    assert (tmp_path / "a" / "bars.svg").read_bytes() == (tmp_path / "b" / "bars.svg").read_bytes()


def test_a_run_without_metrics_still_gives_a_picture(make_run, tmp_path):
    path = make_run(epochs=0)
    figures.learning_curves(compare(collect([path]))[0].methods, tmp_path / "none")
    assert "no epoch" in words(tmp_path / "none.svg")


def test_of_many_classes_the_weakest_are_drawn(make_run, tmp_path):
    path = make_run(classes=1000, n=3000)
    figures.per_class(compare(collect([path]))[0].methods, tmp_path / "many")
    assert "the 40 weakest of 1000" in words(tmp_path / "many.svg")


def test_missing_values_count_for_nothing():
    nan = float("nan")
    mean, sd = figures._over_seeds([[1.0, 4.0, nan], [3.0, nan, nan]])
    assert mean[:2].tolist() == [2.0, 4.0] and sd[:2].tolist() == [pytest.approx(2**0.5), 0.0]
    assert mean[2] != mean[2]
