import pytest
import torch

from doubly.checks import check_finite, check_images, check_logits
from doubly.errors import NonFiniteError, UsageError

X, Y = torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 0])


def test_good_input_passes():
    check_images(X, Y)
    check_images(X.double(), Y.int())
    check_images(torch.zeros(1, 1, 1, 1), torch.tensor([5]))
    check_images(X[:0], Y[:0])
    check_logits(torch.randn(4, 3), Y)
    check_logits(torch.randn(0, 3), Y[:0])
    check_finite(X, "x")


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        ((255 * X).to(torch.uint8), Y, "divide uint8 images by 255"),
        (255 * X, Y, r"\[0,1\].*normalization"),
        (X - 0.5, Y, r"\[0,1\]"),
        (X.index_fill(0, torch.tensor(1), float("nan")), Y, r"\[0,1\]"),
        (X, Y.float(), "4 whole numbers"),
        (X, Y.bool(), "4 whole numbers"),
        (X, Y[:3], "4 whole numbers"),
        (X, Y[:, None], "4 whole numbers"),
    ],
)
def test_bad_images_and_labels_are_named_with_the_fix(x, y, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_images(x, y)


@pytest.mark.parametrize(
    ("logits", "y", "sentence"),
    [
        (torch.randn(4), Y, r"\(4, classes\)"),
        (torch.randn(4, 3, 1), Y, r"\(4, classes\)"),
        (torch.randn(3, 3), Y, r"\(4, classes\)"),
        (torch.randn(4, 2), Y, "from 0 to 2.*2 logits"),
        (torch.randn(4, 3), Y - 1, "from -1 to 1"),
    ],
)
def test_bad_logits_are_named_with_the_fix(logits, y, sentence):
    with pytest.raises(UsageError, match=sentence):
        check_logits(logits, y)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_counted(bad):
    logits = torch.zeros(4, 3)
    logits[1, 2] = bad
    with pytest.raises(NonFiniteError, match="1 of 12"):
        check_logits(logits, Y)
    with pytest.raises(NonFiniteError, match="the loss: 1 of 12"):
        check_finite(logits, "the loss")
