"""AutoAttack on one chunk of images after the other: each attack on the images that no attack before it has broken.

The reference seeds its random numbers for each batch, and Square shares them within one. So the outcome belongs to the
chunk, and the size of the chunk to the protocol. One chunk of all images gives what the reference gives.
"""

import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from doubly.attacks import model_device
from doubly.attacks.autoattack import AutoAttack, Part
from doubly.attacks.mode import Forward
from doubly.bilevel.rows import flat
from doubly.checks import check_logits
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.autoattack.eta import Progress
from doubly.evaluation.autoattack.outcome import ChunkResults, Outcome, merge_states
from doubly.evaluation.autoattack.state import ChunkFiles, ChunkState, is_finished
from doubly.evaluation.memory import MicrobatchLimit
from doubly.evaluation.network import is_decided
from doubly.threat import is_image, is_inside


class Network(NamedTuple):
    """A network as AutoAttack uses it.

    Attributes:
        model: The network itself, which predicts clean and attacked images.
        forward: How the attacks call it; its logits may differ by rounding.
        classes: Number of classes.
        limit: How many images fit into memory at a time; `model` and `forward` obey it.
    """

    model: nn.Module
    forward: Forward
    classes: int
    limit: MicrobatchLimit


class AttackedRows(NamedTuple):
    """Result of one attack on the images of a chunk.

    Attributes:
        record: Its part of the chunk's state, as the file keeps it.
        images: The images that it has broken, by their row in the chunk, if they are kept.
    """

    record: dict[str, Any]
    images: dict[int, Tensor]


