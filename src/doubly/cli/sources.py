"""Images by name: a dataset, a recipe, or files of one's own."""

from pathlib import Path
from typing import Any

from doubly.errors import UsageError


def run_of(name: str, root: str | None, changes: list[str]) -> Any:
    """A recipe as it is; a dataset, folder or file with all its images."""
    from doubly.cli import changed, with_root
    from doubly.config import Data, Run
    from doubly.config.serialize import suggestion
    from doubly.data import DATASETS, Arrays, ImageFolder
    from doubly.methods import Standard
    from doubly.models import SmallCNN
    from doubly.recipes import RECIPES, recipe

    place = Path(root or ".") / name
    if name in RECIPES:
        run = recipe(name)
    elif name in DATASETS:
        run = Run(Data(DATASETS[name]()), SmallCNN(), Standard())
    elif place.is_dir():
        run = Run(Data(ImageFolder(name)), SmallCNN(), Standard())
    elif place.is_file():
        run = Run(Data(Arrays(name)), SmallCNN(), Standard())
    else:
        raise UsageError(
            f"there is no dataset, recipe, folder or file '{name}'{suggestion(name, [*DATASETS, *RECIPES])}"
        )
    paths = [change if change.startswith("data.") else f"data.source.{change}" for change in changes]
    return with_root(changed(run, paths), root)
