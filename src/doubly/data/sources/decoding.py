"""Decoding of image files: any format and size that Pillow reads, to uint8 arrays (C, H, W)."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from doubly.data.download.dataset_files import read_file
from doubly.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp", ".gif"}
EXIF_ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)  # a tag, and its values for photos that lie on their side
Fit = Literal["crop", "stretch"]


def check_image_settings(size: int | None, test_share: float) -> None:
    """Check the settings that sources of image files share.

    Args:
        size: Width and height in pixels, or None.
        test_share: Part of each class that is the test set.

    Raises:
        UsageError: If one is out of range.
    """
    if size is not None and size < 1:
        raise UsageError(f"size is a number of pixels above 0, got {size}")
    if not 0 < test_share < 1:
        raise UsageError(f"test_share lies inside (0, 1), got {test_share}")


def decode_image(path: Path, size: int | None, fit: Fit, content: bytes | None = None) -> NDArray[np.uint8]:
    """Read an image file as RGB.

    Args:
        path: The file.
        size: Width and height of the result; None leaves the image as it is.
        fit: How it becomes square: `crop` cuts from the middle, `stretch` changes its proportions.
        content: The bytes of the file, if they were read from elsewhere; `path` then names it in messages.

    Returns:
        Pixels (3, H, W).

    Raises:
        UsageError: The file is damaged, has more than 8 bits per channel, or too many pixels.
    """
    from PIL import Image, ImageOps

    def read(path: Path) -> NDArray[np.uint8]:
        with _open_image(path, content) as file:
            image = ImageOps.exif_transpose(file)
            image = (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
        if size is not None and image.size != (size, size):
            bilinear = Image.Resampling.BILINEAR
            image = (
                ImageOps.fit(image, (size, size), bilinear) if fit == "crop" else image.resize((size, size), bilinear)
            )
        return np.asarray(image).transpose(2, 0, 1)

    pixels: NDArray[np.uint8] = read_file(path, read, "an image")
    return pixels


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image file, without decoding its pixels.

    Raises:
        UsageError: The file is damaged, or has too many bits or pixels.
    """

    def read(path: Path) -> tuple[int, int]:
        with _open_image(path) as file:
            width, height = file.size
            return (height, width) if file.getexif().get(EXIF_ORIENTATION, 1) in SIDEWAYS else (width, height)

    size: tuple[int, int] = read_file(path, read, "an image")
    return size


def _open_image(path: Path, content: bytes | None = None) -> "Image":
    """Open the file without decoding it, and refuse one with too many bits or pixels."""
    from PIL import Image

    try:
        file = Image.open(path if content is None else BytesIO(content))
    except Image.DecompressionBombError:
        raise UsageError(f"{path} has far too many pixels, and could fill the memory: shrink it") from None
    max_pixels = Image.MAX_IMAGE_PIXELS
    if file.mode.startswith(("I", "F")):
        file.close()
        raise UsageError(f"{path} has more than 8 bits per pixel (mode {file.mode}): save it with 8")
    if max_pixels is not None and file.width * file.height > max_pixels:
        file.close()
        raise UsageError(f"{path} has more than {max_pixels:,} pixels, and could fill the memory: shrink it")
    return file


def decode_images(paths: Sequence[Path], size: int | None, fit: Fit, chunk: int = 512) -> Iterator[NDArray[np.uint8]]:
    """Read image files in chunks, in order; the images of a chunk are decoded in parallel.

    Args:
        paths: The files.
        size: As for `decode_image`.
        fit: As for `decode_image`.
        chunk: Images of a chunk.

    Yields:
        Pixels (chunk, 3, H, W).

    Raises:
        UsageError: An image has another size than the first.
    """
    remaining, shape = iter(paths), None
    with ThreadPoolExecutor() as pool:
        while part := list(islice(remaining, chunk)):
            images = list(pool.map(lambda path: decode_image(path, size, fit), part))
            shape = shape or images[0].shape
            for path, image in zip(part, images, strict=True):
                if image.shape != shape:
                    raise UsageError(
                        f"{path} is {image.shape[2]}x{image.shape[1]}, {paths[0]} is {shape[2]}x{shape[1]}: "
                        "images must have one size; give the size to resize them to: --data.source.size 32 in train, "
                        "--set size=32 in other verbs, ImageFolder(path, size=32) in Python"
                    )
            yield np.stack(images)
