"""A run of AutoAttack: choose the folder of its state, a compiled or plain network, and the chunks; then run them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from doubly.attacks import attack_context, model_device
from doubly.attacks.autoattack import AutoAttack, reference_version, warnings_about
from doubly.attacks.compiled import CompiledForward, PlainForward, can_compile, compile_forward
from doubly.callbacks import Callback
from doubly.data import Images
from doubly.distributed import SINGLE_PROCESS, Communicator, run_together
from doubly.errors import UsageError
from doubly.evaluation.autoattack.driver import Driver, Network
from doubly.evaluation.autoattack.eta import Progress, RemainingTime, passes_per_image
from doubly.evaluation.autoattack.outcome import Outcome, all_gather_results
from doubly.evaluation.autoattack.state import ChunkFiles
from doubly.evaluation.config import Compile, EvalConfig
from doubly.evaluation.memory import MicrobatchedModel, MicrobatchLimit
from doubly.evaluation.network import model_sha256
from doubly.rundir import read_json

ROBUST_SHARE = 0.5  # share of the images that may be robust, for estimates
MIN_COMPILE_SECONDS = 180.0  # of uncompiled work: compiling takes half a minute for a small network
RATES = {"cpu": 4e10, "cuda": 2e12}  # operations per second, roughly: not measured, so that all shards decide alike


class ChosenForward(NamedTuple):
    """The forward function that the attacks call, and whether the outcome counts as that of a compiled network."""

    forward: PlainForward | CompiledForward
    compiled: bool


@dataclass(frozen=True)
class AutoAttackRunner:
    """One run of AutoAttack.

    Attributes:
        attack: AutoAttack.
        chunk_size: Images per chunk.
        compile: Whether to compile the network.
        state: Folder for the state; None keeps nothing.
        exact_folder: Whether the state is in this folder itself; otherwise in one inside, named after the key.
        shard: (k, n): only the chunks k, k + n, k + 2n, …
        max_examples: How many attacked images to keep.
    """

    attack: AutoAttack
    chunk_size: int = 250
    compile: Compile = "auto"
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
            config.compile,
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
        with attack_context(model, "eval"):
            with torch.no_grad():
                classes = model(x[:1]).shape[1]
            key = self.key(model, images)
            chosen = self._choose_forward(model, x, key, len(images), classes, communicator, callback)
            progress = Progress(RemainingTime(self.attack, classes, self._images_in_shard(len(images))), callback)
            chosen.forward.count = progress.count_pass
            files = self.files(key, chosen.compiled)
            network = Network(microbatched, MicrobatchedModel(chosen.forward, limit), classes, limit)
            driver = Driver(
                network, images, self.attack, files, progress, self.chunk_size, self.shard, self.max_examples
            )
            results = run_together(communicator, driver.run_shard, patient=True)
            outcome = driver.combine(
                all_gather_results(results, self.chunk_size, images.pixels(slice(0, 1)), communicator)
            )
            warnings = [*warnings_about(microbatched, x, y), *outcome.warnings]
        return outcome, self._describe(outcome, classes, chosen.compiled, warnings, files)

    def _describe(
        self, outcome: Outcome, classes: int, compiled: bool, warnings: list[str], files: ChunkFiles
    ) -> dict[str, Any]:
        return {
            "label": self.attack.label if outcome.complete else "AutoAttack, incomplete",
            "complete": outcome.complete,
            "chunks": f"{outcome.chunks_done} of {outcome.chunks}",
            "norm": self.attack.threat.norm,
            "epsilon": self.attack.threat.radius,
            "seed": self.attack.seed,
            "chunk": self.chunk_size,
            "reference": reference_version(),
            "compiled": compiled,
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
            self.files(self.key(model, images), _saved_as_compiled(self.state) is True).open()

    def is_finished(self, model: nn.Module, images: Images) -> bool:
        """Return whether all chunks are finished; `compile` says whether the network was compiled for them."""
        files = self.files(self.key(model, images), self.compile == "yes")
        try:
            return files.all_finished(self._chunks(len(images)), self.attack.parts)
        except UsageError:  # a damaged file
            return False

    def key(self, model: nn.Module, images: Images) -> dict[str, Any]:
        """Return everything that the outcome depends on, except whether the network is compiled."""
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
        }

    def files(self, key: dict[str, Any], compiled: bool) -> ChunkFiles:
        """Return where the state of the run with this key is kept."""
        files = ChunkFiles(self.state, {**key, "compiled": compiled})
        if self.state is None or self.exact_folder:
            return files
        return replace(files, folder=self.state / files.digest[:12])

    def _chunks(self, images: int) -> int:
        return -(-images // self.chunk_size)

    def _images_in_shard(self, images: int) -> int:
        starts = range(self.chunk_size * self.shard[0], images, self.chunk_size * self.shard[1])
        return sum(min(self.chunk_size, images - start) for start in starts)

    def _choose_forward(
        self,
        model: nn.Module,
        x: Tensor,
        key: dict[str, Any],
        images: int,
        classes: int,
        communicator: Communicator,
        callback: Callback,
    ) -> ChosenForward:
        """Return a compiled network only if all processes have one."""
        chosen = run_together(
            communicator, lambda: self._choose_local_forward(model, x, key, images, classes, callback)
        )
        if not communicator.all_gather(torch.tensor([int(chosen.compiled)])).all():
            return ChosenForward(PlainForward(model), False)
        return chosen

    def _choose_local_forward(
        self, model: nn.Module, x: Tensor, key: dict[str, Any], images: int, classes: int, callback: Callback
    ) -> ChosenForward:
        """Compile the network if requested or worthwhile; a run that was started is resumed as it was started."""
        started = self._started_compiled(key)
        if started is not None:
            files = self.files(key, started)
            files.open()
            if files.all_finished(self._chunks(images), self.attack.parts):
                return ChosenForward(PlainForward(model), started)  # no attack is left to run
        wanted = self.compile == "yes" if started is None else started
        if started is None and self.compile == "auto":
            wanted = self._uncompiled_seconds(model, x, images, classes) > MIN_COMPILE_SECONDS
        if not wanted:
            return ChosenForward(PlainForward(model), False)
        compiled, message = (
            compile_forward(model, x) if can_compile(x.device) else (None, "not compiled: there is no C++ compiler")
        )
        callback.on_message(message)
        if compiled is None and started:
            raise UsageError(
                f"{self.files(key, True).folder} was started with a compiled network, and here it is {message}: resume "
                "where it was started, or delete that folder"
            )
        return ChosenForward(compiled or PlainForward(model), compiled is not None)

    def _started_compiled(self, key: dict[str, Any]) -> bool | None:
        """Return whether the run that was started here is compiled; None if none was, or `compile` asks for another."""
        for compiled in (True, False):
            folder = self.files(key, compiled).folder
            allowed = self.compile == "auto" or (self.compile == "yes") == compiled
            if folder is not None and allowed and _saved_as_compiled(folder) is compiled:
                return compiled
        return None

    def _uncompiled_seconds(self, model: nn.Module, x: Tensor, images: int, classes: int) -> float:
        """Return a rough estimate of the time without compiling."""
        passes = ROBUST_SHARE * images * sum(passes_per_image(self.attack, classes).values())
        return passes * _operations(model, x) / RATES.get(x.device.type, RATES["cuda"])


def _saved_as_compiled(folder: Path) -> bool | None:
    """Return whether the run in a folder is compiled; None if there is no run."""
    if not (folder / "key.json").is_file():
        return None
    key = read_json(folder / "key.json")
    compiled = key.get("compiled") if isinstance(key, dict) else None
    return compiled if isinstance(compiled, bool) else None


def _operations(model: nn.Module, x: Tensor) -> int:
    """Return the operations of one pass of one image."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x[:1])
    return int(counter.get_total_flops())
