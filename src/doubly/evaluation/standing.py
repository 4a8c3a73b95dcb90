"""AutoAttack's driver: the attacks in their order, each on the samples of a chunk that still stand, resumable.

The reference reseeds for every batch, and Square shares its draws within one: so the outcome belongs to the chunk, and
the chunk's size to the protocol. One chunk of all samples gives what the reference gives.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from doubly.attacks.autoattack import AutoAttack, Part, warnings_after
from doubly.attacks.forward import Forward
from doubly.bilevel.face import flat
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.evaluation.accuracy import Bools, Ints
from doubly.evaluation.chunks import Chunks
from doubly.evaluation.remaining import Remaining
from doubly.threat import LinfBall

TOLERANCE = 1e-6  # of rounding, in the length of delta


class Samples(Protocol):
    """Images as the driver needs them."""

    @property
    def y(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def pixels(self, indices: slice) -> Tensor: ...


@dataclass(frozen=True)
class Standing:
    """Who still stands after each attack, over all chunks that are done."""

    answers: Ints  # (n,): the clean answer of a sample that stands, else the answer that broke it; -1 where not done
    after: dict[Part, Bools]  # right after this attack and all before it
    seconds: dict[Part, float]
    warnings: tuple[str, ...] = ()
    largest: float = 0.0  # of |delta| / epsilon
    made: int = 0  # attacked images that were looked at
    outside: int = 0  # examples that left the ball or the image range, which do not count
    done: int = 0
    chunks: int = 0
    broken: int = 0
    examples: dict[int, Tensor] = field(default_factory=dict)  # position -> attacked image, if asked for

    @property
    def complete(self) -> bool:
        return self.done == self.chunks


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
    keep: bool = False  # the attacked images
    clock: Remaining | None = None
    tell: Callable[[int, int, Part, int], None] = lambda chunk, of, part, standing: None

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
        """Do the chunks of this shard, then put together whatever chunks are done."""
        self.chunks.open()
        known: dict[int, dict[str, Any]] = {}
        examples: dict[int, Tensor] = {}
        for index in range(self.count):
            if index % self.shard[1] == self.shard[0]:
                known[index] = self._chunk(index, examples)
            elif (found := self.chunks.read(index)) is not None and self._finished(found):
                known[index] = found
        return replace(self._merged(known), examples=examples)

    def _finished(self, found: dict[str, Any]) -> bool:
        return [each["name"] for each in found["attacks"]] == list(self.attack.parts)

    def _chunk(self, index: int, examples: dict[int, Tensor]) -> dict[str, Any]:
        first = index * self.size
        rows = slice(first, min(first + self.size, len(self.samples)))
        x, y = self.samples.pixels(rows), self.samples.y[rows]
        clean = self._judged(x, y)
        found = self.chunks.read(index) or {"clean": clean.tolist(), "attacks": []}
        if found["clean"] != clean.tolist():
            raise UsageError(
                f"{self.chunks.folder}: the network answers the clean images of chunk {index} otherwise than when the "
                "chunk was begun; evaluate the same network on the same machine, or delete that folder"
            )
        names = [done["name"] for done in found["attacks"]]
        if names != list(self.attack.parts[: len(names)]):
            raise UsageError(
                f"{self.chunks.file(index)} holds attacks in another order, {names}: delete it, and it is done again"
            )
        answers = clean.clone()
        for done in found["attacks"]:
            kept = self.chunks.read_images(index, done["name"]) if self.keep else {}
            examples.update({first + row: torch.from_numpy(image) for row, image in kept.items()})
            answers[torch.tensor(done["broken"], dtype=torch.int64)] = torch.tensor(
                done["answers"], dtype=answers.dtype
            )
        left = self.attack.parts[len(found["attacks"]) :]
        clock = self.clock or Remaining(self.attack, self.classes, len(self.samples), self.size)
        clock.enter(len(y), int((answers == y.cpu()).sum()), list(left))
        for part in left:
            outcome, images = self._attacked(part, x, y, answers)
            found["attacks"].append(outcome)
            examples.update({first + row: image for row, image in images.items()})
            self.chunks.write_images(index, part, {row: image.numpy() for row, image in images.items()})
            self.chunks.write(index, found)
            standing = int((answers == y.cpu()).sum())
            clock.ended(standing)
            self.tell(index, self.count, part, standing)
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
            attacked = self.attack.perturb(part, self.forward, x[index], y[index], self.classes, said.append)
            finite = flat(attacked).isfinite().all(1)
            attacked[~finite] = x[index][~finite]  # what is no image turns nothing
            length = self._length(attacked - x[index])
            inside = (length <= 1 + TOLERANCE / self.attack.threat.radius) & _in_range(attacked)
            judged = self._judged(attacked, y[index])
            turned = judged != y[index].cpu()
            broken = turned & inside.cpu()
            rows = standing[broken]
            answers[rows] = judged[broken]
            outcome |= {"broken": rows.tolist(), "answers": judged[broken].tolist()}
            outcome |= {
                "made": len(standing),
                "largest": float(length.max()),
                "outside": int((turned & ~inside.cpu()).sum() + (~finite).sum()),
            }
            images = dict(zip(rows.tolist(), attacked[broken.to(y.device)].cpu(), strict=True)) if self.keep else {}
        return outcome | {"warnings": sorted(set(said)), "seconds": time.perf_counter() - begun}, images

    def _length(self, delta: Tensor) -> Tensor:
        order = torch.inf if isinstance(self.attack.threat, LinfBall) else 2
        length: Tensor = flat(delta).norm(order, dim=1)
        return length / self.attack.threat.radius

    def _judged(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(x)
        check_logits(logits, y)
        return logits.argmax(1).cpu()

    def _merged(self, known: dict[int, dict[str, Any]]) -> Standing:
        y = self.samples.y.cpu().numpy()
        answers = np.full(len(y), -1, dtype=np.int64)
        for index, found in known.items():
            first = index * self.size
            answers[first : first + len(found["clean"])] = found["clean"]
        measured, after = answers >= 0, {}
        accuracies = {"clean": float(np.mean((answers == y)[measured]))} if known else {}
        for position, part in enumerate(self.attack.parts):
            for index, found in known.items():
                outcome = found["attacks"][position]
                answers[index * self.size + np.array(outcome["broken"], dtype=np.int64)] = outcome["answers"]
            after[part] = answers == y
            accuracies |= {part: float(np.mean(after[part][measured]))} if known else {}
        done = [outcome for found in known.values() for outcome in found["attacks"]]
        return Standing(
            answers,
            after,
            {part: sum(o["seconds"] for o in done if o["name"] == part) for part in self.attack.parts},
            tuple(sorted({text for o in done for text in o["warnings"]} | set(warnings_after(accuracies)))),
            max((o["largest"] for o in done), default=0.0),
            sum(o["made"] for o in done),
            sum(o["outside"] for o in done),
            len(known),
            self.count,
            sum(len(o["broken"]) for o in done),
        )


def _in_range(x: Tensor) -> Tensor:
    rows = flat(x)
    return (rows.amin(1) >= 0) & (rows.amax(1) <= 1)
