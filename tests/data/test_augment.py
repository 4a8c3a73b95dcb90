import pytest
import torch

from doubly.data import PadCropFlip, ResizedCropFlip
from doubly.distributed import collectives as parallel
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
        monkeypatch.setattr(parallel, "processes", lambda rank=rank: (rank, 3))
        parts.append(PadCropFlip(2)(x[2 * rank : 2 * rank + 2], torch.Generator().manual_seed(3)))
    assert torch.equal(torch.cat(parts), whole)


def test_refuses_negative_padding():
    with pytest.raises(UsageError, match="pad=-1"):
        PadCropFlip(-1)


# --- parts of the image, enlarged ------------------------------------------------------------------------------------


def ramp(n, size=32):
    """Images whose two channels say where a pixel is, from 0 at the left (top) to 1 at the right (bottom)."""
    places = (torch.arange(size) + 0.5) / size
    return torch.stack([places.expand(size, size), places[:, None].expand(size, size)]).expand(n, -1, -1, -1).clone()


def test_a_part_has_the_shape_and_the_place_that_it_may_have():
    size = 32
    found = ResizedCropFlip(0.2, 1.5)(ramp(500, size), torch.Generator().manual_seed(0))
    assert found.shape == (500, 2, size, size) and found.min() >= 0 and found.max() <= 1
    middle = slice(size // 4, 3 * size // 4)  # away from the border, where the image is continued
    width = (found[:, 0, :, middle].diff(dim=2).mean((1, 2)) * size).abs()
    height = found[:, 1, middle].diff(dim=1).mean((1, 2)) * size
    whole = (width > 0.97) | (height > 0.97)  # cut off at the image
    area, ratio = width * height, width / height
    assert area.min() > 0.19 and area.max() < 1.02 and 0.5 < area.mean() < 0.65
    assert ratio[~whole].min() > 0.65 and ratio[~whole].max() < 1.52 and ratio.min() < 0.75 and ratio.max() > 1.3
    center = found[:, :, size // 2 - 1 : size // 2 + 1, size // 2 - 1 : size // 2 + 1].mean((2, 3))
    assert ((center[:, 0] - width / 2 > -0.02) & (center[:, 0] + width / 2 < 1.02)).all()
    assert ((center[:, 1] - height / 2 > -0.02) & (center[:, 1] + height / 2 < 1.02)).all()
    mirrored = found[:, 0, :, 0].mean(1) > found[:, 0, :, -1].mean(1)
    assert 0.4 < mirrored.float().mean() < 0.6


def test_the_whole_image_is_the_image():
    x = torch.rand(4, 3, 9, 7)
    assert torch.allclose(ResizedCropFlip(1, 1, flip=False)(x, torch.Generator()), x, atol=1e-5)


def test_parts_do_not_depend_on_the_number_of_processes(monkeypatch):
    x, parts = torch.rand(4, 1, 8, 8), []
    whole = ResizedCropFlip()(x, torch.Generator().manual_seed(3))
    for rank in range(2):
        monkeypatch.setattr(parallel, "processes", lambda rank=rank: (rank, 2))
        parts.append(ResizedCropFlip()(x[2 * rank : 2 * rank + 2], torch.Generator().manual_seed(3)))
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("options", [{"smallest": 0}, {"smallest": 1.1}, {"stretch": 0.9}, {"smallest": float("nan")}])
def test_parts_that_cannot_be_are_refused(options):
    with pytest.raises(UsageError, match="smallest is a share"):
        ResizedCropFlip(**options)
