"""Every file in examples/ runs, prints a sensible result and leaves no file behind."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
TRAINED = {"your_model.py", "your_loop.py", "your_method.py", "your_dataset.py"}  # print three accuracies at the end
SLOW = {"compositional_quadratic.py", "convergence.py", "portfolio.py", "dro_hyperparameters.py"}
# These print what the libraries that are installed did.
BRIDGES = {"your_loggers.py", "your_runtime.py", "your_leaderboard.py", "your_framework.py"}
BRIDGES |= {"bridge_attacks.py", "bridge_models.py", "bridge_data.py"}
# tests/bilevel solves smaller problems of the same kind as the slow ones.


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=[pytest.mark.slow] if path.name in SLOW else []) for path in EXAMPLES],
    ids=lambda example: example.name,
)
def test_an_example_runs_and_prints_a_sensible_result(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        runpy.run_path(str(example), run_name="__main__")
    output, errors = capsys.readouterr()
    assert output.strip() and errors == "" and list(tmp_path.iterdir()) == []
    if example.name in TRAINED:
        shown = re.search(r"accuracy ([\d.]+)%, under attack ([\d.]+)%, weakest classes ([\d.]+)%", output)
        clean, robust, tail = (float(number) / 100 for number in shown.groups())
        assert clean > 0.85 and clean > robust > 0.5 and robust > tail >= 0.1  # chance is 0.1
    if example.name == "your_attack.py":  # to train with a weak attack helps little against PGD: docs/adding.md
        weak, strong = re.findall(r"brightness ([\d.]+)%, PGD ([\d.]+)%", output)
        assert float(weak[0]) > 80 and float(strong[1]) > float(weak[1]) + 5


def test_the_lists_name_examples_that_exist_and_your_model_needs_five_lines():
    assert TRAINED | SLOW | BRIDGES | {"your_attack.py"} == {example.name for example in EXAMPLES}
    text = (EXAMPLES[0].parent / "your_model.py").read_text()
    lines = text.split("from doubly import")[1].splitlines()[1:]
    assert len([line for line in lines if line.strip() and not line.startswith("print")]) == 5
