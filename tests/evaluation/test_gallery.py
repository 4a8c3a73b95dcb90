"""The gallery holds the hardest and the easiest images, whatever the chunks."""

import numpy as np
import torch

from doubly.evaluation import gallery
from doubly.evaluation.gallery import Gallery, max_images
from doubly.evaluation.result import EvalResult


def arrays_of(losses, chunk_size):
    """Return the gallery of one-pixel images; the attack brightens image k from gray level k to k + 1."""
    n, shown = len(losses), Gallery()
    attacked = (torch.arange(n) + 1.0).view(-1, 1, 1, 1) / 255
    for start in range(0, n, chunk_size):
        part = slice(start, start + chunk_size)
        shown.add_chunk("margin", start, -torch.tensor(losses)[part], 0 * attacked[part])
        shown.add_chunk("pgd", start, torch.tensor(losses)[part], attacked[part])
        assert len(shown.rows) == len(shown.attacked) <= 24
    y = np.arange(n) % 3
    predictions = {"clean": y, "pgd": (y + 1) % 3}
    result = EvalResult(y, ("a", "b", "c"), predictions, ids=np.arange(n) * 10, losses={"pgd": losses})
    return shown.arrays(result, attacked[torch.from_numpy(shown.rows)] - 1 / 255)


def test_it_has_the_largest_and_the_smallest_losses_of_all_images():
    """The first of several images with equal losses count as harder."""
    for n, chunk_size in ((100, 7), (100, 100), (100, 1), (30, 13), (24, 5), (23, 4), (3, 2), (1, 1)):
        random = np.random.default_rng(n)
        for losses in (random.permutation(n) / 7, random.integers(0, 3, n) / 2, np.full(n, 0.5)):
            arrays = arrays_of(losses, chunk_size)
            falling = sorted(range(n), key=lambda row: (-losses[row], row))
            hard, easy = falling[: min(12, (n + 1) // 2)], falling[::-1][: min(12, n // 2)]
            rows = np.array(hard + easy)
            assert len(set(rows)) == len(rows) == min(n, 24)
            assert arrays["hard"].tolist() == [True] * len(hard) + [False] * len(easy)
            np.testing.assert_array_equal(arrays["ids"], rows * 10)
            np.testing.assert_array_equal(arrays["clean"], rows.reshape(-1, 1, 1, 1))
            np.testing.assert_array_equal(arrays["attacked"], rows.reshape(-1, 1, 1, 1) + 1)
            np.testing.assert_array_equal(arrays["labels"], rows % 3)
            np.testing.assert_array_equal(arrays["answers_clean"], rows % 3)
            np.testing.assert_array_equal(arrays["answers_attacked"], (rows + 1) % 3)
            np.testing.assert_allclose(arrays["weights"], np.exp(losses[rows]) / np.exp(losses).mean())


def test_the_arrays_have_the_types_that_the_report_reads():
    arrays = arrays_of(np.random.default_rng(0).random(30), 8)
    expected = {"clean": "u1", "attacked": "u1", "hard": "?", "weights": "f8", "r": "f8"}
    expected |= dict.fromkeys(("ids", "labels", "answers_clean", "answers_attacked"), "i8")
    assert {name: np.asarray(array).dtype for name, array in arrays.items()} == {
        name: np.dtype(kind) for name, kind in expected.items()
    }
    assert arrays["clean"].shape == arrays["attacked"].shape == (24, 1, 1, 1) and arrays["r"] == 1


def test_there_are_fewer_images_if_they_are_large(monkeypatch):
    for side, count in ((8, 12), (32, 12), (128, 12), (224, 6), (512, 1), (4000, 1)):
        assert max_images(3 * side * side) == count
    monkeypatch.setattr(gallery, "MAX_BYTES", 8)
    assert arrays_of(np.array([3.0, 5.0, 1.0, 0.0, 4.0, 2.0]), 2)["ids"].tolist() == [10, 40, 30, 20]
