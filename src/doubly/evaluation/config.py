"""How an evaluation measures, beside the attacks: fields of `evaluate` and flags of `doubly evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from doubly.errors import UsageError
from doubly.evaluation.autoattack.runner import Compile
from doubly.evaluation.examples import Format
from doubly.evaluation.metrics import Rounding
from doubly.evaluation.weights import Normalization

_CHOICES: dict[str, Any] = {
    "compile": Compile,
    "tail_rounding": Rounding,
    "weights_normalize": Normalization,
    "save_examples": Format,
}
_COUNTS = (
    "images",
    "autoattack_images",
    "trust_images",
    "curve_images",
    "most_examples",
    "chunk",
    "autoattack_chunk",
)


@dataclass(frozen=True)
class EvalConfig:
    """How to measure."""

    output: Path | None = None
    """folder for evaluation.json, evaluation.npz, gallery.npz, AutoAttack's progress and attacked images"""
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
    """the checks of whether the numbers can be trusted, and the attacks that they take"""
    trust_images: int = 128
    """images for those of its checks that take further attacks"""
    tail_share: float = 0.3
    """share of the classes that is the tail"""
    tail_rounding: Rounding = "round"
    """how a share of the classes becomes a number of them (A21)"""
    weights_r: tuple[float, ...] = (10.0, 1.0, 0.1)
    """temperatures r at which the KL weights of the samples are given; the paper's three"""
    weights_normalize: Normalization = "batch"
    """batch: they add up to 1 in batches of 128, as in the paper's figure; all: over all samples; mean_one: to their
    number"""
    curve_images: int | None = None
    """accuracy under PGD at eight radii from 0 to 4 epsilon on so many images, in the proportions of the classes; none:
    no curve"""
    save_examples: Format | None = None
    """write attacked images into the output: png in whole gray levels, npz exactly"""
    most_examples: int = 100
    """at most so many of each attack"""

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in get_args(kind):
                raise UsageError(f"{name} is one of {', '.join(get_args(kind))}, got '{value}'")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if not 0 < self.tail_share <= 1:
            raise UsageError(f"tail_share is a share of the classes in (0, 1], got {self.tail_share}")
        if not all(r > 0 for r in self.weights_r):
            raise UsageError(f"weights_r are positive numbers, got {self.weights_r}")
        if not 0 <= self.shard[0] < self.shard[1]:
            raise UsageError(f"a shard is k of n with 0 <= k < n, got {self.shard[0]} of {self.shard[1]}")

    @property
    def sharded(self) -> bool:
        """Only a part of AutoAttack is to be done, and nothing else."""
        return self.shard[1] > 1
