"""The settings of an evaluation besides its attacks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from doubly.errors import UsageError
from doubly.evaluation.metrics import Rounding
from doubly.evaluation.weights import Normalization
from doubly.settings import Settings

Format = Literal["png", "npz"]  # of attacked images

_CHOICES: dict[str, Any] = {
    "tail_rounding": Rounding,
    "weights_normalize": Normalization,
    "save_examples": Format,
}
_COUNTS = (
    "images",
    "autoattack_images",
    "trust_images",
    "curve_images",
    "max_examples",
    "chunk_size",
    "autoattack_chunk_size",
)


@dataclass(frozen=True)
class EvalConfig(Settings):
    """Settings of an evaluation: keyword arguments of `evaluate` and options of `doubly evaluate`.

    Raises:
        UsageError: If a value is not one of the choices, or a number is out of range.
    """

    checks_itself: ClassVar[tuple[str, ...]] = tuple(_CHOICES)

    output: Path | None = None
    """folder for evaluation.json, evaluation.npz, gallery.npz, the state of AutoAttack and attacked images"""
    seed: int = 0
    """seed of the random numbers of all attacks"""
    images: int | None = None
    """number of images to evaluate on, in the proportions of the classes and always the same ones; none: all"""
    skip_images: int = 0
    """number of images at the beginning of the set that are left out before `images` are taken"""
    chunk_size: int = 500
    """images that PGD attacks at a time; its random numbers depend on it"""
    autoattack_images: int | None = None
    """number of these images to run AutoAttack on; none: all"""
    autoattack_chunk_size: int = 250
    """images that AutoAttack attacks at a time; its random numbers depend on it"""
    state: Path | None = None
    """folder for the state of AutoAttack, from which it resumes; none: a folder inside the output"""
    shard: tuple[int, int] = (0, 1)
    """K N: run only AutoAttack, on its chunks K, K + N, K + 2N, …; a last call without it combines all chunks"""
    trust: bool = True
    """checks of whether the numbers can be trusted, by a few further attacks; --no-trust leaves them out"""
    trust_images: int = 128
    """number of images for the checks that run further attacks"""
    tail_share: float = 0.3
    """share of the classes that is the tail"""
    tail_rounding: Rounding = "round"
    """how the share of the classes becomes a number of classes"""
    weights_r: tuple[float, ...] = (10.0, 1.0, 0.1)
    """temperatures r of the KL weights of the samples; by default the three of the paper"""
    weights_normalize: Normalization = "batch"
    """batch: weights add up to 1 in batches of 128, as in the paper; all: over all samples; mean_one: mean 1"""
    curve_images: int | None = None
    """number of images for the accuracy under PGD at eight radii from 0 to 4 epsilon; none: no such curve"""
    accuracy_only: bool = False
    """attack an image only until it is misclassified, in half of the time or less: for accuracies, not for losses and
    weights under attack; accuracy under PGD is then at most that after its last step"""
    corruptions: Path | None = None
    """folder of corrupted test images as CIFAR-10-C has them, labels.npy and fog.npy, …: accuracy of each corruption
    and severity, and of the weakest classes; `images` is then of each severity"""
    save_examples: Format | None = None
    """write attacked images into the output: png in whole gray levels, npz exactly"""
    max_examples: int = 100
    """number of attacked images to write, at most, for each attack"""

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in get_args(kind):
                raise UsageError(f"{name} is one of {', '.join(get_args(kind))}, got '{value}'")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.skip_images < 0:
            raise UsageError(f"skip_images must be at least 0, got {self.skip_images}")
        if not 0 < self.tail_share <= 1:
            raise UsageError(f"tail_share is a share of the classes in (0, 1], got {self.tail_share}")
        if not all(r > 0 for r in self.weights_r):
            raise UsageError(f"weights_r are positive numbers, got {self.weights_r}")
        if not 0 <= self.shard[0] < self.shard[1]:
            raise UsageError(f"a shard is k of n with 0 <= k < n, got {self.shard[0]} of {self.shard[1]}")

    @property
    def sharded(self) -> bool:
        """Whether only a part of AutoAttack is run, and nothing else."""
        return self.shard[1] > 1