@dataclass(frozen=True)
class Driver:
    """Runs AutoAttack on the chunks of a shard.

    Attributes:
        network: The network.
        images: All images.
        attack: AutoAttack.
        files: Where the states of the chunks are kept.
        progress: Notified of every attack.
        chunk_size: Images per chunk.
        shard: (k, n): the chunks k, k + n, k + 2n, …
        max_examples: How many attacked images to keep.

    Raises:
        UsageError: If the shard or the chunk size is not valid.
    """

    network: Network
    images: Images
    attack: AutoAttack
    files: ChunkFiles
    progress: Progress
    chunk_size: int = 250
    shard: tuple[int, int] = (0, 1)
    max_examples: int = 0

    def __post_init__(self) -> None:
        number, count = self.shard
        if not 0 <= number < count:
            raise UsageError(f"a shard is k of n with 0 <= k < n, got {number} of {count}")
        if self.chunk_size < 1:
            raise UsageError(f"a chunk has at least 1 image, got {self.chunk_size}")

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-len(self.images) // self.chunk_size)

    def run_shard(self) -> ChunkResults:
        """Attack the chunks of this shard, or resume them.

        Raises:
            UsageError: If the state on disk is of another evaluation or network, damaged, or cannot be written.
        """
        self.attack.check(tuple(self.images.x.shape[2:]))
        self.files.open()
        results = ChunkResults({}, {})
        for index in range(self.shard[0], self.chunks, self.shard[1]):
            results.states[index] = self._run_chunk(index, results.examples)
        return results

    def combine(self, results: ChunkResults) -> Outcome:
        """Combine the results with whatever other chunks are finished on disk."""
        states = dict(results.states)
        for index in range(self.chunks):
            if index not in states:
                state = self.files.read(index)
                if state is not None and is_finished(state, self.attack.parts):
                    states[index] = state
        outcome = merge_states(states, self.images.y.cpu().numpy(), self.chunk_size, self.attack.parts)
        return replace(outcome, examples=dict(list(results.examples.items())[: self.max_examples]))

    def _run_chunk(self, index: int, examples: dict[int, Tensor]) -> ChunkState:
        """Run the attacks that are missing; adds to the examples."""
        start = index * self.chunk_size
        rows, device = slice(start, min(start + self.chunk_size, len(self.images))), model_device(self.network.model)
        x, y = self.images.pixels(rows).to(device), self.images.y[rows].to(device)
        state = self._restore_state(index, self._logits(x, y))
        predictions = torch.tensor(state["clean"])
        for record in state["attacks"]:
            saved = self.files.read_images(index, record["name"]) if self.max_examples else {}
            self._add_examples(examples, start, {row: torch.from_numpy(image) for row, image in saved.items()})
            broken = torch.tensor(record["broken"], dtype=torch.int64)
            predictions[broken] = torch.tensor(record["answers"], dtype=torch.int64)
        parts = self.attack.parts[len(state["attacks"]) :]
        self.progress.start_chunk(len(y), int((predictions == y.cpu()).sum()), parts)
        for part in parts:
            record, images = self._run_attack(part, x, y, predictions)
            state["attacks"].append(record)
            self._add_examples(examples, start, images)
            self.files.write_images(index, part, {row: image.numpy() for row, image in images.items()})
            self.files.write(index, state)
            self.progress.end_attack(index, self.chunks, part, int((predictions == y.cpu()).sum()))
        return state

    def _add_examples(self, examples: dict[int, Tensor], start: int, images: dict[int, Tensor]) -> None:
        for row in list(images)[: max(0, self.max_examples - len(examples))]:
            examples[start + row] = images[row]

    def _restore_state(self, index: int, logits: Tensor) -> ChunkState:
        """Return the state of a chunk from its file, if it is of this network; a new one if there is none."""
        clean = logits.argmax(1).cpu()
        state = self.files.read(index)
        if state is None:
            return {"clean": clean.tolist(), "attacks": []}
        names = [record["name"] for record in state["attacks"]]
        if names != list(self.attack.parts[: len(names)]):
            raise UsageError(
                f"{self.files.path(index)} holds attacks in another order, {names}: delete it, and it is computed again"
            )
        saved = torch.tensor(state["clean"])
        if len(saved) != len(clean) or bool(((saved != clean) & is_decided(logits).cpu()).any()):
            raise UsageError(
                f"{self.files.folder}: the network predicts the clean images of chunk {index} otherwise than when the "
                "chunk was started; evaluate the same network, or delete that folder"
            )
        return state

    def _run_attack(self, part: Part, x: Tensor, y: Tensor, predictions: Tensor) -> AttackedRows:
        """Attack the images that are still correct; enters what was broken into `predictions`."""
        start = time.perf_counter()
        robust = (predictions == y.cpu()).nonzero().squeeze(1)
        warnings: list[str] = []
        attacked = AttackedRows({"broken": [], "answers": [], "made": 0, "largest": 0.0, "outside": 0}, {})
        if len(robust):
            attacked = self._attack_rows(part, x, y, robust, warnings)
            broken = torch.tensor(attacked.record["broken"], dtype=torch.int64)
            predictions[broken] = torch.tensor(attacked.record["answers"], dtype=torch.int64)
        times = {"warnings": sorted(set(warnings)), "seconds": time.perf_counter() - start}
        return AttackedRows({"name": part, **attacked.record, **times}, attacked.images)

    def _attack_rows(self, part: Part, x: Tensor, y: Tensor, rows: Tensor, warnings: list[str]) -> AttackedRows:
        index = rows.to(y.device)
        clean, labels, threat, network = x[index], y[index], self.attack.threat, self.network
        attacked = network.limit.retry(
            lambda: self.attack.perturb(part, network.forward, clean, labels, network.classes, warnings.append)
        )
        finite = flat(attacked).isfinite().all(1)
        attacked[~finite] = clean[~finite]  # what is not an image breaks nothing
        inside = (is_inside(threat, attacked - clean) & is_image(attacked)).cpu()
        predicted = self._logits(attacked, labels).argmax(1).cpu()
        wrong = predicted != labels.cpu()
        broken = wrong & inside
        record: dict[str, Any] = {
            "broken": rows[broken].tolist(),
            "answers": predicted[broken].tolist(),
            "made": len(rows),
            "largest": float(threat.length(attacked - clean).max()) / threat.radius,
            "outside": int((wrong & ~inside).sum() + (~finite).sum()),
        }
        if not self.max_examples:
            return AttackedRows(record, {})
        return AttackedRows(record, dict(zip(record["broken"], attacked[broken.to(y.device)].cpu(), strict=True)))

    def _logits(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.network.model(x)
        check_logits(logits, y)
        return logits
