"""The pictures of fig. 1 to 3 of the paper, and what all pictures share."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from doubly.report import figures, write_report
from doubly.report.collect import collect, compare
from doubly.report.figures import style, values

HOSTILE = ["<script>", "$x$ \\frac", "new\nline\x00", "a" * 80, "😀 漢字", "_under"]


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
    assert figures.per_class(methods, tmp_path / "bars")
    text = words(tmp_path / "bars.svg")
    for expected in ("cat", "$dog_", "<b>", "AT", "DONE-PGD", "robust accuracy under PGD-20 (%)"):
        assert expected in text
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_settings_stand_side_by_side_and_a_method_keeps_its_color(methods, tmp_path):
    settings = {"balanced": methods, "imbalanced": {"DONE-PGD": methods["DONE-PGD"]}}
    assert figures.per_class_panels(settings, tmp_path / "panels")
    svg = (tmp_path / "panels.svg").read_text(encoding="utf-8").lower()
    assert "balanced" in svg and "imbalanced" in svg
    plain, hatched = svg.count(f"fill: {style.COLORS[0].lower()}"), svg.count("fill: url(#")
    assert (plain, hatched) == (3 + 1, 6 + 1)  # a bar for each class, and one in the legend
    assert svg.count("<pattern") == 1 and f'fill="{style.COLORS[1].lower()}"' in svg


def test_curves_show_what_was_recorded(methods, tmp_path):
    assert figures.learning_curves(methods, tmp_path / "new" / "curves")
    text = words(tmp_path / "new" / "curves.svg")
    for expected in ("learning rate", "r", "training loss", "effective sample size", "SA", "(PGD-20, %)", "epoch"):
        assert expected in text


def test_a_panel_of_nothing_is_left_out(methods, tmp_path):
    plain = [replace(run, metrics=[{"epoch": 0, "loss": 1.0}, {"epoch": 1, "loss": 0.5}]) for run in methods["AT"]]
    assert figures.learning_curves({"AT": plain}, tmp_path / "plain")
    text = words(tmp_path / "plain.svg")
    assert "training loss" in text and "sample size" not in text and "validation" not in text


def test_thousands_of_epochs_are_thinned_out_to_their_ends():
    axes = Figure().subplots()
    style.curve(axes, 0, "AT", [dict.fromkeys(range(5000), 1.0)])
    x = axes.lines[0].get_xdata()
    assert len(x) == style.MOST_POINTS and (x[0], x[-1]) == (0, 4999)


def test_the_band_is_one_sd_wide():
    axes = Figure().subplots()
    style.curve(axes, 0, "AT", [{0: 1.0, 1: 2.0}, {0: 3.0, 1: 2.0}])
    assert axes.lines[0].get_ydata().tolist() == [2.0, 2.0]
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert high - low == pytest.approx(2 * 2**0.5)


def test_the_confusion_is_the_sum_of_the_seeds(methods, tmp_path):
    assert figures.confusion(methods, tmp_path / "matrix")
    text = words(tmp_path / "matrix.svg")
    assert "sum of 2 seeds" in text and "answer under PGD-20" in text and "$dog_" in text
    counts = [run.evaluation["confusion"]["pgd"][0][0] for run in methods["AT"]]
    assert f" {sum(counts)} " in text
    assert "fill: #111111" in (tmp_path / "matrix.svg").read_text(encoding="utf-8")  # stays so on a dark page
    assert not figures.confusion(methods, tmp_path / "none", "square") and not (tmp_path / "none.svg").exists()


def test_the_same_runs_give_the_same_bytes(methods, tmp_path):
    for folder in ("a", "b"):
        figures.confusion(methods, tmp_path / folder / "matrix")
    assert (tmp_path / "a" / "matrix.svg").read_bytes() == (tmp_path / "b" / "matrix.svg").read_bytes()


def test_a_run_without_metrics_has_no_curves_and_still_a_report(make_run, tmp_path):
    path = make_run(epochs=0)
    assert not figures.learning_curves(compare(collect([path]))[0].methods, tmp_path / "none")
    assert not list(tmp_path.glob("none*"))
    page = write_report([path], tmp_path / "out").read_text(encoding="utf-8")
    assert page.count("<svg") == 3 and "<h3>Training</h3>" not in page


def test_of_many_classes_the_weakest_are_drawn(make_run, tmp_path):
    methods = compare(collect([make_run(classes=1000, n=3000)]))[0].methods
    assert figures.per_class(methods, tmp_path / "many")
    assert "the 40 weakest of 1000" in words(tmp_path / "many.svg")
    assert not figures.confusion(methods, tmp_path / "matrix")


def test_names_are_data(make_run, tmp_path):
    methods = {name: collect([make_run(classes=HOSTILE)]) for name in HOSTILE}
    for draw in (figures.per_class, figures.pareto):
        assert draw(methods, tmp_path / draw.__name__)
        text = words(tmp_path / f"{draw.__name__}.svg")
        for name in ("<script>", "$x$ \\frac", "new line", "aaaa…aaaa", "😀 漢字", "_under"):
            assert name in text


def test_twenty_eight_methods_differ_in_color_and_mark():
    for marks in (style.HATCHES, style.MARKERS, style.DASHES):
        assert len({(style.COLORS[i % 7], marks[i % len(marks)]) for i in range(28)}) == 28


def test_many_methods_make_the_picture_taller_not_smaller(tmp_path):
    panels = []
    for count in (2, 28):
        with style.style(tmp_path):
            figure = Figure(figsize=(7.2, 3), layout="constrained")
            axes = figure.subplots()
            for index in range(count):
                style.curve(axes, index, f"METHOD-{index}, rate 0.1, radius 0.03", [{0: 0.0, 1: float(index)}])
            style.finish(figure, [axes], tmp_path / f"m{count}")
        panels.append(axes.get_position().height * figure.get_size_inches()[1])
    assert panels[1] > 0.9 * panels[0]


def test_missing_values_count_for_nothing():
    nan = float("nan")
    mean, sd = values.over_seeds([[1.0, 4.0, nan], [3.0, nan, nan]])
    assert mean[:2].tolist() == [2.0, 4.0] and sd[:2].tolist() == [pytest.approx(2**0.5), 0.0]
    assert mean[2] != mean[2]
    assert values.weakest(np.array([0.5, nan, 0.1, 0.3]), 2).tolist() == [2, 3]


def test_long_names_stay_apart():
    labels = [f"{'a' * 60} {index}" for index in range(3)] + ["b" * 50, f"{'b' * 51}"]
    shown = values.named({label: [None] for label in labels})
    assert len(shown) == 5 and max(map(len, shown)) <= 41
    assert not values.named({"AT": []})


@pytest.mark.parametrize(
    "name", ["per_class", "learning_curves", "confusion", "weights", "pareto", "epsilon_curve", "cost"]
)
def test_nothing_gives_nothing(name, tmp_path):
    assert getattr(figures, name)({}, tmp_path / "x") is False and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("low", "high", "expected"), [(1e-6, 1.0, "0.01"), (0.1, 1.0, "0.2"), (1.0, 1.0, "1")])
def test_log_axes_are_written_without_tex(low, high, expected, tmp_path):
    with style.style(tmp_path):
        axes = Figure().subplots()
        axes.plot([0, 1], [low, high])
        style.logarithmic(axes, "y", low, high)
        axes.figure.draw_without_rendering()
        assert expected in [label.get_text() for label in axes.get_yticklabels()]


def test_a_wide_axis_is_logarithmic():
    axes = Figure().subplots()
    style.log_if_wide(axes, "x", [1.0, float("nan"), 9.0])
    assert axes.get_xscale() == "linear"
    style.log_if_wide(axes, "x", [1.0, float("nan"), 11.0])
    assert axes.get_xscale() == "log"
