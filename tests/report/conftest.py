import numpy as np
import pytest

from doubly.evaluation.result import EvalResult
from doubly.rundir import RunDir, append_metrics, write_json

THREAT, RULE = {"kind": "threat.linf", "radius": 0.15}, {"kind": "step.sign", "size": 0.0375}
ATTACK = {"kind": "attack.pgd", "threat": THREAT, "steps": 20, "rule": RULE, "restarts": 1, "loss": None}
PROTOCOL = {"attack": ATTACK, "seed": 0, "split": "test", "checkpoint": "last", "data_sha256": "0123456789abcdef"}


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run directory with a given accuracy under attack, lower for the first classes."""

    def make(
        name="digits.imbalanced.at", seed=0, robust=0.6, protocol=PROTOCOL, classes=10, n=400, epochs=6, **settings
    ):
        generator = np.random.default_rng([seed, len(name)])
        path = tmp_path / "runs" / f"{name}-s{seed}-{len(list(tmp_path.rglob('config.json')))}"
        path.mkdir(parents=True)
        names = classes if isinstance(classes, list) else [str(index) for index in range(classes)]
        y = np.arange(n) % len(names)
        share = np.clip(robust + 0.3 * (y / len(names) - 0.5), 0, 1)
        clean, pgd = (np.where(generator.random(n) < p, y, (y + 1) % len(names)) for p in (0.95, share))
        write_json(path / "config.json", {"kind": "run", "name": name, "seed": seed, "epochs": epochs, **settings})
        command = ["doubly", "train", name, "--seed", str(seed), "--output", "runs/with space"]
        write_json(path / "environment.json", {"python": "3.11", "torch": "2.13", "commit": "abc", "command": command})
        write_json(
            path / "evaluation.json", EvalResult(y, tuple(names), {"clean": clean, "pgd": pgd}, protocol).summary()
        )
        for epoch in range(epochs):
            grown = 1 - np.exp(-4 * (epoch + 1) / epochs)
            row = {"epoch": epoch, "loss": 2.3 - 1.5 * grown + 0.05 * generator.normal(), "lr": 0.1, "seconds": 2.0}
            if not name.endswith(".at"):
                row |= {"r": 1.0, "weight_ess": 1 - 0.5 * grown + 0.02 * generator.normal()}
            if epoch % 2 or epoch == epochs - 1:
                noise = 0.02 * generator.normal()
                row["validation"] = {
                    "sa": 0.95 * grown,
                    "ra_pgd": robust * grown + noise,
                    "ra_tail_30": 0.3 * grown,
                    "n": 100,
                }
            append_metrics(RunDir(path), row)
        return path

    return make
