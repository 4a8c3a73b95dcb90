"""Galleries and weights (figures 4 to 6 of the paper), and the figures that the paper does not have."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from doubly.errors import UsageError
from doubly.report import figures
from doubly.report.collect import collect
from doubly.report.figures import curves, trade_offs
from doubly.report.figures.margins import margin_values
from doubly.report.figures.style import style

CLASSES = ["cat", "dog", "ship"]


def words(path):
    return " ".join(ElementTree.parse(path).getroot().itertext())


@pytest.fixture
def run(make_run):
    return collect([make_run("cifar10.small.done_pgd", classes=CLASSES, n=60)])[0]


def with_evaluation(run, **fields):
    return replace(run, evaluation={**run.evaluation, **fields})


def save_gallery(run, channels=3, m=4, **changed):
    shades = np.arange(m * 64 * channels, dtype=np.uint8).reshape(m, 8, 8, channels)
    saved = {
        "clean": shades,
        "attacked": shades + 1,
        "ids": np.arange(m),
        "labels": np.zeros(m, dtype=np.int64),
        "answers_clean": np.zeros(m, dtype=np.int64),
        "answers_attacked": np.full(m, 2),
        "weights": np.linspace(0.001, 7.25, m),
        "hard": np.arange(m) >= m // 2,
        "r": np.float64(0.1),
    }
    np.savez(run.path / "gallery.npz", **{**saved, **changed})


def test_a_gallery_says_what_the_model_made_of_each_image(run, tmp_path):
    save_gallery(run)
    assert figures.gallery(run, tmp_path / "hard", "hard")
    text = words(tmp_path / "hard.svg")
    for expected in ("label cat", "prediction cat → ship", "weight 7.2", "hard images", "r = 0.1", "under PGD-20"):
        assert expected in text
    assert text.index("weight 7.2") < text.index("weight 4.8") and "weight 0.001" not in text
    save_gallery(run, channels=1)
    assert figures.gallery(run, tmp_path / "easy", "easy") and "weight 0.001" in words(tmp_path / "easy.svg")


def test_without_color_images_there_is_no_gallery(run, tmp_path):
    assert not figures.gallery(run, tmp_path / "x", "hard")
    for changed in ({"channels": 4}, {"hard": np.zeros(4, dtype=bool)}):
        save_gallery(run, **changed)
        assert not figures.gallery(run, tmp_path / "x", "hard") and not list(tmp_path.glob("x*"))


def test_damaged_files_are_refused(run, tmp_path):
    for changed in (
        {"labels": np.full(4, 3)},
        {"labels": np.zeros(4)},
        {"weights": np.ones(3)},
        {"clean": np.zeros((4, 8, 8, 3))},
        {"attacked": np.zeros(4)},
    ):
        save_gallery(run, **changed)
        with pytest.raises(UsageError, match=r"gallery\.npz is damaged"):
            figures.gallery(run, tmp_path / "x", "hard")
    np.savez(run.path / "gallery.npz", clean=np.zeros(3))
    with pytest.raises(UsageError, match="it lacks attacked, labels"):
        figures.gallery(run, tmp_path / "x", "hard")
    np.savez(run.path / "evaluation.npz", pgd_losses=np.zeros(3), pgd_margins=np.zeros(4))
    with pytest.raises(UsageError, match="4 margins for 3 losses"):
        figures.weight_against_margin(run, tmp_path / "x")
    save_gallery(run)
    complete = (run.path / "gallery.npz").read_bytes()
    for length in (0, 10, 900):
        for name in ("gallery.npz", "evaluation.npz"):
            (run.path / name).write_bytes(complete[:length])
        with pytest.raises(UsageError, match=r"gallery\.npz is damaged"):
            figures.gallery(run, tmp_path / "x", "hard")
        with pytest.raises(UsageError, match=r"evaluation\.npz is damaged"):
            figures.weight_against_margin(run, tmp_path / "x")


def weights_at(r):
    quantiles = {"cat": [0.0, 1e-4, 1e-3, 1e-2, 0.1], "dog": [1e-4, 2e-4, 3e-4, 4e-4, 5e-4], "ship": None}
    return {"r": r, "normalize": "batch", "batch": 128, "quantiles_per_class": quantiles}


def test_weights_name_r_and_normalization(run, tmp_path):
    weighted = with_evaluation(run, weights=[weights_at(10.0), weights_at(1.0)])
    assert figures.weights({"DONE": [weighted, weighted]}, tmp_path / "weights")
    text = words(tmp_path / "weights.svg")
    share = 100 * run.evaluation["per_class"]["cat"]["ra_pgd"]
    for expected in ("DONE, r = 1", "sum 1 in a batch of 128", "cat", f"{share:.0f} %", "0.001"):
        assert expected in text
    assert not figures.weights({"DONE": [weighted]}, tmp_path / "x", r=0.1)
    trained = replace(weighted, metrics=[{"epoch": 0, "r": 1.0}, {"epoch": 1, "r": 10.0}])
    assert figures.weights({"DONE": [trained]}, tmp_path / "trained")
    assert "DONE, r = 10" in words(tmp_path / "trained.svg")  # where training ended
    assert not figures.weights({"DONE": [run]}, tmp_path / "x")


def test_weights_against_the_margin_have_mean_one(run, tmp_path):
    losses = np.linspace(0, 5, 3000)
    np.savez(run.path / "evaluation.npz", y=np.zeros(3000), pgd_losses=losses)
    assert not figures.weight_against_margin(run, tmp_path / "x")
    np.savez(run.path / "evaluation.npz", pgd_losses=losses, pgd_margins=np.full(3000, np.nan))
    assert not figures.weight_against_margin(run, tmp_path / "x")
    np.savez(run.path / "evaluation.npz", y=np.zeros(3000), pgd_losses=losses, pgd_margins=2 - losses)
    assert figures.weight_against_margin(run, tmp_path / "margin", r=0.5)
    text = words(tmp_path / "margin.svg")
    for expected in (
        "r = 0.5 (mean 1)",
        "2,000 of 3,000 images",
        "correct under PGD-20, 40%",
        "wrong under PGD-20, 60%",
    ):
        assert expected in text


def test_pareto_names_every_method_once_and_apart(run, tmp_path):
    scores = [(0.5, 0.3), (0.5001, 0.3001), (0.5002, 0.3), (0.4, 0.35), (0.3, 0.1)]
    methods = {
        f"METHOD-{i}": [
            with_evaluation(run, ra_pgd=a, ra_tail_30=b),
            with_evaluation(run, ra_pgd=a - 0.01, ra_tail_30=b),
        ]
        for i, (a, b) in enumerate(scores)
    }
    assert figures.pareto(methods, tmp_path / "pareto")
    text = words(tmp_path / "pareto.svg")
    assert all(text.count(name) == 1 for name in methods)
    assert "RA-PGD" in text and "RA-Tail-30" in text


def test_names_of_close_marks_do_not_overlap(tmp_path):
    with style(tmp_path):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.set(xlim=(0, 1), ylim=(0, 1))
        points = {f"METHOD-{i}": (0.5 + 0.002 * i, 0.5) for i in range(8)}
        trade_offs._label_points(figure, axes, points, [])
        figure.draw_without_rendering()
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the line to the mark
    assert len(boxes) == 8
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_pareto_front_holds_the_points_that_no_other_beats_in_both():
    assert trade_offs._front([(1.0, 1.0), (3.0, 2.0), (2.0, 3.0), (2.0, 1.0), (0.5, 3.0)]) == [(3.0, 2.0), (2.0, 3.0)]


def test_accuracy_against_epsilon(run, tmp_path):
    points = [{"epsilon": k / 255, "accuracy": 0.8 - 0.05 * k, "tail_30": None if k else 0.5} for k in (0, 4, 8)]
    curve = {"n": 500, "attack": {"kind": "attack.pgd", "steps": 10}, "points": points}
    assert figures.epsilon_curve({"DONE": [with_evaluation(run, curve=curve)], "AT": [run]}, tmp_path / "curve")
    text = words(tmp_path / "curve.svg")
    for expected in ("ε (of 255)", "PGD-10", "500 images", "weakest 30 %", "DONE"):
        assert expected in text
    assert " AT " not in text and not figures.epsilon_curve({"AT": [run]}, tmp_path / "x")


def test_epsilon_is_printed_as_levels_of_255_where_it_is_a_multiple():
    assert curves._are_levels([0, 2 / 255, 8.5 / 255]) and not curves._are_levels([0, 0.05, 0.15])
    assert not curves._are_levels([0.0, 0.2, 0.4]) and not curves._are_levels([0.0])


def test_cost_leaves_out_what_runs_did_not_record(run, tmp_path):
    assert figures.cost({"DONE": [run]}, tmp_path / "old")
    assert "training time (s)" in words(tmp_path / "old.svg") and "passes" not in words(tmp_path / "old.svg")
    counted = [{**row, "seconds": 4000.0, "passes_forward": 12.0, "passes_backward": 11.0} for row in run.metrics]
    slow = replace(run, metrics=counted)
    assert sum(slow.passes) == 23
    assert figures.cost({"DONE": [slow], "AT": [run], "NONE": [replace(run, metrics=[])]}, tmp_path / "new")
    text = words(tmp_path / "new.svg")
    assert "training time (h)" in text and "passes per step" in text and "NONE" not in text
    assert not figures.cost({"NONE": [replace(run, metrics=[])]}, tmp_path / "x")


def test_histograms_of_margins_count_all_seeds_in_units_of_the_clean_spread(run, tmp_path):
    margins = np.linspace(-1, 3, 200)
    np.savez(run.path / "evaluation.npz", margin_margins=margins)
    assert not figures.margin_histograms({"AT": [run]}, tmp_path / "x")
    np.savez(run.path / "evaluation.npz", margin_margins=margins, clean_margins=np.tile([0.0, 4.0], 100))
    raw, scaled = margin_values([run, run])
    assert raw.tolist() == [*margins, *margins] and scaled.tolist() == (raw / 2).tolist()
    assert figures.margin_histograms({"AT": [run, run], "DONE": [run]}, tmp_path / "margins")
    text = words(tmp_path / "margins.svg")
    for expected in ("AT", "DONE", "logit margin under attack", "in units of the spread of clean margins"):
        assert expected in text
