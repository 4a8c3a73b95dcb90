import pytest
import torch

from doubly import parallel
from doubly.data import PadCropFlip
from doubly.errors import UsageError


def one_by_one(x, pad, flip, generator):
    """The dumb twin: pad, cut and mirror each image alone."""
    draws, outputs = torch.rand(len(x), 3, generator=generator), []
    channels, height, width = x.shape[1:]
    for image, (down, right, coin) in zip(x, draws.tolist(), strict=True):
        canvas = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=x.dtype)
        canvas[:, pad : pad + height, pad : pad + width] = image
        top, left = int(down * (2 * pad + 1)), int(right * (2 * pad + 1))
        cut = canvas[:, top : top + height, left : left + width]
        outputs.append(cut.flip(2) if flip and coin < 0.5 else cut)
    return torch.stack(outputs)


@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_its_dumb_twin(pad, flip, dtype):
    x = torch.rand(64, 3, 7, 9).to(dtype)
    augmented = PadCropFlip(pad, flip)(x, torch.Generator().manual_seed(5))
    assert torch.equal(augmented, one_by_one(x, pad, flip, torch.Generator().manual_seed(5)))


def test_nothing_to_do_changes_nothing():
    x = torch.rand(4, 1, 5, 5)
    assert torch.equal(PadCropFlip(0, False)(x, torch.Generator()), x)


def test_every_offset_and_both_sides_come_up():
    x = torch.zeros(2000, 1, 3, 3)
    x[:, 0, 1, 1] = 1
    marks = PadCropFlip(1, True)(x, torch.Generator().manual_seed(0)).mean(0)
    assert (marks - 1 / 9).abs().max() < 0.03


def test_draws_next_to_one_stay_inside(monkeypatch):
    monkeypatch.setattr(parallel, "uniform", lambda like, generator: torch.full_like(like, 1 - 2**-24))
    for pad in range(20):
        assert PadCropFlip(pad)(torch.rand(2, 1, 4, 4), torch.Generator()).shape == (2, 1, 4, 4)


def test_ranks_together_draw_what_one_process_draws(monkeypatch):
    x = torch.rand(6, 1, 5, 5)
    whole = PadCropFlip(2)(x, torch.Generator().manual_seed(3))
    parts = []
    for rank in range(3):
        monkeypatch.setattr(parallel, "world", lambda rank=rank: (rank, 3))
        parts.append(PadCropFlip(2)(x[2 * rank : 2 * rank + 2], torch.Generator().manual_seed(3)))
    assert torch.equal(torch.cat(parts), whole)


def test_refuses_negative_padding():
    with pytest.raises(UsageError, match="pad=-1"):
        PadCropFlip(-1)
