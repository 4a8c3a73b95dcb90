"""A picture with some images of every class, to look at before training on them."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from doubly.data.images import Images

if TYPE_CHECKING:
    from PIL.Image import Image

GAP = 2  # pixels between images
MAX_ROWS = 100


def contact_sheet(images: Images, columns: int = 12) -> "Image":
    """Draw a row per class with its name, its count and its first images, enlarged where they are tiny.

    Args:
        images: The images.
        columns: Most images of a class.

    Returns:
        The picture, with at most 100 classes.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width = images.x.shape[2:]
    zoom = max(1, 48 // max(height, width))
    row, column = max(zoom * height, 12) + GAP, zoom * width + GAP
    font = ImageFont.load_default(11)
    counts = images.counts().tolist()
    columns = min(columns, max(counts))
    captions = [f"{name} ({count:,})" for name, count in zip(images.classes, counts, strict=True)][:MAX_ROWS]
    left = 2 * GAP + int(max(font.getlength(caption) for caption in captions))
    sheet = Image.new("RGB", (left + columns * column, GAP + len(captions) * row), "white")
    draw = ImageDraw.Draw(sheet)
    for label, caption in enumerate(captions):
        top = GAP + label * row
        draw.text((GAP, top + row // 2 - 7), caption, "black", font)
        rows = (images.y == label).nonzero().squeeze(1)[:columns]
        pixels = (images.pixels(rows) * 255).round().to(torch.uint8).cpu().numpy()
        for index, image in enumerate(pixels):
            gray = image.shape[0] != 3  # one channel, or a number of channels that are no colors
            picture = Image.fromarray(image[0] if gray else np.ascontiguousarray(image.transpose(1, 2, 0)))
            sheet.paste(
                picture.convert("RGB").resize((zoom * width, zoom * height), Image.Resampling.NEAREST),
                (left + index * column, top),
            )
    return sheet
