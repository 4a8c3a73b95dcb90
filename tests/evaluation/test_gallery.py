import numpy as np
import pytest
import torch

from doubly.evaluation import gallery
from doubly.evaluation.gallery import Gallery, most
from doubly.evaluation.result import EvalResult

KINDS = {
    "different": lambda n: np.random.default_rng(n).permutation(n) / 7,
    "ties": lambda n: np.random.default_rng(n).integers(0, 3, n) / 2,
    "alike": lambda n: np.full(n, 0.5),
}


def shown(folder, losses, chunk):
    """The gallery of one-pixel images; the attack brightens the k-th image from k to k + 1."""
    n, found = len(losses), Gallery()
    points = (torch.arange(n) + 1.0).view(-1, 1, 1, 1) / 255
    for first in range(0, n, chunk):
        part = slice(first, first + chunk)
        found.see("margin", first, -torch.tensor(losses)[part], 0 * points[part])
        found.see("pgd", first, torch.tensor(losses)[part], points[part])
        assert len(found.rows) == len(found.attacked) <= 24
    y = np.arange(n) % 3
    answers = {"clean": y, "pgd": (y + 1) % 3}
    result = EvalResult(y, ("a", "b", "c"), answers, ids=np.arange(n) * 10, losses={"pgd": losses})
    found.write(folder / "new", result, points[torch.from_numpy(found.rows)] - 1 / 255)
    with np.load(folder / "new" / "gallery.npz", allow_pickle=False) as kept:
        return {name: kept[name] for name in kept.files}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "chunk"), [(100, 7), (100, 100), (100, 1), (30, 13), (24, 5), (23, 4), (3, 2), (1, 1)])
def test_they_are_the_largest_and_the_smallest_losses_of_all(tmp_path, kind, n, chunk):
    losses = KINDS[kind](n)
    kept = shown(tmp_path, losses, chunk)
    falling = sorted(range(n), key=lambda row: (-losses[row], row))
    hard, easy = falling[: min(12, (n + 1) // 2)], falling[::-1][: min(12, n // 2)]
    rows = np.array(hard + easy)
    assert len(set(rows)) == len(rows) == min(n, 24)
    assert kept["hard"].tolist() == [True] * len(hard) + [False] * len(easy)
    np.testing.assert_array_equal(kept["ids"], rows * 10)
    np.testing.assert_array_equal(kept["clean"], rows.reshape(-1, 1, 1, 1))
    np.testing.assert_array_equal(kept["attacked"], rows.reshape(-1, 1, 1, 1) + 1)
    for name, values in (("labels", rows % 3), ("answers_clean", rows % 3), ("answers_attacked", (rows + 1) % 3)):
        np.testing.assert_array_equal(kept[name], values)
    np.testing.assert_allclose(kept["weights"], np.exp(losses[rows]) / np.exp(losses).mean())
    assert (np.diff(kept["weights"][kept["hard"]]) <= 0).all() and (np.diff(kept["weights"][~kept["hard"]]) >= 0).all()


def test_the_arrays_have_the_types_that_are_promised(tmp_path):
    kept = shown(tmp_path, KINDS["different"](30), 8)
    expected = {"clean": "u1", "attacked": "u1", "hard": "?", "weights": "f8", "r": "f8"}
    expected |= dict.fromkeys(("ids", "labels", "answers_clean", "answers_attacked"), "i8")
    assert {name: array.dtype for name, array in kept.items()} == {n: np.dtype(kind) for n, kind in expected.items()}
    assert kept["clean"].shape == kept["attacked"].shape == (24, 1, 1, 1) and kept["r"].shape == () and kept["r"] == 1
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["gallery.npz"]


@pytest.mark.parametrize(("side", "count"), [(8, 12), (32, 12), (128, 12), (224, 6), (512, 1), (4000, 1)])
def test_of_large_images_there_are_fewer(side, count):
    assert most(3 * side * side) == count


def test_the_fewer_of_large_images_are_the_extremes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "BYTES", 8)
    kept = shown(tmp_path, np.array([3.0, 5.0, 1.0, 0.0, 4.0, 2.0]), 2)
    assert kept["ids"].tolist() == [10, 40, 30, 20]
