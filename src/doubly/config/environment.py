"""The environment of a run: versions, machine and command, which are needed to repeat it."""

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from doubly.version import __version__


def command_line() -> str:
    """Return the command that was typed."""
    return shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "doubly"), *sys.argv[1:]])


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device, threads and command, as environment.json keeps them."""
    return {
        "doubly": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "numpy", "scikit-learn", "safetensors")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "command": command_line(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """Return the commit of the checkout that the package runs from, if it is one."""
    folder = Path(__file__).parents[1]
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()  # noqa: S603 - a fixed list
    except (OSError, subprocess.SubprocessError):
        return None
