"""An evaluation under PGD-20 and margin against the same at an earlier commit. A part of run.py.

The network is a narrow ResNet trained for some seconds on digits of 32x32 pixels. Both commits evaluate it in processes
of their own that take turns; `--accuracy-only` attacks an image only until it is misclassified.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lines import Line, Outcome, Settings, medians, ratio, taking_turns

ROOT = Path(__file__).parents[1]
BEFORE = "5496fc6"  # the last commit before batch norm was folded
EPSILON = 0.1
TRAIN = """
import sys, torch
from safetensors.torch import save_file
from doubly import AT, LinfBall, train
from doubly.attacks import NFGSM
from doubly.data import Digits
from doubly.models import NarrowResNet

def large(images):
    return torch.nn.functional.interpolate(images.pixels(slice(None)), 32).expand(-1, 3, -1, -1).contiguous()

torch.manual_seed(0)
splits = Digits().load()
model = NarrowResNet(16, 2).build(3, 10, [0.5] * 3, [0.5] * 3)
train(model, (large(splits.train), splits.train.y), AT(NFGSM(LinfBall(float(sys.argv[2])))), epochs=2, batch_size=64)
tensors = {**model.state_dict(), "x": large(splits.test), "y": splits.test.y}
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, sys.argv[1])
"""
EVALUATE = """
import sys, time, torch
from safetensors.torch import load_file
from doubly import LinfBall, evaluate
from doubly.models import NarrowResNet

tensors = load_file(sys.argv[1])
x, y = tensors.pop("x")[: int(sys.argv[3])], tensors.pop("y")[: int(sys.argv[3])]
model = NarrowResNet(16, 2).build(3, 10, [0.5] * 3, [0.5] * 3).to(memory_format=torch.channels_last)
model.load_state_dict(tensors)
settings = {"trust": False, **({"accuracy_only": True} if sys.argv[4] == "stopping" else {})}
start = time.perf_counter()
result = evaluate(model, (x, y), LinfBall(float(sys.argv[2])), ["pgd", "margin"], **settings)
print("RESULT", time.perf_counter() - start, result.robust_accuracy("pgd"), result.robust_accuracy("margin"))
"""


def measure(settings: Settings) -> Outcome:
    images = 32 if settings.quick else 360
    accuracies: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), Path(name) / "network.safetensors"
        words = [shutil.which("git") or "git", "-C", str(ROOT), "archive", BEFORE, "src"]
        archive = subprocess.run(words, capture_output=True, check=False)
        if archive.returncode:
            return Outcome([Line("evaluation / before", aim=0.5, note=f"commit {BEFORE} is not in this clone")])
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        sources = {"before": folder / "src", "now": ROOT / "src", "now, --accuracy-only": ROOT / "src"}

        def call(source: Path, code: str, *words: str) -> list[str]:
            command = [sys.executable, "-c", code, str(file), str(EPSILON), *words]
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=True
            )
            return done.stdout.split()

        call(ROOT / "src", TRAIN)

        def seconds(label: str) -> float:
            mode = "stopping" if "only" in label else "full"
            words = call(sources[label], EVALUATE, str(images), mode)
            start = words.index("RESULT")
            accuracies[label] = words[start + 2 : start + 4]
            return float(words[start + 1])

        spent = taking_turns({label: lambda label=label: seconds(label) for label in sources}, settings.rounds)
    note = f"Accuracy under PGD and margin: {json.dumps(accuracies)}."
    lines = [ratio(spent, "now", "before"), ratio(spent, "now, --accuracy-only", "before", 0.5)]
    sizes = f"narrow ResNet on {images} digits of 3x32x32, PGD-20 and margin, ε = {EPSILON}, before: {BEFORE}"
    return Outcome(lines, sizes, medians(spent), [note])
