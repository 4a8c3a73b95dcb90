"""A small folder of pictures, for the tests of folders and of the cache on disk."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def noise():
    """noise(name, …): a picture of random pixels that follow from the name, 6 wide and 5 high by default."""

    def picture(*name, width=6, height=5):
        random = np.random.default_rng(list(repr(name).encode()))
        return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))

    return picture


@pytest.fixture
def save():
    """save(path, picture): write a picture, and the folders above it."""

    def write(path, image, **options):
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, **options)

    return write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache on disk, not the one of the user who runs the tests."""
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path, noise, save, cache):
    """Three classes of 7, 8 and 9 pictures to train on, 2 each to test on: 24 and 6."""
    folder = tmp_path / "data"
    for part, counts in (("train", (7, 8, 9)), ("test", (2, 2, 2))):
        for label, count in zip(("ant", "bee", "cow"), counts, strict=True):
            for number in range(count):
                save(folder / part / label / f"{number}.png", noise(part, label, number))
    return folder
