"""AutoAttack (Croce and Hein 2020): the attacks of the reference package `pyautoattack`, one at a time on one batch.

`evaluation.autoattack` decides which samples they run on, and what is saved. Global generators and the trace
function are restored. The caller freezes the parameters, since FAB would leave gradients on them.
"""

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from doubly.errors import UsageError
from doubly.settings import Settings
from doubly.threat import LinfBall, Threat, check_threat

Part = Literal["apgd-ce", "apgd-t", "fab-t", "square"]
Predict = Callable[[Tensor], Tensor]
STANDARD: tuple[Part, ...] = ("apgd-ce", "apgd-t", "fab-t", "square")
QUICK: tuple[Part, ...] = ("apgd-ce", "apgd-t")  # gradient attacks only: much faster, under another label
ENSEMBLES: dict[str, tuple[Part, ...]] = {"autoattack": STANDARD, "quick": QUICK}  # by the name in an evaluation
NORMS = ("Linf", "L2", "L1")  # that the reference supports here


@dataclass(frozen=True)
class AutoAttack(Settings):
    """The standard ensemble of four attacks within an l-infinity, l2 or l1 ball.

    Raises:
        UsageError: If the norm is not supported, the parts are unknown or repeated, or a number is below 1.
    """

    threat: Threat = field(default_factory=LinfBall)
    """what the attacker may do"""
    parts: tuple[Part, ...] = STANDARD
    """attacks, in this order, each on the samples that no attack before it has broken"""
    iterations: int = 100
    """iterations of APGD, and of FAB for each target"""
    targets: int = 9
    """number of classes that APGD-T and FAB-T try; fewer where there are fewer"""
    queries: int = 5000
    """queries of Square"""
    seed: int = 0
    """seed of the random numbers, set again for each attack on each batch as the reference does"""

    checks_itself: ClassVar[tuple[str, ...]] = ("threat", "parts")

    def __post_init__(self) -> None:
        check_threat(self.threat, "AutoAttack")
        if self.threat.norm not in NORMS:
            raise UsageError(
                f"AutoAttack knows l-infinity, l2 and l1 balls, got {type(self.threat).__name__}: use one of these"
            )
        if not isinstance(self.parts, tuple | list):
            raise UsageError(f"parts must be a tuple of {', '.join(STANDARD)}, got {self.parts!r:.40}")
        unknown = [part for part in self.parts if part not in STANDARD]
        if unknown or not self.parts or len(set(self.parts)) < len(self.parts):
            raise UsageError(f"parts must be some of {', '.join(STANDARD)}, each once, got {self.parts}")
        if min(self.iterations, self.targets, self.queries) < 1:
            raise UsageError(
                f"iterations, targets and queries must be at least 1, got {self.iterations}, {self.targets} and "
                f"{self.queries}"
            )

    @property
    def label(self) -> str:
        """The name of its accuracy: RA-AA for the whole ensemble with its standard numbers, another otherwise."""
        if (self.iterations, self.targets, self.queries) == (100, 9, 5000):
            if self.parts == STANDARD:
                return "RA-AA"
            if self.parts == QUICK:
                return "RA-APGD"
        numbers = f"{self.iterations} iterations, {self.targets} targets, {self.queries} queries"
        return f"RA-({'+'.join(self.parts)}; {numbers})"

    @property
    def name(self) -> str:
        """The name of its predictions in a result: autoattack for the whole ensemble only."""
        return {"RA-AA": "autoattack", "RA-APGD": "apgd"}.get(self.label, "autoattack_in_part")

    def substitutions(self, classes: int) -> list[str]:
        """Return sentences about what replaces the standard definition where there are too few classes for it.

        Args:
            classes: Number of classes.

        Returns:
            One sentence per replacement; none with ten classes or more.
        """
        sentences, targeted = [], {"apgd-t", "fab-t"} & set(self.parts)
        if targeted and classes - 1 < self.targets:
            sentences.append(f"{classes - 1} targets instead of {self.targets}, since there are {classes} classes")
        if "apgd-t" in self.parts and classes == 3:
            sentences.append(
                "the loss of APGD-T is (z_t - z_y) / (z_1 - (z_2 + z_3) / 2), since the targeted DLR needs 4 classes"
            )
        if "apgd-t" in self.parts and classes == 2:
            sentences.append("the loss of APGD-T is the margin z_t - z_y, since the DLR needs 3 classes")
        return sentences

    def check(self, size: tuple[int, ...]) -> None:
        """Refuse images of a height and width that the reference cannot attack.

        Args:
            size: Height and width of the images.

        Raises:
            UsageError: If Square would run on images smaller than 5 x 5 pixels in an l2 ball.
        """
        if "square" in self.parts and self.threat.norm in ("L2", "L1") and min(size) < 5:
            raise UsageError(
                f"Square within an {self.threat.norm.lower()} ball needs images of at least 5 x 5 pixels, got {size}: "
                "use quick, or an l-infinity ball"
            )

    def perturb(
        self, part: Part, predict: Predict, x: Tensor, y: Tensor, classes: int, warn: Callable[[str], None]
    ) -> Tensor:
        """Attack images with one part of the ensemble.

        Args:
            part: Which attack.
            predict: The network, or a faster form of it.
            x: Images in [0, 1].
            y: Their labels.
            classes: Number of classes.
            warn: Called with each warning of the reference.

        Returns:
            The attacked images; those that the attack could not break come back unchanged.
        """
        with _restored_generators(x), torch.no_grad():
            attack = self._reference_attack(part, predict, x.device, classes, _WarningLogger(warn))
            attacked: Tensor = attack.perturb(x.clone(), y)
        return attacked.detach()

    def _reference_attack(
        self, part: Part, predict: Predict, device: torch.device, classes: int, logger: "_WarningLogger"
    ) -> Any:
        from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
        from pyautoattack.fab_pt import FABAttack_PT
        from pyautoattack.square import SquareAttack

        common: dict[str, Any] = {
            "norm": self.threat.norm,
            "eps": self.threat.radius,
            "seed": self.seed,
            "verbose": False,
            "device": device,
        }
        targets = min(self.targets, classes - 1)
        # In l1 the reference starts APGD in larger balls, five times, and tries five targets.
        large, restarts = (True, 5) if self.threat.norm == "L1" else (False, 1)
        apgd: dict[str, Any] = {"n_iter": self.iterations, "eot_iter": 1, "rho": 0.75, "use_largereps": large, **common}
        if part == "apgd-ce":
            return APGDAttack(predict, n_restarts=restarts, logger=logger, **apgd)
        if part == "square":
            return SquareAttack(predict, n_queries=self.queries, p_init=0.8, resc_schedule=False, **common)
        if part == "fab-t":
            return FABAttack_PT(predict, n_iter=self.iterations, targeted=True, n_target_classes=targets, **common)
        targets = min(targets, 5) if large else targets
        attack = APGDAttack_targeted(predict, n_target_classes=targets, logger=logger, **apgd)
        if classes <= 3:
            attack.dlr_loss_targeted = lambda logits, y: _loss_for_few_classes(logits, y, attack.y_target)
        return attack


