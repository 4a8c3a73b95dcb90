"""A run as one frozen tree of plain values: what a recipe returns, the command line changes and config.json keeps."""

from dataclasses import dataclass, field
from typing import Literal

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.config.optimizers import SGD, OptimizerConfig
from doubly.data import Data
from doubly.errors import UsageError
from doubly.methods import Method
from doubly.models import Model

Sampling = Literal["shuffled", "balanced"]


@dataclass(frozen=True)
class Validation:
    """The evaluation during training, on a fixed stratified part of the hold-out.

    If nothing is held out, it is on a part of the test set. The best epoch is chosen on the hold-out only, never on the
    test set.

    Raises:
        UsageError: If a number is below 1.
    """

    every: int = 5
    """epochs between evaluations; the last epoch is always evaluated"""
    size: int = 500
    """approximate number of images"""
    attack: PGD = field(default_factory=lambda: PGD(steps=20, rule=SignStep(2 / 255)))
    """the attack that is reported, also by `doubly evaluate`"""
    choose: Literal["ra_pgd", "ra_tail_30", "both"] = "both"
    """what makes an epoch the best on the hold-out; both is their mean"""

    def __post_init__(self) -> None:
        if self.every < 1 or self.size < 1:
            raise UsageError(f"validation.every and validation.size are at least 1, got {self.every} and {self.size}")


@dataclass(frozen=True)
class Run:
    """Everything that decides a training run.

    Raises:
        UsageError: If a number is out of range.
    """

    data: Data
    """dataset, and what is done to its images"""
    model: Model
    """network"""
    method: Method
    """training method"""
    optimizer: OptimizerConfig = field(default_factory=SGD)
    """how the parameters are updated"""
    validation: Validation = field(default_factory=Validation)
    """evaluation during training"""
    name: str = "run"
    """name of the recipe, for tables"""
    label: str = ""
    """name of the method in tables; empty makes it from the last part of the name"""
    table: str = ""
    """name of a separate table, such as fast, for runs that do not compare with the others of their setting"""
    epochs: int = 60
    """passes over the training images"""
    batch_size: int = 128
    """images per step, over all processes"""
    sampling: Sampling = "shuffled"
    """how batches are drawn. shuffled: each training image once per epoch; balanced: with replacement, all classes
    equally often; not for methods that draw classes, or weigh them by their sizes, themselves"""
    warm_up: float = 0.0
    """share of training over which epsilon and the attack's step grow from 0 to their values"""
    ema_decay: float | None = None
    """decay of an exponential moving average of the weights, which is then evaluated; none for no averaging"""
    ema_buffers: Literal["average", "copy"] = "average"
    """running statistics of batch norm in that network: averaged like the weights, or copied from the trained one"""
    seed: int = 0
    """every random number of the run follows from it"""
    device: str = "auto"
    """auto takes CUDA where there is one; or cpu, cuda, cuda:1, …"""
    channels_last: Literal["auto", "yes", "no"] = "auto"
    """memory format of images; auto measures both at the start and keeps the faster for the whole run"""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """float32, or half precision of the network during training (autocast), for CUDA; on a CPU it is slower.
    Losses, weights, u, barrier, implicit terms and every evaluation stay in float32 or better"""
    recompute_activations: bool = False
    """keep only the inputs of the network's blocks and compute the rest again in each backward pass:
    half the memory, one more forward pass, the same numbers; no saving with DONE's implicit exact (docs/scale.md)"""
    microbatch: int | None = None
    """largest number of images that a process takes at a time, if a batch does not fit into memory; none: all of it.
    Sample weights are those of the whole batch; batch norm uses the statistics of a microbatch"""
    batch_norm: Literal["global", "local"] = "global"
    """statistics of batch norm with several processes. global: of the whole batch, as with one process;
    local: of the part of each process, which is faster; the running statistics are averaged after each step"""
    save_seconds: float = 20.0
    """shortest time between two checkpoints during training"""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise UsageError(f"{name} is a whole number, got {value!r:.60}: round it")
        for attack in (self.method.attack, self.validation.attack):
            if isinstance(attack, PGD) and attack.steps < 1:
                raise UsageError("an attack of 0 steps only adds noise: give at least 1 step, or the method standard")
        if self.epochs < 1 or self.batch_size < 1:
            raise UsageError(f"epochs and batch_size are at least 1, got {self.epochs} and {self.batch_size}")
        if self.sampling == "balanced" and self.method.class_balance is not None:
            raise UsageError(
                f"the method {self.method.class_balance}, and with sampling balanced the sizes of the classes would "
                "count twice: use sampling shuffled, or a method that leaves them alone, such as at"
            )
        if self.microbatch is not None and self.microbatch < 1:
            raise UsageError(f"microbatch is at least 1 image, or none for whole batches, got {self.microbatch}")
        if not 0 <= self.warm_up < 1:
            raise UsageError(f"warm_up is a share of training in [0, 1), got {self.warm_up}")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UsageError(f"ema_decay is a decay in [0, 1), such as 0.999, got {self.ema_decay}")
