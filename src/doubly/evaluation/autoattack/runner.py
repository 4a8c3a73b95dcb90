"""AutoAttack on a network and images: where its state lives, whether to compile, and how long it will take."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from doubly.attacks import attacked, device_of
from doubly.attacks.autoattack import AutoAttack, reference_version, warnings_about
from doubly.attacks.compiled import CompiledForward, PlainForward, can_compile, compile_forward
from doubly.data import Images
from doubly.distributed import collectives as parallel
from doubly.distributed.rank_zero import known_to_all, together
from doubly.errors import UsageError
from doubly.evaluation.autoattack.driver import Driver
from doubly.evaluation.autoattack.eta import Remaining
from doubly.evaluation.autoattack.outcome import Standing
from doubly.evaluation.autoattack.state import Chunks
from doubly.evaluation.memory import InPieces, Pieces
from doubly.evaluation.network import model_sha256
from doubly.rundir import read_json

Compile = Literal["auto", "yes", "no"]
STANDING = 0.5  # share of the images that may stand, for estimates
WORTH = 180.0  # seconds of uncompiled work from which compiling, half a minute for a small network, pays
RATES = {"cpu": 4e10, "cuda": 2e12}  # operations per second, roughly: counted and not timed, so that shards agree


class Callback:
    """Somebody who looks on at an evaluation; this one does not listen."""

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
    in_this_folder: bool = False  # the state; otherwise it is in one inside, named after the key
    shard: tuple[int, int] = (0, 1)
    keep: int = 0

    def run(
        self, model: nn.Module, images: Images, watch: Callback, pieces: Pieces | None = None
    ) -> tuple[Standing, dict[str, Any]]:
        """(outcome, what evaluation.json says of it); the model is left as it was found."""
        device, pieces = device_of(model), pieces or Pieces(watch.say)
        few = images.pixels(slice(0, 64)).to(device), images.y[:64].to(device)
        asked = InPieces(model, pieces)
        with attacked(model, "eval"):
            with torch.no_grad():
                classes = model(few[0][:1]).shape[1]
            clock = Remaining(self.attack, classes, self._mine(len(images)))
            key = self.key(model, images)
            forward, fast = together(
                lambda: self._forward(model, few[0], key, len(images), sum(clock.work.values()), watch)
            )
            if not parallel.gather(torch.tensor([int(fast)])).all():  # one way for all processes
                forward, fast = PlainForward(model), False
            forward.count = _ticking(clock, watch)
            chunks = self._chunks(key, fast)

            def tell(chunk: int, of: int, part: str, standing: int) -> None:
                watch.attack(chunk, of, part, standing, clock.seconds())

            driver = Driver(
                asked,
                InPieces(forward, pieces),
                images,
                self.attack,
                classes,
                chunks,
                self.chunk,
                self.shard,
                self.keep,
                clock,
                tell,
                pieces.again,
            )
            known, examples = together(driver.own, patiently=True)
            found = driver.outcome(*known_to_all(known, examples, self.chunk, images.pixels(slice(0, 1))))
            said = [*warnings_about(asked, *few), *found.warnings]
        return found, {
            "label": self.attack.label if found.complete else "AutoAttack, incomplete",
            "complete": found.complete,
            "chunks": f"{found.done} of {found.chunks}",
            "norm": self.attack.norm,
            "epsilon": self.attack.threat.radius,
            "seed": self.attack.seed,
            "chunk": self.chunk,
            "reference": reference_version(),
            "compiled": fast,
            "parts": list(self.attack.parts),
            "substitutions": self.attack.substitutions(classes),
            "warnings": said,
            "seconds": found.seconds,
            "state": None if chunks.folder is None else str(chunks.folder),
        }

    def check(self, model: nn.Module, images: Images) -> None:
        """Before any work: a folder that was named must not belong to another evaluation."""
        if self.state is not None and self.in_this_folder and (self.state / "key.json").is_file():
            known = read_json(self.state / "key.json")
            fast = isinstance(known, dict) and known.get("compiled") is True
            self._chunks(self.key(model, images), fast).open()

    def finished(self, model: nn.Module, images: Images) -> bool:
        """Whether nothing is left to do but to put it together; `compile` is what it was begun with."""
        chunks = self._chunks(self.key(model, images), self.compile == "yes")
        try:
            return chunks.finished(-(-len(images) // self.chunk), self.attack.parts)
        except UsageError:  # a damaged file
            return False

    def _mine(self, images: int) -> int:
        """How many of the images are in the chunks of this shard."""
        firsts = range(self.chunk * self.shard[0], images, self.chunk * self.shard[1])
        return sum(min(self.chunk, images - first) for first in firsts)

    def key(self, model: nn.Module, images: Images) -> dict[str, Any]:
        """Everything that the outcome depends on, but whether it was compiled."""
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

    def _chunks(self, key: dict[str, Any], fast: bool) -> Chunks:
        whole = Chunks(self.state, {**key, "compiled": fast})
        if self.state is None or self.in_this_folder:
            return whole
        return replace(whole, folder=self.state / whole.digest[:12])

    def _forward(
        self, model: nn.Module, x: Tensor, key: dict[str, Any], images: int, work: int, watch: Callback
    ) -> tuple[PlainForward | CompiledForward, bool]:
        """How to call the network, and whether its outcome counts as compiled.

        Compiled if that is asked for or pays; an evaluation that was begun goes on as it was begun, and so ends alike.
        """
        begun = self._begun(key)
        if begun is not None:
            chunks = self._chunks(key, begun)
            chunks.open()
            if chunks.finished(-(-images // self.chunk), self.attack.parts):
                return PlainForward(model), begun  # nothing is left to do but to put it together
        wanted = self.compile == "yes" if begun is None else begun
        if begun is None and self.compile == "auto":
            wanted = STANDING * images * work * _operations(model, x) / RATES.get(x.device.type, 2e12) > WORTH
        if not wanted:
            return PlainForward(model), False
        fast, said = (
            compile_forward(model, x) if can_compile(x.device) else (None, "not compiled: there is no C++ compiler")
        )
        watch.say(said)
        if fast is None and begun:
            raise UsageError(
                f"{self._chunks(key, True).folder} was begun with a compiled network, and here it is {said}: go on "
                "where it was begun, or delete that folder"
            )
        return fast or PlainForward(model), fast is not None

    def _begun(self, key: dict[str, Any]) -> bool | None:
        """Whether the evaluation that was begun here is compiled; None if none was, or another one is asked for."""
        for choice in (True, False):
            folder = self._chunks(key, choice).folder
            if folder is not None and (folder / "key.json").is_file():
                known = read_json(folder / "key.json")
                asked = self.compile == "auto" or (self.compile == "yes") == choice
                if asked and isinstance(known, dict) and known.get("compiled") is choice:
                    return bool(choice)
        return None


def _ticking(clock: Remaining, watch: Callback) -> Callable[[int, bool], None]:
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
