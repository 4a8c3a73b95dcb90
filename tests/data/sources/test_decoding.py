from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from doubly.data.sources.decoding import decode_image, decode_images
from doubly.errors import UsageError


def channels_first(image):
    return np.array(image).transpose(2, 0, 1)


def refused(call, *texts):
    with pytest.raises(UsageError) as caught:
        call()
    for text in texts:
        assert str(text) in str(caught.value)
    return str(caught.value)


def test_all_formats_are_decoded(tmp_path, save):
    image = Image.new("RGB", (6, 5), (200, 40, 120))
    image.paste((10, 220, 90), (0, 0, 3, 5))
    for suffix in ("png", "jpg", "jpeg", "ppm", "webp", "bmp", "tif", "tiff", "gif"):
        lossy = {"quality": 100, "subsampling": 0} if "j" in suffix else {}
        save(tmp_path / f"a.{suffix}", image, **lossy, **({"lossless": True} if suffix == "webp" else {}))
        pixels = decode_image(tmp_path / f"a.{suffix}", None, "crop")
        assert pixels.dtype == np.uint8 and pixels.shape == (3, 5, 6)
        assert np.abs(pixels.astype(int) - channels_first(image)).max() <= (12 if lossy else 0)


def test_gray_becomes_three_equal_channels(tmp_path, save, noise):
    gray = noise("gray").convert("L")
    for mode, suffix in (("1", "png"), ("L", "png"), ("LA", "png"), ("L", "pgm")):
        save(tmp_path / f"a.{suffix}", gray.convert(mode))
        pixels = decode_image(tmp_path / f"a.{suffix}", None, "crop")
        assert pixels.shape == (3, 5, 6) and (pixels == np.array(gray.convert(mode).convert("L"))).all()


def test_palettes_are_looked_up_and_transparency_is_dropped(tmp_path, save, noise):
    palette = Image.new("P", (6, 5), 0)
    palette.putpalette([200, 10, 20, 5, 210, 30])
    palette.paste(1, (0, 0, 2, 5))
    for suffix, options in (("png", {}), ("gif", {}), ("bmp", {}), ("png", {"transparency": bytes([255, 128])})):
        save(tmp_path / f"a.{suffix}", palette, **options)
        pixels = decode_image(tmp_path / f"a.{suffix}", None, "crop")
        assert pixels[:, 0, 0].tolist() == [5, 210, 30] and pixels[:, 0, 2].tolist() == [200, 10, 20]
    image = noise("color")
    image.putalpha(Image.new("L", image.size, 77))
    save(tmp_path / "a.png", image)
    assert (decode_image(tmp_path / "a.png", None, "crop") == channels_first(noise("color"))).all()


def test_pictures_are_turned_as_the_camera_was_held(tmp_path, save, noise):
    for orientation, turn in (
        (1, lambda a: a),
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (6, lambda a: np.rot90(a, -1)),
        (8, lambda a: np.rot90(a, 1)),
    ):
        exif, image = Image.Exif(), noise("photo")
        exif[0x0112] = orientation
        save(tmp_path / "a.png", image, exif=exif)
        assert (decode_image(tmp_path / "a.png", None, "crop") == turn(np.array(image)).transpose(2, 0, 1)).all()
        save(tmp_path / "a.jpg", image, exif=exif)
        assert decode_image(tmp_path / "a.jpg", None, "crop").shape[1:] == turn(np.array(image)).shape[:2]


def test_crop_keeps_proportions_and_stretch_keeps_the_margins(tmp_path, save):
    """Black, 24x12, with a red and a blue end and a white square of 8x8 in the middle; and the same upright."""
    image = Image.new("RGB", (24, 12))
    image.paste((255, 0, 0), (0, 0, 4, 12))
    image.paste((0, 0, 255), (20, 0, 24, 12))
    image.paste((255, 255, 255), (8, 2, 16, 10))
    for upright in (False, True):
        save(tmp_path / "a.png", image.transpose(Image.Transpose.ROTATE_90) if upright else image)
        for fit, extent in (("crop", (4, 4)), ("stretch", (2, 4) if upright else (4, 2))):
            pixels = decode_image(tmp_path / "a.png", 6, fit)
            assert pixels.shape == (3, 6, 6)
            assert tuple(int(np.ptp(places)) + 1 for places in np.nonzero((pixels > 127).all(0))) == extent
            assert (pixels.max(0) != pixels.min(0)).any() == (fit == "stretch")  # the colored ends


def test_small_pictures_are_enlarged_and_fitting_ones_unchanged(tmp_path, save, noise):
    save(tmp_path / "a.png", noise("small", width=4, height=4))
    assert decode_image(tmp_path / "a.png", 9, "crop").shape == (3, 9, 9)
    for fit in ("crop", "stretch"):
        assert (decode_image(tmp_path / "a.png", 4, fit) == decode_image(tmp_path / "a.png", None, fit)).all()


def test_chunks_come_in_order_and_have_one_size(root, save, noise):
    files = sorted((root / "train").rglob("*.png"))
    chunks = list(decode_images(files, None, "crop", chunk=5))
    assert [len(chunk) for chunk in chunks] == [5, 5, 5, 5, 4]
    assert (np.concatenate(chunks) == np.stack([decode_image(path, None, "crop") for path in files])).all()
    save(files[17], noise("odd", width=7, height=9))
    for chunk in (24, 7):  # in the first chunk, and in a later one
        refused(
            lambda chunk=chunk: list(decode_images(files, None, "crop", chunk)),
            *(files[17], "7x9", files[0], "6x5", "--data.source.size"),
        )


def test_damaged_files_are_named(tmp_path, save, noise):
    for suffix in ("png", "jpg", "ppm", "bmp", "webp", "tif", "gif"):
        path = tmp_path / f"a.{suffix}"
        save(path, noise("cut", width=40, height=40))
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])
        refused(lambda path=path: decode_image(path, 5, "crop"), path, "cannot be read as an image")
    for content in (b"", b"a text", b"\x89PNG\r\n\x1a\n" + bytes(40)):
        path.write_bytes(content)
        refused(lambda: decode_image(path, None, "crop"), path, "replace it with the original")


def test_more_than_8_bits_or_too_many_pixels_are_refused(tmp_path, save, noise, monkeypatch):
    deep = Image.fromarray(np.full((5, 6), 40_000, np.uint16))
    for name, image in (("a.png", deep), ("a.tif", deep), ("a.pgm", deep), ("f.tif", Image.new("F", (6, 5), 0.5))):
        save(tmp_path / name, image)
        message = refused(lambda name=name: decode_image(tmp_path / name, None, "crop"), name, "more than 8 bits")
        assert "truncated" not in message
    save(tmp_path / "large.png", noise("large", width=30, height=30))
    # Pillow raises above twice its limit, and only warns between the limit and twice that.
    for limit, text in ((449, "far too many pixels"), (899, "more than 899 pixels")):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.warns(Image.DecompressionBombWarning) if limit == 899 else nullcontext():
            message = refused(lambda: decode_image(tmp_path / "large.png", 5, "crop"), "large.png", text)
        assert "truncated" not in message
