import pytest
import torch

from doubly.data import PadCropFlip, ResizedCropFlip
from doubly.errors import UsageError
from doubly.seeding import BatchGenerator, Rows


def numbers(seed=0, rows=None):
    return BatchGenerator(torch.Generator().manual_seed(seed), rows)


def one_by_one(x, pad, flip, generator):
    """The simple twin of `PadCropFlip`: pad, crop and mirror one image at a time."""
    draws, outputs = torch.rand(len(x), 3, generator=generator), []
    channels, height, width = x.shape[1:]
    for image, (down, right, coin) in zip(x, draws.tolist(), strict=True):
        canvas = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=x.dtype)
        canvas[:, pad : pad + height, pad : pad + width] = image
        top, left = int(down * (2 * pad + 1)), int(right * (2 * pad + 1))
        crop = canvas[:, top : top + height, left : left + width]
        outputs.append(crop.flip(2) if flip and coin < 0.5 else crop)
    return torch.stack(outputs)


def test_equals_its_dumb_twin():
    pixels = torch.randint(0, 256, (64, 3, 7, 9), dtype=torch.uint8)
    for x in (pixels, pixels.float() / 255, (pixels.float() / 255).half()):
        for pad in (0, 1, 4):
            for flip in (True, False):
                expected = one_by_one(x, pad, flip, torch.Generator().manual_seed(5))
                assert torch.equal(PadCropFlip(pad, flip)(x, numbers(5)), expected)
    assert torch.equal(PadCropFlip(0, False)(x, numbers()), x)


def test_every_offset_and_both_sides_come_up():
    x = torch.zeros(2000, 1, 3, 3)
    x[:, 0, 1, 1] = 1
    marks = PadCropFlip(1, True)(x, numbers()).mean(0)
    assert (marks - 1 / 9).abs().max() < 0.03


def test_draws_next_to_one_stay_inside():
    class Highest(BatchGenerator):
        def uniform(self, like):
            return torch.full_like(like, 1 - 2**-24)

    for pad in range(20):
        assert PadCropFlip(pad)(torch.rand(2, 1, 4, 4), Highest(torch.Generator())).shape == (2, 1, 4, 4)


def test_the_parts_of_several_processes_are_those_of_the_global_batch():
    x = torch.rand(6, 1, 8, 8)
    for augment in (PadCropFlip(2), ResizedCropFlip()):
        parts = [augment(x[2 * rank : 2 * rank + 2], numbers(3, Rows(2 * rank, 6))) for rank in range(3)]
        assert torch.equal(torch.cat(parts), augment(x, numbers(3)))


def ramp(n, size=32):
    """Images whose two channels are a pixel's position, from 0 at the left (top) to 1 at the right (bottom)."""
    places = (torch.arange(size) + 0.5) / size
    return torch.stack([places.expand(size, size), places[:, None].expand(size, size)]).expand(n, -1, -1, -1).clone()


def test_a_resized_crop_has_the_area_ratio_and_place_that_it_may_have():
    size = 32
    crops = ResizedCropFlip(0.2, 1.5)(ramp(500, size), numbers())
    assert crops.shape == (500, 2, size, size) and crops.min() >= 0 and crops.max() <= 1
    middle = slice(size // 4, 3 * size // 4)  # away from the border, which is repeated
    width = (crops[:, 0, :, middle].diff(dim=2).mean((1, 2)) * size).abs()
    height = crops[:, 1, middle].diff(dim=1).mean((1, 2)) * size
    clipped = (width > 0.97) | (height > 0.97)  # at the image's border
    area, ratio = width * height, width / height
    assert area.min() > 0.19 and area.max() < 1.02 and 0.5 < area.mean() < 0.65
    assert ratio[~clipped].min() > 0.65 and ratio[~clipped].max() < 1.52 and ratio.min() < 0.75 and ratio.max() > 1.3
    center = crops[:, :, size // 2 - 1 : size // 2 + 1, size // 2 - 1 : size // 2 + 1].mean((2, 3))
    assert ((center[:, 0] - width / 2 > -0.02) & (center[:, 0] + width / 2 < 1.02)).all()
    assert ((center[:, 1] - height / 2 > -0.02) & (center[:, 1] + height / 2 < 1.02)).all()
    mirrored = crops[:, 0, :, 0].mean(1) > crops[:, 0, :, -1].mean(1)
    assert 0.4 < mirrored.float().mean() < 0.6


def test_the_largest_resized_crop_is_the_image():
    x = torch.rand(4, 3, 9, 7)
    assert torch.allclose(ResizedCropFlip(1, 1, flip=False)(x, numbers()), x, atol=1e-5)


def test_settings_that_are_refused():
    for make, message in (
        (lambda: PadCropFlip(-1), "pad=-1"),
        (lambda: ResizedCropFlip(smallest=0), "smallest is a share"),
        (lambda: ResizedCropFlip(smallest=1.1), "smallest is a share"),
        (lambda: ResizedCropFlip(smallest=float("nan")), "smallest is a share"),
        (lambda: ResizedCropFlip(stretch=0.9), "stretch at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            make()
