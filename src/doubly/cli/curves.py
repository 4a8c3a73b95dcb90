"""Small curves and bars for the terminal: a braille character holds two by four dots, a block eight steps."""

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # a character's left and right column, from the top
TINY = 1e-9  # rounding of a place
EIGHTHS = " ▏▎▍▌▋▊▉"


def curve(points: Sequence[Point], right: float, width: int, height: int) -> list[str]:
    """The line through points of rising x in 0…right, on `height` lines; no peak is lost, however many points."""
    rows = 4 * height
    cells = [[0x2800] * width for _ in range(height)]
    for column, (low, high) in _spans(_stretched(points, right, 2 * width - 1, rows - 1)).items():
        bottom = math.floor(low + 0.5 + TINY)  # a line at 45° fills one dot in each column, not two
        for dot in range(bottom, max(bottom, math.ceil(high - 0.5 - TINY)) + 1):
            row = rows - 1 - dot
            cells[row // 4][column // 2] |= DOTS[column % 2][row % 4]
    return ["".join(map(chr, line)) for line in cells]


def bar(share: float, width: int) -> str:
    """A bar that fills this share of the width."""
    full, eighths = divmod(round(8 * width * min(1.0, max(0.0, share))), 8)
    return ("█" * full + EIGHTHS[eighths] * (eighths > 0)).ljust(width)


def _stretched(points: Sequence[Point], right: float, columns: int, rows: int) -> list[Point]:
    """To 0…columns, and from lowest to highest to 0…rows; what does not change lies in the middle."""
    values = [y for _, y in points]
    lowest, height = min(values), max(values) - min(values)
    return [
        (columns * x / right if right else 0.0, rows * (y - lowest) / height if height else rows // 2)
        for x, y in points
    ]


def _spans(points: Sequence[Point]) -> dict[int, Point]:
    """Lowest and highest place of the line in every column of dots."""
    spans = {round(x): (y, y) for x, y in points[:1]}
    for (x0, y0), (x1, y1) in pairwise(points):
        slope = (y1 - y0) / (x1 - x0)
        for column in range(round(x0), round(x1) + 1):
            ends = [y0 + slope * (x - x0) for x in (max(x0, column - 0.5), min(x1, column + 0.5))]
            low, high = spans.get(column, (ends[0], ends[0]))
            spans[column] = (min(low, *ends), max(high, *ends))
    return spans
