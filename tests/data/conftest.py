"""For tests of data: where the real files are, on a machine that has them."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data():
    folder = os.environ.get("DOUBLY_DATA")
    if not folder:
        pytest.skip("set DOUBLY_DATA to a folder with real files of the datasets")
    return Path(folder)
