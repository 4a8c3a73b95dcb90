"""Image files to arrays: any format and size that Pillow reads, as (C, H, W) bytes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from doubly.data.files import content
from doubly.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp", ".gif"}
Fit = Literal["crop", "stretch"]


def decoded(path: Path, size: int | None, fit: Fit) -> NDArray[np.uint8]:
    """In color; made square by `fit` where a size is given."""
    from PIL import Image, ImageOps

    def read(path: Path) -> NDArray[np.uint8]:
        with _opened(path) as file:
            image = ImageOps.exif_transpose(file)
            image = (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")
        if size is not None and image.size != (size, size):
            bilinear = Image.Resampling.BILINEAR
            image = (
                ImageOps.fit(image, (size, size), bilinear) if fit == "crop" else image.resize((size, size), bilinear)
            )
        return np.asarray(image).transpose(2, 0, 1)

    found: NDArray[np.uint8] = content(path, read, "an image")
    return found


def _opened(path: Path) -> "Image":
    """The file, not yet decoded; one that has too many bits or pixels is refused."""
    from PIL import Image

    try:
        file = Image.open(path)
    except Image.DecompressionBombError:
        raise UsageError(f"{path} has far too many pixels, and may be made to fill the memory: shrink it") from None
    most = Image.MAX_IMAGE_PIXELS
    if file.mode.startswith(("I", "F")):
        file.close()
        raise UsageError(f"{path} has more than 8 bits per pixel (mode {file.mode}): save it with 8")
    if most is not None and file.width * file.height > most:
        file.close()
        raise UsageError(f"{path} has more than {most:,} pixels, and may be made to fill the memory: shrink it")
    return file


def decoded_all(paths: Sequence[Path], size: int | None, fit: Fit, chunk: int = 512) -> Iterator[NDArray[np.uint8]]:
    """Chunks of equally large images, in order; several are decoded at a time."""
    waiting, shape = iter(paths), None
    with ThreadPoolExecutor() as pool:
        while part := list(islice(waiting, chunk)):
            images = list(pool.map(lambda path: decoded(path, size, fit), part))
            shape = shape or images[0].shape
            for path, image in zip(part, images, strict=True):
                if image.shape != shape:
                    raise UsageError(
                        f"{path} is {image.shape[2]}x{image.shape[1]}, {paths[0]} is {shape[2]}x{shape[1]}: "
                        "images share one size; ask for one with --data.source.size 32"
                    )
            yield np.stack(images)
