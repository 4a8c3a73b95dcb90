"""AutoAttack on a network and images: where its state lives, whether to compile, and how long it will take."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from doubly.attacks import attacked
from doubly.attacks.autoattack import AutoAttack, reference_version, warnings_about
from doubly.attacks.forward import FewShapes, Plain, can_compile, compiled
from doubly.data import Images
from doubly.evaluation.chunks import Chunks
from doubly.evaluation.network import model_sha256
from doubly.evaluation.remaining import Remaining
from doubly.evaluation.standing import Driver, Standing
from doubly.rundir import read_json

Compile = Literal["auto", "yes", "no"]
WORTH = 180.0  # seconds of uncompiled work from which compiling, half a minute for a small network, pays
RATES = {"cpu": 4e10, "cuda": 2e12}  # operations per second, roughly: counted and not timed, so that shards agree


class Unheard:
    """Nobody watches an evaluation."""

    def say(self, sentence: str) -> None: ...

    def images(self, done: int, of: int) -> None: ...

    def attack(self, chunk: int, of: int, part: str, standing: int, left: float | None) -> None: ...

    def left(self, seconds: float | None) -> None:
        """About once a second, while AutoAttack runs."""


@dataclass(frozen=True)
class Ensemble:
    """One run of AutoAttack: what, in which pieces, and where its state is kept."""

    attack: AutoAttack
    chunk: int = 250
    compile: Compile = "auto"
    state: Path | None = None
    exact: bool = False  # the state is kept in this very folder; otherwise in one inside it, named after the key
    shard: tuple[int, int] = (0, 1)
    keep: bool = False

    def run(self, model: nn.Module, images: Images, watch: Unheard) -> tuple[Standing, dict[str, Any]]:
        """(outcome, what evaluation.json says of it); the model is left as it was found."""
        device = next((p.device for p in model.parameters()), images.x.device)
        images = images.to(device)
        few = images.pixels(slice(0, 64)), images.y[:64]
        with attacked(model, "eval"):
            with torch.no_grad():
                classes = model(few[0][:1]).shape[1]
            clock = Remaining(self.attack, classes, self._mine(len(images)), self.chunk)
            key = self._key(model, images)
            forward = self._forward(model, few[0], key, len(images) * sum(clock.work.values()), watch)
            forward.passed = _ticking(clock, watch)
            chunks = Chunks(self._folder(key, forward.compiled), {**key, "compiled": forward.compiled})

            def tell(chunk: int, of: int, part: str, standing: int) -> None:
                watch.attack(chunk, of, part, standing, clock.seconds())

            found = Driver(
                model, forward, images, self.attack, classes, chunks, self.chunk, self.shard, self.keep, clock, tell
            ).run()
            said = [*warnings_about(model, *few), *found.warnings]
        return found, {
            "label": self.attack.label,
            "complete": found.complete,
            "chunks": f"{found.done} of {found.chunks}",
            "norm": self.attack.norm,
            "epsilon": self.attack.threat.radius,
            "seed": self.attack.seed,
            "chunk": self.chunk,
            "reference": reference_version(),
            "compiled": forward.compiled,
            "parts": list(self.attack.parts),
            "substitutions": self.attack.substitutions(classes),
            "warnings": said,
            "seconds": found.seconds,
        }

    def _mine(self, images: int) -> int:
        """How many of the images are in the chunks of this shard."""
        firsts = range(self.chunk * self.shard[0], images, self.chunk * self.shard[1])
        return sum(min(self.chunk, images - first) for first in firsts)

    def _key(self, model: nn.Module, images: Images) -> dict[str, Any]:
        """Everything that the outcome depends on."""
        return {
            "model": model_sha256(model),
            "data": images.sha256(),
            "norm": self.attack.norm,
            "epsilon": self.attack.threat.radius,
            "parts": list(self.attack.parts),
            "iterations": self.attack.iterations,
            "targets": self.attack.targets,
            "queries": self.attack.queries,
            "seed": self.attack.seed,
            "chunk": self.chunk,
            "version": reference_version(),
        }

    def _folder(self, key: dict[str, Any], compiled: bool) -> Path | None:
        if self.state is None or self.exact:
            return self.state
        text = json.dumps({**key, "compiled": compiled}, sort_keys=True)
        return self.state / hashlib.sha256(text.encode()).hexdigest()[:12]

    def _forward(
        self, model: nn.Module, x: Tensor, key: dict[str, Any], work: int, watch: Unheard
    ) -> Plain | FewShapes:
        """Compiled if that is asked for or pays; as an evaluation that was begun did it, so that it ends alike."""
        if not self._compiles(model, x, key, work):
            return Plain(model)
        if not can_compile(x.device):
            watch.say("not compiled: there is no C++ compiler here")
            return Plain(model)
        fast, said = compiled(model, x)
        watch.say(said)
        return fast or Plain(model)

    def _compiles(self, model: nn.Module, x: Tensor, key: dict[str, Any], work: int) -> bool:
        if self.compile != "auto":
            return self.compile == "yes"
        for choice in (True, False):
            folder = self._folder(key, choice)
            if folder is not None and (folder / "key.json").is_file():
                known = read_json(folder / "key.json")
                if isinstance(known, dict) and known.get("compiled") == choice:
                    return choice
        seconds = 0.5 * work * _operations(model, x) / RATES.get(x.device.type, 2e12)  # about half of the images stand
        return can_compile(x.device) and seconds > WORTH


def _ticking(clock: Remaining, watch: Unheard) -> Callable[[int, bool], None]:
    told = time.perf_counter()

    def passed(rows: int, graph: bool) -> None:
        nonlocal told
        clock.add(rows, graph)
        if time.perf_counter() - told > 1:
            told = time.perf_counter()
            watch.left(clock.seconds())

    return passed


def _operations(model: nn.Module, x: Tensor) -> int:
    """Of one pass of one image."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x[:1])
    return int(counter.get_total_flops())
