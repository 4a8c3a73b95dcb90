"""Damaged checkpoints: loaded, exported, evaluated and resumed."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.damage import damage_file
from tests.chaos.outcomes import Outcome, judge_call, judge_cli
from tests.chaos.prepared import EVALUATE, TRAIN, fingerprint, loaded_weights, weights

import doubly.checkpoints.load

VERBS = ("load",) * 6 + ("export",) * 3 + ("resume",) * 2 + ("evaluate",)


def damaged_checkpoints(base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Damage any file of a checkpoint; what is loaded or trained on is the network that was saved, or a refusal."""
    doubly.checkpoints.load.RETRY_SECONDS = 0.0  # nobody is writing
    draw, run = random.Random(seed), Path("run")
    whole, half = fingerprint(base / "whole"), loaded_weights(base / "half")
    for _ in range(count):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(base / "half", run)
        for left in (run / "checkpoints").glob(".last.*"):
            shutil.rmtree(left)
        verb, has_previous = draw.choice(VERBS), draw.random() < 0.4
        if has_previous:
            shutil.copytree(base / "earlier" / "checkpoints" / "last", run / "checkpoints" / ".last.previous")
        files = sorted(path for path in (run / "checkpoints" / "last").iterdir())
        note = f"{verb}, {'with' if has_previous else 'without'} previous: {damage_file(draw.choice(files), draw)}"
        yield _use(verb, run, whole, half, note)


def _use(verb: str, run: Path, whole: object, half: object, note: str) -> Outcome:
    if verb == "load":
        outcome, loaded = judge_call(lambda: loaded_weights(run), note)
        is_right = loaded in (None, half)
    elif verb == "resume":
        outcome, result = judge_cli((*TRAIN, run), note)
        is_right = result.code != 0 or fingerprint(run) == whole
    elif verb == "export":
        shutil.rmtree("out", ignore_errors=True)
        outcome, result = judge_cli(("export", run, "--output", "out/w.safetensors"), note)
        is_right = result.code != 0 or weights(Path("out/w.safetensors")) == half
    else:
        outcome, _ = judge_cli(("evaluate", run, *EVALUATE), note)
        is_right = True
    return outcome if is_right else Outcome("lost", f"other weights, silently: {note}")
