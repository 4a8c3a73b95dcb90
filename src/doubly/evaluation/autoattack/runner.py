"""A run of AutoAttack: choose the folder of its state and the chunks; then run them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from doubly.attacks import attack_context, model_device
from doubly.attacks.autoattack import AutoAttack, reference_version, warnings_about
from doubly.callbacks import Callback
from doubly.data import Images
from doubly.distributed import SINGLE_PROCESS, Communicator, run_together
from doubly.errors import UsageError
from doubly.evaluation.autoattack.driver import Driver, Network
from doubly.evaluation.autoattack.eta import Progress, RemainingTime
from doubly.evaluation.autoattack.forward import CountedForward
from doubly.evaluation.autoattack.outcome import Outcome, all_gather_results
from doubly.evaluation.autoattack.state import ChunkFiles
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.memory import MicrobatchedModel, MicrobatchLimit
from doubly.evaluation.network import model_sha256

ROBUST_SHARE = 0.5  # share of the images that may be robust, for estimates
FORWARD = "folded"  # how the attacks call the network; with another one, outcomes differ by rounding


@dataclass(frozen=True)
class AutoAttackRunner:
    """One run of AutoAttack.

    Attributes:
        attack: AutoAttack.
        chunk_size: Images per chunk.
        state: Folder for the state; None keeps nothing.
        exact_folder: Whether the state is in this folder itself; otherwise in one inside, named after the key.
        shard: (k, n): only the chunks k, k + n, k + 2n, …
        max_examples: How many attacked images to keep.
    """

    attack: AutoAttack
    chunk_size: int = 250
    state: Path | None = None
    exact_folder: bool = False
    shard: tuple[int, int] = (0, 1)
    max_examples: int = 0

    @classmethod
    def from_config(cls, attack: AutoAttack, config: EvalConfig, communicator: Communicator) -> Self:
        """Return the run of AutoAttack that an evaluation asks for; several processes share the chunks."""
        single = communicator.world_size == 1
        return cls(
            attack,
            config.autoattack_chunk_size,
            config.state or (config.output / "autoattack" if config.output else None),
            config.state is not None,
            config.shard if single else (communicator.rank, communicator.world_size),
            0 if config.save_examples is None else config.max_examples,
        )

    def run(
        self,
        model: nn.Module,
        images: Images,
        communicator: Communicator = SINGLE_PROCESS,
        callback: Callback | None = None,
        limit: MicrobatchLimit | None = None,
    ) -> tuple[Outcome, dict[str, Any]]:
        """Attack the images, or resume.

        Args:
            model: The network; it is left as it was found.
            images: The images.
            communicator: The processes that share the work.
            callback: Called as the evaluation proceeds.
            limit: How many images fit into memory at a time.

        Returns:
            The outcome of all finished chunks, and what evaluation.json keeps about it.

        Raises:
            UsageError: If the state on disk does not belong to this run, or cannot be written.
        """
        callback = callback or Callback()
        limit = limit or MicrobatchLimit(callback.on_message)
        device = model_device(model)
        x, y = images.pixels(slice(0, 64)).to(device), images.y[:64].to(device)
        microbatched = MicrobatchedModel(model, limit)
        with attack_context(model, "eval", x) as forward:
            with torch.no_grad():
                classes = model(x[:1]).shape[1]
            progress = Progress(RemainingTime(self.attack, classes, self._images_in_shard(len(images))), callback)
            files = self.files(self.key(model, images))
            counted = CountedForward(forward, progress.count_pass)
            network = Network(microbatched, MicrobatchedModel(counted, limit), classes, limit)
            driver = Driver(
                network, images, self.attack, files, progress, self.chunk_size, self.shard, self.max_examples
            )
            results = run_together(communicator, driver.run_shard, patient=True)
            outcome = driver.combine(
                all_gather_results(results, self.chunk_size, images.pixels(slice(0, 1)), communicator)
            )
            warnings = [*warnings_about(microbatched, x, y), *outcome.warnings]
        return outcome, self._describe(outcome, classes, warnings, files)

    def _describe(self, outcome: Outcome, classes: int, warnings: list[str], files: ChunkFiles) -> dict[str, Any]:
        return {
            "label": self.attack.label if outcome.complete else "AutoAttack, incomplete",
            "complete": outcome.complete,
            "chunks": f"{outcome.chunks_done} of {outcome.chunks}",
            "norm": self.attack.threat.norm,
            "epsilon": self.attack.threat.radius,
            "seed": self.attack.seed,
            "chunk": self.chunk_size,
            "reference": reference_version(),
            "forward": FORWARD,
            "parts": list(self.attack.parts),
            "substitutions": self.attack.substitutions(classes),
            "warnings": warnings,
            "seconds": outcome.seconds,
            "state": None if files.folder is None else str(files.folder),
        }

    def check(self, model: nn.Module, images: Images) -> None:
        """Refuse a folder of another evaluation, before any work.

        Raises:
            UsageError: If the folder that was named belongs to another evaluation.
        """
        if self.state is not None and self.exact_folder and (self.state / "key.json").is_file():
            self.files(self.key(model, images)).open()

    def is_finished(self, model: nn.Module, images: Images) -> bool:
        """Return whether all chunks are finished."""
        files = self.files(self.key(model, images))
        try:
            return files.all_finished(self._chunks(len(images)), self.attack.parts)
        except UsageError:  # a damaged file
            return False

    def key(self, model: nn.Module, images: Images) -> dict[str, Any]:
        """Return everything that the outcome depends on."""
        return {
            "model": model_sha256(model),
            "data": images.sha256(),
            "norm": self.attack.threat.norm,
            "epsilon": self.attack.threat.radius,
            "parts": list(self.attack.parts),
            "iterations": self.attack.iterations,
            "targets": self.attack.targets,
            "queries": self.attack.queries,
            "seed": self.attack.seed,
            "chunk": self.chunk_size,
            "version": reference_version(),
            "forward": FORWARD,
        }

    def files(self, key: dict[str, Any]) -> ChunkFiles:
        """Return where the state of the run with this key is kept."""
        files = ChunkFiles(self.state, key)
        if self.state is None or self.exact_folder:
            return files
        return replace(files, folder=self.state / files.digest[:12])

    def _chunks(self, images: int) -> int:
        return -(-images // self.chunk_size)

    def _images_in_shard(self, images: int) -> int:
        starts = range(self.chunk_size * self.shard[0], images, self.chunk_size * self.shard[1])
        return sum(min(self.chunk_size, images - start) for start in starts)
