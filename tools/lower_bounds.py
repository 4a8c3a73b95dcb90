"""Print the lowest versions that pyproject.toml allows as requirements, with torch as constraints.txt pins it.

`make lower-bounds` installs them into an environment of their own and runs a fast part of the tests there. torch is
the exception because one build of it is large, and older ones need not exist for the Python that is used.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Print one requirement per line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for requirement in project["dependencies"]:
        name, _, lowest = requirement.partition(">=")
        if name != "torch":
            print(f"{name}=={lowest}")
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    for name in ("torch", "pytest", "hypothesis"):
        print(re.search(rf"^{name}==.*$", pins, re.MULTILINE)[0])  # type: ignore[index]


if __name__ == "__main__":
    main()
