"""A run directory from a stranger names code; no verb imports it unless a person asks for it."""

import json
import sys

import pytest

from doubly.checkpoints.load import load_model
from doubly.cli import VERBS
from doubly.config.user_code import UserModel
from doubly.errors import UsageError

CANARY = """
from pathlib import Path
from torch import nn

(Path(__file__).parent / "executed").touch()


def build(classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
RUN = ["--epochs", "1", "--batch-size", "512", "--method.attack.steps", "1", "--validation.attack.steps", "1"]


@pytest.fixture
def stranger(cli, tmp_path, monkeypatch):
    """A run directory `run` whose configuration names code beside it, which was trained and forgotten."""
    (tmp_path / "canary.py").write_text(CANARY)
    result = cli("train", "digits.at", "--model", "canary:build", "--data.holdout", "0.2", "--output", "run", *RUN)
    assert result.code == 0, result.err
    forget(tmp_path)
    yield tmp_path
    sys.modules.pop("canary", None)


def forget(folder):
    sys.modules.pop("canary", None)
    (folder / "executed").unlink()


def test_no_verb_runs_the_code_of_a_file(cli, stranger):
    space = {"model": [{"kind": "model.user", "function": "canary:build"}]}
    (stranger / "space.json").write_text(json.dumps(space))
    calls = {
        "train": [
            ["--resume", "--output", "run", "--epochs", "2"],
            ["--config", "run/config.json", "--output", "new"],
            ["--config", "run/config.json", "--dry-run"],
            ["digits.at", "--set", f"model={json.dumps(space['model'][0])}", "--output", "set"],
        ],
        "evaluate": [["run", "--no-trust"]],
        "check": [["run"]],
        "repair": [["run"]],
        "frontier": [["run"]],
        "export": [["run", "--output", "w.safetensors"], ["run", "--output", "w.onnx"], ["run", "--output", "w.pt2"]],
        "card": [["run"]],
        "leaderboard": [["run"], ["--entry", "run"]],
        "push": [["run", "--dry-run"]],
        "search": [
            ["digits.at", "--space", "space.json", "--trials", "1", "--output", "search"],
            ["--config", "run/config.json", "--trials", "1", "--output", "search"],
        ],
        "report": [["run", "--output", "report"]],
        "compare": [["run", "run"]],
        "watch": [["run", "--once"]],
        "reproduce": [["demo", "--dry-run"]],
        "list": [["kinds"]],
        "completion": [["--print", "bash"]],
        "data": [["list"]],
        "doctor": [[]],
    }
    assert set(VERBS) <= set(calls), f"say here what {set(VERBS) - set(calls)} does with a stranger's run"
    refused = []
    for verb, words in calls.items():
        for arguments in words:
            result = cli(verb, *arguments)
            assert not (stranger / "executed").exists() and "canary" not in sys.modules, (verb, arguments)
            assert "Traceback" not in result.err, result.err
            if "names code, 'canary:build'" in result.err and "--trust-code" in result.err:
                refused.append(verb)
    assert {"train", "search", "evaluate", "check", "repair", "frontier", "export"} <= set(refused)


def test_the_code_runs_once_a_person_asks_for_it(cli, stranger):
    calls = [
        ["evaluate", "run", "--no-trust", "--model", "canary:build"],
        ["evaluate", "run", "--no-trust", "--trust-code"],
        ["train", "--resume", "--output", "run", "--trust-code"],
        ["repair", "run", "--trust-code", "--output", "repaired"],
        ["evaluate", "repaired", "--no-trust", "--model", "canary:build"],
    ]
    for words in calls:
        result = cli(*words)
        assert result.code == 0, (words, result.err)
        assert (stranger / "executed").exists(), words
        forget(stranger)
    with pytest.raises(UsageError, match="names code"):
        load_model(stranger / "run")
    load_model(stranger / "run", architecture=UserModel("canary:build"))