def _loss_for_few_classes(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    rows = torch.arange(len(y), device=y.device)
    margin = logits[rows, target] - logits[rows, y]
    if logits.shape[1] == 2:
        return margin
    # Divided by z_1 - z_3 it would be -1, without a gradient, where y is the likeliest class and the target the least.
    ordered = logits.sort(dim=1)[0]
    return margin / (ordered[:, -1] - 0.5 * (ordered[:, -2] + ordered[:, -3]) + 1e-12)


def _restored_generators(x: Tensor) -> AbstractContextManager[None]:
    """Restore torch's global generators, which the reference reseeds."""
    return torch.random.fork_rng(devices=[x.device] if x.is_cuda else [])


def reference_version() -> str:
    """Return name and version of the reference package."""
    import pyautoattack

    return f"pyautoattack {pyautoattack.__version__}"


def warnings_about(model: Predict, x: Tensor, y: Tensor) -> list[str]:
    """Return the reference's warnings about a network: randomness, probabilities, or derivatives in its forward."""
    from pyautoattack import checks

    warnings: list[str] = []
    tracing, logger = sys.gettrace(), _WarningLogger(warnings.append)
    try:
        with _restored_generators(x), torch.no_grad():
            checks.check_randomized(model, x, y, bs=len(x), logger=logger)
            checks.check_range_output(model, x, logger=logger)
            checks.funcs.update(dict.fromkeys(checks.funcs, 0))  # counts of an earlier network
            checks.check_dynamic(model, x, False, logger=logger)
    finally:
        sys.settrace(tracing)
        checks.funcs.update(dict.fromkeys(checks.funcs, 0))
    return warnings


def warnings_after(accuracies: dict[str, float]) -> list[str]:
    """Return the reference's warning if Square lowered the accuracy that the gradient attacks left."""
    from pyautoattack import checks

    warnings: list[str] = []
    checks.check_square_sr(accuracies, logger=_WarningLogger(warnings.append))
    return warnings


class _WarningLogger:
    """The logger that the reference is given: it passes warnings on and drops the rest."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn

    def warning(self, message: str) -> None:
        # Without the number of points, which is another for each batch and target.
        self.warn(re.sub(r"there are \d+ points", "there are points", message.partition(" See flags_doc")[0]))

    def debug(self, message: str) -> None: ...

    info = debug
