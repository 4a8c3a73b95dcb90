"""A run as one frozen tree of plain values: what a recipe returns, the command line overrides, config.json keeps."""

from dataclasses import dataclass, field
from typing import Literal

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.data import Augmentation, Balanced, DataSource, Imbalance, Unchanged
from doubly.errors import UsageError
from doubly.models import Model
from doubly.schedules import Cyclic, Schedule
from doubly.types import Method


@dataclass(frozen=True)
class Data:
    """Where the images come from and what is done to the training part."""

    source: DataSource
    """the dataset"""
    imbalance: Imbalance = field(default_factory=Balanced)
    """which training images are kept; the test images never change"""
    holdout: float = 0.0
    """share of the training images held out, class by class and before any imbalance, to choose by; 0 trains on all"""
    split: int = 0
    """which images are held out; the same for every seed and method"""
    train_images: int | None = None
    """train on so many images at most, in the proportions of the classes and always the same; none takes all, and
    a file of kept images (imbalance.kept) names its own"""
    test_per_class: int | None = None
    """test on the first so many images of each class only; 1500 on SVHN mirrors the paper's confusion matrices (A20)"""
    augment: Augmentation = field(default_factory=Unchanged)
    """random changes of each batch"""
    root: str | None = None
    """folder with the dataset's files"""

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise UsageError(f"holdout is a share in [0, 1), got {self.holdout}")
        for name in ("train_images", "test_per_class"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is at least 1, or none for all images, got {value}")


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum."""

    lr: Schedule = field(default_factory=Cyclic)
    """learning rate, per iteration (A15)"""
    momentum: float = 0.9
    """share of the previous step that is kept"""
    weight_decay: float = 5e-4
    """on all parameters (A14)"""
    clip: float | None = None
    """largest norm of the gradient; none leaves it as it is"""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or not self.weight_decay >= 0:
            raise UsageError(
                f"momentum lies in [0, 1) and weight_decay is not negative, got {self.momentum} and {self.weight_decay}"
            )
        if not all(self.lr.at(percent / 100) >= 0 for percent in range(100)):
            raise UsageError(f"a learning rate is not negative, got {self.lr}")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"clip is a length above 0, or none for no clipping, got {self.clip}")


@dataclass(frozen=True)
class Validation:
    """The evaluation during training, on a fixed stratified part of the hold-out; of the test set where there is none.

    `best` is chosen on the hold-out only; the test set never chooses.
    """

    every: int = 5
    """epochs between evaluations; the last epoch is always evaluated"""
    size: int = 500
    """about how many images"""
    attack: PGD = field(default_factory=lambda: PGD(steps=20, rule=SignStep(2 / 255)))
    """the attack that is reported (A23), also by `doubly evaluate`"""
    choose: Literal["ra_pgd", "ra_tail_30", "both"] = "both"
    """what makes an epoch the best on the hold-out; both is their mean"""

    def __post_init__(self) -> None:
        if self.every < 1 or self.size < 1:
            raise UsageError(f"the validation's every and size must be at least 1, got {self.every} and {self.size}")


@dataclass(frozen=True)
class Run:
    """Everything that decides a training run."""

    data: Data
    """images"""
    model: Model
    """network"""
    method: Method
    """how to train"""
    optimizer: SGD = field(default_factory=SGD)
    """steps on the parameters"""
    validation: Validation = field(default_factory=Validation)
    """evaluation during training"""
    name: str = "run"
    """recipe that this is, for tables"""
    label: str = ""
    """name of the method in tables; empty makes it from the last part of the name"""
    table: str = ""
    """name of a separate table, such as fast, for runs that do not compare with the others of their setting"""
    epochs: int = 60
    """passes over the training images"""
    batch_size: int = 128
    """images per step"""
    warm_up: float = 0.0
    """share of training over which epsilon and the attack's step grow from 0 to their values"""
    ema_decay: float | None = None
    """decay of an exponential moving average of the weights, which is then what is evaluated; none for no averaging"""
    seed: int = 0
    """every random number of the run follows from it"""
    device: str = "auto"
    """auto takes CUDA where there is one; or cpu, cuda, cuda:1, …"""
    channels_last: Literal["auto", "yes", "no"] = "auto"
    """memory format of images; auto measures both at the start and keeps the faster for the whole run"""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """bf16, fp16: autocast of the network while it trains, fp16 with a scaled loss; losses, weights, u, barrier and
    implicit terms stay in float32 or better, as does every evaluation; for CUDA, on a CPU it is slower than float32"""
    recompute_activations: bool = False
    """keep only the inputs of the network's blocks and compute the rest again in each backward pass: about half the
    memory for a forward pass more, the same numbers; not a saving with DONE's implicit exact (docs/scale.md)"""
    microbatch: int | None = None
    """most images of a step that a process takes at a time, where a batch does not fit its memory: the gradient is
    summed up over parts, with the weights of the whole batch; batch norm sees a part. None takes all at once"""
    batch_norm: Literal["global", "local"] = "global"
    """over several processes. global: statistics of the whole batch, as on one; local: of each process's share, faster,
    and averaged after each step"""
    save_seconds: float = 20.0
    """least time between two checkpoints inside training"""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise UsageError(f"epochs and batch_size must be at least 1, got {self.epochs} and {self.batch_size}")
        if self.microbatch is not None and self.microbatch < 1:
            raise UsageError(f"microbatch is at least 1 image, or none for whole batches, got {self.microbatch}")
        if not 0 <= self.warm_up < 1:
            raise UsageError(f"warm_up is a share of training in [0, 1), got {self.warm_up}")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UsageError(f"ema_decay is a decay in [0, 1), such as 0.999, got {self.ema_decay}")
