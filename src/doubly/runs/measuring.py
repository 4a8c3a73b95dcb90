"""How an evaluation measures, beside the attacks: fields of `evaluate` and flags of `doubly evaluate`."""

from dataclasses import dataclass
from pathlib import Path

from doubly.errors import UsageError
from doubly.evaluation.accuracy import Rounding
from doubly.evaluation.examples import Format
from doubly.runs.autoattack import Compile


@dataclass(frozen=True)
class Measuring:
    """How to measure."""

    output: Path | None = None
    """folder for evaluation.json, evaluation.npz, AutoAttack's progress and attacked images"""
    seed: int = 0
    """every random number of the attacks follows from it"""
    images: int | None = None
    """measure on so many images, in the proportions of the classes and always the same; none takes all"""
    chunk: int = 500
    """images that PGD attacks at a time; the draws belong to the chunk"""
    autoattack_images: int | None = None
    """AutoAttack on so many of the images; none takes all"""
    autoattack_chunk: int = 250
    """images that AutoAttack attacks at a time; what it finds belongs to the chunk"""
    compile: Compile = "auto"
    """compile the network for AutoAttack; auto does where that saves more time than it takes"""
    state: Path | None = None
    """folder of AutoAttack's progress, if not inside the output"""
    shard: tuple[int, int] = (0, 1)
    """(k, n): do only every n-th of AutoAttack's chunks, beginning with the k-th; without it all is put together"""
    trust: bool = True
    """ask also whether the numbers can be trusted"""
    trust_images: int = 128
    """images for those of its checks that take further attacks"""
    tail_share: float = 0.3
    """share of the classes that is the tail"""
    tail_rounding: Rounding = "round"
    """how a share of the classes becomes a number of them (A21)"""
    save_examples: Format | None = None
    """write attacked images into the output: png in whole grey levels, npz exactly"""
    most_examples: int = 100
    """at most so many of each attack"""

    def __post_init__(self) -> None:
        for name in ("images", "autoattack_images", "trust_images", "most_examples", "chunk", "autoattack_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if not 0 < self.tail_share <= 1:
            raise UsageError(f"tail_share is a share of the classes in (0, 1], got {self.tail_share}")
        if not 0 <= self.shard[0] < self.shard[1]:
            raise UsageError(f"a shard is k of n with 0 <= k < n, got {self.shard[0]} of {self.shard[1]}")

    @property
    def sharded(self) -> bool:
        """Only a part of AutoAttack is to be done, and nothing else."""
        return self.shard[1] > 1
