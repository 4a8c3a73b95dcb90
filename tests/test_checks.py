import math

import pytest
import torch

from doubly.checks import check_finite, check_images, check_logits, is_out_of_memory
from doubly.errors import NonFiniteError, UsageError

X, Y = torch.rand(4, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])


def test_good_input_passes():
    for x, y in ((X, Y), (X.double(), Y), (torch.zeros(1, 1, 1, 1), torch.tensor([5])), (X[:0], Y[:0])):
        check_images(x, y)
    check_logits(torch.zeros(4, 3), Y)
    check_logits(torch.zeros(0, 3), Y[:0])
    check_finite(X, "x")


def test_bad_images_labels_and_logits_are_named_with_the_fix():
    images = [
        ((255 * X).to(torch.uint8), Y, "divide uint8 images by 255"),
        (X, Y.int(), "got torch.int32 .* as int64"),
        (X.to("meta"), Y, "images must be a dense tensor with values"),
        (255 * X, Y, r"\[0,1\].*normalization"),
        (X - 0.5, Y, r"\[0,1\]"),
        (X.index_fill(0, torch.tensor(1), math.nan), Y, r"\[0,1\]"),
        *((X, y, "4 whole numbers") for y in (Y.float(), Y.bool(), Y[:3], Y[:, None])),
    ]
    for x, y, message in images:
        with pytest.raises(UsageError, match=message):
            check_images(x, y)
    logits = [
        *((torch.zeros(shape), Y, r"\(4, classes\)") for shape in ((4,), (4, 3, 1), (3, 3))),
        (torch.zeros(4, 2), Y, "from 0 to 2.*2 logits"),
        (torch.zeros(4, 3), Y - 1, "from -1 to 1"),
        ((torch.zeros(4, 3), None), Y, "tensor of logits, got tuple"),
    ]
    for scores, y, message in logits:
        with pytest.raises(UsageError, match=message):
            check_logits(scores, y)


def test_values_that_are_not_finite_are_counted():
    for value in (math.nan, math.inf, -math.inf):
        logits = torch.zeros(4, 3)
        logits[1, 2] = value
        with pytest.raises(NonFiniteError, match="1 of 12"):
            check_logits(logits, Y)
        with pytest.raises(NonFiniteError, match="the loss: 1 of 12"):
            check_finite(logits, "the loss")


def test_running_out_of_memory_is_recognized_in_every_form_that_torch_has_for_it():
    messages = ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "CUDA error: out of memory")
    for error in (torch.OutOfMemoryError(), MemoryError(), *map(RuntimeError, messages)):
        assert is_out_of_memory(error)
    for error in (RuntimeError("shapes cannot be multiplied"), ValueError(messages[0])):
        assert not is_out_of_memory(error)
