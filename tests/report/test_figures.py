"""Figures 1 to 3 of the paper, and what all figures share."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from doubly.report import figures
from doubly.report.collect import collect, compare
from doubly.report.figures import style, values

HOSTILE = ["<script>", "$x$ \\frac", "new\nline\x00", "a" * 80, "😀 漢字", "_under"]


def words(path):
    """Return the text of an SVG; parsing it also shows that it is well-formed."""
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
    plain = [replace(run, metrics=[{"epoch": 0, "loss": 1.0}, {"epoch": 1, "loss": 0.5}]) for run in methods["AT"]]
    assert figures.learning_curves({"AT": plain}, tmp_path / "plain")
    text = words(tmp_path / "plain.svg")
    assert "training loss" in text and "sample size" not in text and "validation" not in text


def test_a_curve_is_thinned_out_between_its_ends_and_its_band_is_one_sd_wide():
    axes = Figure().subplots()
    style.curve(axes, 0, "AT", [dict.fromkeys(range(5000), 1.0)])
    x = axes.lines[0].get_xdata()
    assert len(x) == style.MAX_POINTS and (x[0], x[-1]) == (0, 4999)
    axes = Figure().subplots()
    style.curve(axes, 0, "AT", [{0: 1.0, 1: 2.0}, {0: 3.0, 1: 2.0}])
    assert axes.lines[0].get_ydata().tolist() == [2.0, 2.0]
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert high - low == pytest.approx(2 * 2**0.5)


def test_the_confusion_is_the_sum_of_the_seeds(methods, tmp_path):
    assert figures.confusion(methods, tmp_path / "matrix")
    text = words(tmp_path / "matrix.svg")
    assert "sum of 2 seeds" in text and "prediction under PGD-20" in text and "$dog_" in text
    counts = [run.evaluation["confusion"]["pgd"][0][0] for run in methods["AT"]]
    assert f" {sum(counts)} " in text
    assert "fill: #111111" in (tmp_path / "matrix.svg").read_text(encoding="utf-8")  # stays so on a dark page
    assert figures.confusion(methods, tmp_path / "clean", "clean")
    assert "prediction on clean images" in words(tmp_path / "clean.svg")
    figures.confusion(methods, tmp_path / "again" / "matrix")
    assert (tmp_path / "again" / "matrix.svg").read_bytes() == (tmp_path / "matrix.svg").read_bytes()
    assert not figures.confusion(methods, tmp_path / "none", "square") and not (tmp_path / "none.svg").exists()


def test_of_many_classes_the_weakest_are_drawn(make_run, tmp_path):
    methods = compare(collect([make_run(classes=1000, n=3000)]))[0].methods
    assert figures.per_class(methods, tmp_path / "many")
    assert "the 40 weakest of 1000" in words(tmp_path / "many.svg")
    assert not figures.confusion(methods, tmp_path / "matrix")
    nan = float("nan")
    assert values.weakest(np.array([0.5, nan, 0.1, 0.3]), 2).tolist() == [2, 3]


def test_names_from_data_are_drawn_as_they_are(make_run, tmp_path):
    methods = dict.fromkeys(HOSTILE, collect([make_run(classes=HOSTILE)]))
    for draw in (figures.per_class, figures.pareto):
        assert draw(methods, tmp_path / draw.__name__)
        text = words(tmp_path / f"{draw.__name__}.svg")
        for name in ("<script>", "$x$ \\frac", "new line", "aaaa…aaaa", "😀 漢字", "_under"):
            assert name in text


def test_many_methods_differ_and_make_the_figure_taller_not_smaller(tmp_path):
    for marks in (style.HATCHES, style.MARKERS, style.DASHES):
        assert len({(style.COLORS[i % 7], marks[i % len(marks)]) for i in range(28)}) == 28
    heights = []
    for count in (2, 28):
        with style.style(tmp_path):
            figure = Figure(figsize=(7.2, 3), layout="constrained")
            axes = figure.subplots()
            for index in range(count):
                style.curve(axes, index, f"METHOD-{index}, rate 0.1, radius 0.03", [{0: 0.0, 1: float(index)}])
            style.finish(figure, [axes], tmp_path / f"m{count}")
        heights.append(axes.get_position().height * figure.get_size_inches()[1])
    assert heights[1] > 0.9 * heights[0]


def test_missing_values_are_left_out_of_mean_and_sd():
    nan = float("nan")
    mean, sd = values.over_seeds([[1.0, 4.0, nan], [3.0, nan, nan]])
    assert mean[:2].tolist() == [2.0, 4.0] and sd[:2].tolist() == [pytest.approx(2**0.5), 0.0]
    assert np.isnan(mean[2])


def test_labels_of_a_legend_are_short_and_distinct():
    labels = [f"{'a' * 60} {index}" for index in range(3)] + ["b" * 50, f"{'b' * 51}"]
    shown = values.with_legend_labels({label: [None] for label in labels})
    assert len(shown) == 5 and max(map(len, shown)) <= 41
    assert not values.with_legend_labels({"AT": []})


def test_without_data_nothing_is_written(make_run, tmp_path):
    (run,) = collect([make_run(epochs=0)])
    empty = {name: {**row, "ra_pgd": None} for name, row in run.evaluation["per_class"].items()}
    unmeasured = replace(run, evaluation={**run.evaluation, "per_class": empty})
    assert not figures.learning_curves({"AT": [run]}, tmp_path / "none")
    assert not figures.per_class({"AT": [unmeasured]}, tmp_path / "none")
    for name in ("per_class", "learning_curves", "confusion", "weights", "pareto", "epsilon_curve", "cost"):
        assert getattr(figures, name)({}, tmp_path / "none") is False
    assert not list(tmp_path.glob("none*"))


def test_log_axes_are_used_for_wide_ranges_and_written_without_tex(tmp_path):
    for low, high, expected in [(1e-6, 1.0, "0.01"), (0.1, 1.0, "0.2"), (1.0, 1.0, "1")]:
        with style.style(tmp_path):
            axes = Figure().subplots()
            axes.plot([0, 1], [low, high])
            style.logarithmic(axes, "y", low, high)
            axes.figure.draw_without_rendering()
            assert expected in [label.get_text() for label in axes.get_yticklabels()]
    for high, scale in [(9.0, "linear"), (11.0, "log")]:
        axes = Figure().subplots()
        style.log_if_wide(axes, "x", [1.0, float("nan"), high])
        assert axes.get_xscale() == scale
