"""AutoAttack's driver: the attacks in their order, each on the samples of a chunk that still stand, resumable.

The reference reseeds for every batch, and Square shares its draws within one: so the outcome belongs to the chunk, and
the chunk's size to the protocol. One chunk of all samples gives what the reference gives.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from doubly.attacks import device_of
from doubly.attacks.autoattack import AutoAttack, Part
from doubly.attacks.forward import Forward
from doubly.bilevel.rows import flat
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.evaluation.autoattack.eta import Remaining
from doubly.evaluation.autoattack.outcome import Standing, State, finished, merged
from doubly.evaluation.autoattack.state import Chunks
from doubly.evaluation.network import sure
from doubly.threat import holds, is_image


class Samples(Protocol):
    """Images as the driver needs them."""

    @property
    def y(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def pixels(self, indices: slice) -> Tensor: ...


@dataclass(frozen=True)
class Driver:
    """`forward` is how the attacks call the network; what they return is judged by the network itself."""

    model: nn.Module
    forward: Forward
    samples: Samples
    attack: AutoAttack
    classes: int
    chunks: Chunks
    size: int = 250
    shard: tuple[int, int] = (0, 1)
    keep: int = 0  # at most so many of the attacked images
    clock: Remaining | None = None
    tell: Callable[[int, int, Part, int], None] = lambda chunk, of, part, standing: None
    again: Callable[[Callable[[], Tensor]], Tensor] = lambda work: work()  # begins an attack anew if memory runs out

    def __post_init__(self) -> None:
        number, of = self.shard
        if not 0 <= number < of:
            raise UsageError(f"a shard is k of n with 0 <= k < n, got {number} of {of}")
        if self.size < 1:
            raise UsageError(f"a chunk has at least 1 image, got {self.size}")

    @property
    def count(self) -> int:
        return -(-len(self.samples) // self.size)

    def run(self) -> Standing:
        return self.outcome(*self.own())

    def own(self) -> tuple[dict[int, State], dict[int, Tensor]]:
        """Do the chunks of this shard: their states by number, and examples by position, chunk after chunk."""
        self.attack.check(tuple(self.samples.pixels(slice(0, 1)).shape[2:]))
        self.chunks.open()
        examples: dict[int, Tensor] = {}
        mine = range(self.shard[0], self.count, self.shard[1])
        return {index: self._chunk(index, examples) for index in mine}, examples

    def outcome(self, known: dict[int, State], examples: dict[int, Tensor]) -> Standing:
        """Put together what is known and whatever other chunks are done."""
        for index in range(self.count):
            if index not in known and (found := self.chunks.read(index)) and finished(found, self.attack.parts):
                known[index] = found
        outcome = merged(known, self.samples.y.cpu().numpy(), self.size, self.attack.parts)
        return replace(outcome, examples=dict(list(examples.items())[: self.keep]))

    def _chunk(self, index: int, examples: dict[int, Tensor]) -> State:
        first = index * self.size
        rows = slice(first, min(first + self.size, len(self.samples)))
        x, y = (part.to(device_of(self.model)) for part in (self.samples.pixels(rows), self.samples.y[rows]))
        found = self._state(index, self._logits(x, y))
        answers = torch.tensor(found["clean"])
        for done in found["attacks"]:
            kept = self.chunks.read_images(index, done["name"]) if self.keep else {}
            self._take(examples, {first + row: torch.from_numpy(image) for row, image in kept.items()})
            answers[torch.tensor(done["broken"], dtype=torch.int64)] = torch.tensor(done["answers"], dtype=torch.int64)
        left = self.attack.parts[len(found["attacks"]) :]
        clock = self.clock or Remaining(self.attack, self.classes, len(self.samples))
        clock.enter(len(y), int((answers == y.cpu()).sum()), list(left))
        for part in left:
            outcome, images = self._attacked(part, x, y, answers)
            found["attacks"].append(outcome)
            self._take(examples, {first + row: image for row, image in images.items()})
            self.chunks.write_images(index, part, {row: image.numpy() for row, image in images.items()})
            self.chunks.write(index, found)
            standing = int((answers == y.cpu()).sum())
            clock.ended(standing)
            self.tell(index, self.count, part, standing)
        return found

    def _take(self, examples: dict[int, Tensor], more: dict[int, Tensor]) -> None:
        examples.update(dict(list(more.items())[: max(0, self.keep - len(examples))]))

    def _state(self, index: int, logits: Tensor) -> State:
        """What is known of a chunk, if it is about this network; a fresh state otherwise."""
        clean = logits.argmax(1).cpu()
        found = self.chunks.read(index)
        if found is None:
            return {"clean": clean.tolist(), "attacks": []}
        names = [done["name"] for done in found["attacks"]]
        if names != list(self.attack.parts[: len(names)]):
            raise UsageError(
                f"{self.chunks.file(index)} holds attacks in another order, {names}: delete it, and it is done again"
            )
        known = torch.tensor(found["clean"])
        if len(known) != len(clean) or bool(((known != clean) & sure(logits).cpu()).any()):
            raise UsageError(
                f"{self.chunks.folder}: the network answers the clean images of chunk {index} otherwise than when the "
                "chunk was begun; evaluate the same network, or delete that folder"
            )
        return found

    def _attacked(self, part: Part, x: Tensor, y: Tensor, answers: Tensor) -> tuple[dict[str, Any], dict[int, Tensor]]:
        """One attack on the samples that stand; enters what it broke into `answers`."""
        begun = time.perf_counter()
        standing = (answers == y.cpu()).nonzero().squeeze(1)
        said: list[str] = []
        outcome: dict[str, Any] = {"name": part, "broken": [], "answers": [], "made": 0, "largest": 0.0, "outside": 0}
        images: dict[int, Tensor] = {}
        if len(standing):
            index = standing.to(y.device)
            clean, labels, ball = x[index], y[index], self.attack.threat
            attacked = self.again(
                lambda: self.attack.perturb(part, self.forward, clean, labels, self.classes, said.append)
            )
            finite = flat(attacked).isfinite().all(1)
            attacked[~finite] = clean[~finite]  # what is no image turns nothing
            inside = (holds(ball, attacked - clean) & is_image(attacked)).cpu()
            judged = self._logits(attacked, labels).argmax(1).cpu()
            turned = judged != labels.cpu()
            broken = turned & inside
            rows = standing[broken]
            answers[rows] = judged[broken]
            outcome |= {"broken": rows.tolist(), "answers": judged[broken].tolist(), "made": len(standing)}
            outcome["largest"] = float(ball.length(attacked - clean).max()) / ball.radius
            outcome["outside"] = int((turned & ~inside).sum() + (~finite).sum())
            images = dict(zip(rows.tolist(), attacked[broken.to(y.device)].cpu(), strict=True)) if self.keep else {}
        return outcome | {"warnings": sorted(set(said)), "seconds": time.perf_counter() - begun}, images

    def _logits(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(x)
        check_logits(logits, y)
        return logits
