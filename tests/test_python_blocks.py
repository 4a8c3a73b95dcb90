"""Every Python block in the pages runs, those of a page one after another, or is quoted from an example that runs."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from doubly import AT, DONE, PGD, Batch, LinfBall, TrainStep

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py")))


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def context():
    """Return what the pages use without making it: images, a network, a dataset, a place in training."""
    random = torch.Generator().manual_seed(0)
    # 3072 pixels: an attack then breaks this network at once, and AutoAttack has nothing left to do.
    x, y = torch.rand(40, 3, 32, 32, generator=random), torch.arange(40) % 10
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    images = {
        "x": x[:30],
        "y": y[:30],
        "x_held_out": x[:30],
        "y_held_out": y[:30],
        "x_test": x[30:],
        "y_test": y[30:],
        "dataset": list(zip(x, y.tolist(), strict=True)),
    }
    ours = {"Batch": Batch, "TrainStep": TrainStep, "DONE": DONE, "PGD": PGD, "LinfBall": LinfBall}
    method = AT(PGD(LinfBall(0.1), steps=1))
    return images | ours | {"model": model, "network": model, "method": method, "epoch": 0, "step": 0, "progress": 0.0}


def write_checkpoints(network):
    """Write files in the formats of robustness and MAIR."""
    weights, ones = network.state_dict(), torch.ones(3, 1, 1)
    wrapped = {f"module.{part}{name}": t for part in ("model.", "attacker.model.") for name, t in weights.items()}
    wrapped |= {"module.normalizer.new_mean": 0.5 * ones, "module.normalizer.new_std": ones}
    torch.save({"model": wrapped, "epoch": 3}, "robustness.pt")
    torch.save({"rmodel": {"n_classes": torch.tensor(10), **{f"model.{k}": t for k, t in weights.items()}}}, "best.pth")


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = context()
    write_checkpoints(names["network"])
    with torch.random.fork_rng():
        for block in python_blocks(page):
            if block not in EXAMPLES:
                short = re.sub(r"^model = \.\.\..*\n", "", block, flags=re.MULTILINE).replace("epochs=30", "epochs=2")
                exec(compile(short, str(page), "exec"), names)


def test_the_page_on_adding_parts_quotes_the_examples():
    quoted = python_blocks(ROOT / "docs" / "adding.md")
    assert len(quoted) >= 3 and all(block in EXAMPLES for block in quoted)
