"""Every file in examples/ runs as a newcomer would run it, and what it prints makes sense."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
ROBUST = dict.fromkeys(
    ("your_model.py", "your_loop.py", "your_method.py", "your_dataset.py"), 0.5
)  # least accuracy under attack; chance is 0.1


def test_the_promised_examples_are_there():
    assert set(ROBUST) <= {example.name for example in EXAMPLES}


SLOW = (
    "compositional_quadratic.py",
    "convergence.py",
    "portfolio.py",
    "dro_hyperparameters.py",
)  # tests/bilevel asks the same of smaller problems


@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=[pytest.mark.slow] if each.name in SLOW else []) for each in EXAMPLES],
    ids=lambda example: example.name,
)
def test_an_example_runs_and_prints_a_sensible_result(example, tmp_path):
    command = [sys.executable, "-W", "error", str(example)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and done.stderr == ""
    assert list(tmp_path.iterdir()) == []
    if example.name in ROBUST:
        shown = re.search(r"accuracy ([\d.]+)%, under attack ([\d.]+)%, weakest classes ([\d.]+)%", done.stdout)
        clean, robust, tail = (float(number) / 100 for number in shown.groups())
        assert 1 >= clean > robust > tail >= 0.1
        assert clean > 0.85 and robust > ROBUST[example.name]
    if example.name == "your_attack.py":  # an attack that is weak to train with: docs/adding.md
        weak, strong = re.findall(r"brightness ([\d.]+)%, PGD ([\d.]+)%", done.stdout)
        assert float(weak[0]) > 80 and float(strong[1]) > float(weak[1]) + 5


def test_your_model_is_five_lines_after_the_imports():
    text = (EXAMPLES[0].parent / "your_model.py").read_text()
    lines = text.split("from doubly import")[1].splitlines()[1:]
    assert len([line for line in lines if line.strip() and not line.startswith("print")]) == 5
