import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def problems():
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "problems.py")))
