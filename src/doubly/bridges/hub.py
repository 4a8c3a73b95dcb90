"""A folder that the Hugging Face Hub understands, and its upload. huggingface_hub is imported only for the upload."""

import re
from pathlib import Path
from typing import Any

from doubly.bridges.logger import require
from doubly.checkpoints.export import export_run
from doubly.checkpoints.load import load_trained_weights
from doubly.errors import UsageError
from doubly.files import make_folder, write_json, write_text
from doubly.report.card import model_card
from doubly.report.run_result import RunResult, read_run
from doubly.rundir import RunDir, read_tree
from doubly.text import printable
from doubly.version import __version__

PLACES = ("root", "path", "weights")  # settings that hold paths of this machine


def write_hub_folder(directory: Path, folder: Path, checkpoint: str = "last", name: str = "") -> list[Path]:
    """Write model.safetensors, config.json and README.md, and nothing else of a run.

    Paths of this machine are left out of config.json.

    Args:
        directory: The run directory, evaluated.
        folder: Where to write.
        checkpoint: last or best.
        name: Name of the network; by default that of the run.

    Returns:
        The files.

    Raises:
        UsageError: If it is not a run directory, has no such checkpoint, or this one was not evaluated.
    """
    run = read_run(directory)
    card = model_card(run, name)
    info = load_trained_weights(directory, checkpoint).info
    _check_evaluated(run, checkpoint, info)
    make_folder(folder)
    export_run(directory, folder / "model.safetensors", checkpoint)
    about: dict[str, Any] = {"library_name": "doubly", "doubly_version": __version__, "checkpoint": checkpoint}
    about |= {key: info.get(key) for key in ("classes", "channels", "image_size", "epoch")}
    write_json(folder / "config.json", {**about, "run": _without_places(read_tree(RunDir(directory).config))})
    write_text(folder / "README.md", card)
    return [folder / file for file in ("README.md", "config.json", "model.safetensors")]


def check_repository(name: str) -> None:
    """Refuse what cannot be the name of a repository on the Hub.

    Raises:
        UsageError: If it is not of the form OWNER/NAME.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name, re.ASCII):
        raise UsageError(
            f"'{printable(name)[:100]}' is no repository of the Hub: write OWNER/NAME, as in me/robust-digits"
        )


def upload(folder: Path, repository: str, private: bool = True) -> str:
    """Upload a folder to the Hub, with the login that huggingface_hub finds.

    Args:
        folder: What `write_hub_folder` wrote.
        repository: OWNER/NAME.
        private: Whether a new repository is private.

    Returns:
        The address of the repository.

    Raises:
        UsageError: If the package is missing, or the Hub cannot be reached or refuses it.
    """
    check_repository(repository)
    require("huggingface_hub", "the Hub", "hub")
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Upload by doubly push")
    except Exception as error:  # of the network, the server and the login; the library has many
        reason = printable((str(error).strip().splitlines() or [type(error).__name__])[0])[:160]
        raise UsageError(
            f"nothing was uploaded to {repository} ({type(error).__name__}: {reason}): check the network, log in with "
            "`hf auth login`, or keep the files with --output DIR and upload them yourself"
        ) from None
    return str(url)


def _check_evaluated(run: RunResult, checkpoint: str, info: dict[str, Any]) -> None:
    """Refuse weights whose numbers are not those of the card."""
    measured, epoch = run.evaluation["protocol"].get("checkpoint", checkpoint), run.evaluation.get("epoch")
    if measured != checkpoint or epoch not in (None, info.get("epoch")):
        raise UsageError(
            f"the evaluation of {run.path} is of its checkpoint {printable(str(measured))[:20]} after epoch "
            f"{printable(str(epoch))[:20]}, and not of {checkpoint} after epoch {info.get('epoch')}: call doubly "
            f"evaluate {run.path} --checkpoint {checkpoint} first, so that the card is about these weights"
        )


def _without_places(tree: Any) -> Any:
    """Return a tree of settings without the paths of this machine."""
    if isinstance(tree, dict):
        return {key: None if key in PLACES and isinstance(v, str) else _without_places(v) for key, v in tree.items()}
    return [_without_places(value) for value in tree] if isinstance(tree, list) else tree
