"""doubly: image classifiers that stay accurate under attack on every class, not only on average.

Names are loaded when they are first used, so that `import doubly.report` and `doubly --help` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from doubly.version import __version__

if TYPE_CHECKING:
    from doubly.attacks import FGSM, PGD, Strong
    from doubly.attacks.autoattack import AutoAttack
    from doubly.bilevel import SignStep
    from doubly.bridges.tensorboard import TensorBoard
    from doubly.callbacks import Callback
    from doubly.checkpoints.load import load
    from doubly.data import Images
    from doubly.errors import UsageError
    from doubly.evaluation.api import evaluate
    from doubly.evaluation.result import EvalResult
    from doubly.methods import (
        AT,
        ATBSL,
        AWP,
        CFA,
        CFOL,
        DAFA,
        DONE,
        FAAL,
        FAT,
        FRL,
        GAIRAT,
        MAIL,
        MART,
        TRADES,
        WAT,
        WMMR,
        DONEClass,
        FastATGA,
        FastBAT,
        GroupDRO,
        RobustLT,
        Standard,
    )
    from doubly.offsets.api import repair
    from doubly.threat import L1Ball, L2Ball, LinfBall
    from doubly.training.api import train
    from doubly.types import Batch, Objective, TrainStep


_MODULES = {  # of the names in __all__ that are not methods
    "AutoAttack": "attacks.autoattack",
    "EvalResult": "evaluation.result",
    "FGSM": "attacks",
    "PGD": "attacks",
    "Batch": "types",
    "Callback": "callbacks",
    "Images": "data",
    "L1Ball": "threat",
    "L2Ball": "threat",
    "LinfBall": "threat",
    "TrainStep": "types",
    "Objective": "types",
    "SignStep": "bilevel",
    "Strong": "attacks",
    "TensorBoard": "bridges.tensorboard",
    "UsageError": "errors",
    "evaluate": "evaluation.api",
    "load": "checkpoints.load",
    "repair": "offsets.api",
    "train": "training.api",
}

__all__ = [
    "AT",
    "ATBSL",
    "AWP",
    "CFA",
    "CFOL",
    "DAFA",
    "DONE",
    "FAAL",
    "FAT",
    "FGSM",
    "FRL",
    "GAIRAT",
    "MAIL",
    "MART",
    "PGD",
    "TRADES",
    "WAT",
    "WMMR",
    "AutoAttack",
    "Batch",
    "Callback",
    "DONEClass",
    "EvalResult",
    "FastATGA",
    "FastBAT",
    "GroupDRO",
    "Images",
    "L1Ball",
    "L2Ball",
    "LinfBall",
    "Objective",
    "RobustLT",
    "SignStep",
    "Standard",
    "Strong",
    "TensorBoard",
    "TrainStep",
    "UsageError",
    "__version__",
    "evaluate",
    "load",
    "repair",
    "train",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"doubly.{_MODULES.get(name, 'methods')}"), name)
    raise AttributeError(f"module 'doubly' has no attribute '{name}'")
