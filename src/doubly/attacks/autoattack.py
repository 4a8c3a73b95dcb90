"""AutoAttack (Croce and Hein 2020): the attacks of `pyautoattack`, its reference, one at a time on one batch.

Only the attacks are the reference's. Which samples they run on, and what is remembered, is `evaluation.driver`.
Generators and trace function are as they were. The caller freezes the parameters: FAB would leave gradients on them.
"""

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from doubly.errors import UsageError
from doubly.threat import LinfBall, NormBall

Part = Literal["apgd-ce", "apgd-t", "fab-t", "square"]
Predict = Callable[[Tensor], Tensor]
STANDARD: tuple[Part, ...] = ("apgd-ce", "apgd-t", "fab-t", "square")
QUICK: tuple[Part, ...] = ("apgd-ce", "apgd-t")  # gradients alone: hours less, and another label


@dataclass(frozen=True)
class AutoAttack:
    """The standard ensemble within an l-infinity or l2 ball; anything less has another label than RA-AA."""

    threat: NormBall = field(default_factory=LinfBall)
    """what the attacker may do"""
    parts: tuple[Part, ...] = STANDARD
    """attacks, in this order, each on the samples that still stand"""
    iterations: int = 100
    """of APGD and of FAB, for each target"""
    targets: int = 9
    """classes that APGD-T and FAB-T try; fewer where there are fewer"""
    queries: int = 5000
    """of Square"""
    seed: int = 0
    """set anew for each attack on each batch, as the reference does"""

    def __post_init__(self) -> None:
        if not isinstance(self.threat, NormBall):
            raise UsageError(f"AutoAttack knows l-infinity and l2 balls, got {type(self.threat).__name__}")
        unknown = [part for part in self.parts if part not in STANDARD]
        if unknown or not self.parts or len(set(self.parts)) < len(self.parts):
            raise UsageError(f"parts are some of {', '.join(STANDARD)}, each once, got {self.parts}")
        if min(self.iterations, self.targets, self.queries) < 1:
            raise UsageError("iterations, targets and queries are at least 1")

    @property
    def label(self) -> str:
        """RA-AA is the whole ensemble as it is defined and nothing else."""
        if (self.iterations, self.targets, self.queries) == (100, 9, 5000):
            if self.parts == STANDARD:
                return "RA-AA"
            if self.parts == QUICK:
                return "RA-APGD"
        numbers = f"{self.iterations} iterations, {self.targets} targets, {self.queries} queries"
        return f"RA-({'+'.join(self.parts)}; {numbers})"

    @property
    def name(self) -> str:
        """Of its answers in a result: autoattack is the whole alone."""
        return {"RA-AA": "autoattack", "RA-APGD": "apgd"}.get(self.label, "autoattack_in_part")

    @property
    def norm(self) -> str:
        return "Linf" if isinstance(self.threat, LinfBall) else "L2"

    def substitutions(self, classes: int) -> list[str]:
        """Where few classes make the definition impossible, what stands in its place (methods.md 6.2)."""
        said, targeted = [], {"apgd-t", "fab-t"} & set(self.parts)
        if targeted and classes - 1 < self.targets:
            said.append(f"{classes - 1} targets instead of {self.targets}, since there are {classes} classes")
        if "apgd-t" in self.parts and classes == 3:
            said.append(
                "the loss of APGD-T is (z_t - z_y) / (z_1 - (z_2 + z_3) / 2), since the targeted DLR needs 4 classes"
            )
        if "apgd-t" in self.parts and classes == 2:
            said.append("the loss of APGD-T is the margin z_t - z_y, since the DLR needs 3 classes")
        return said

    def check(self, size: tuple[int, ...]) -> None:
        """Refuses images, of this height and width, that the reference cannot attack."""
        if "square" in self.parts and self.norm == "L2" and min(size) < 5:
            raise UsageError(
                f"Square within an l2 ball needs images of at least 5 x 5 pixels, got {size}: use quick, or an "
                "l-infinity ball"
            )

    def perturb(
        self, part: Part, predict: Predict, x: Tensor, y: Tensor, classes: int, warn: Callable[[str], None]
    ) -> Tensor:
        """The images as `part` leaves them; those that it could not turn come back as they were."""
        with _generators_kept(x), torch.no_grad():
            found: Tensor = self._made(part, predict, x.device, classes, _Listener(warn)).perturb(x.clone(), y)
        return found.detach()

    def _made(self, part: Part, predict: Predict, device: torch.device, classes: int, logger: "_Listener") -> Any:
        from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
        from pyautoattack.fab_pt import FABAttack_PT
        from pyautoattack.square import SquareAttack

        common: dict[str, Any] = {
            "norm": self.norm,
            "eps": self.threat.radius,
            "seed": self.seed,
            "verbose": False,
            "device": device,
        }
        targets = min(self.targets, classes - 1)
        if part == "apgd-ce":
            return APGDAttack(predict, n_iter=self.iterations, eot_iter=1, rho=0.75, logger=logger, **common)
        if part == "square":
            return SquareAttack(predict, n_queries=self.queries, p_init=0.8, resc_schedule=False, **common)
        if part == "fab-t":
            return FABAttack_PT(predict, n_iter=self.iterations, targeted=True, n_target_classes=targets, **common)
        attack = APGDAttack_targeted(
            predict, n_iter=self.iterations, eot_iter=1, rho=0.75, n_target_classes=targets, logger=logger, **common
        )
        if classes <= 3:
            attack.dlr_loss_targeted = lambda logits, y: _few_classes(logits, y, attack.y_target)
        return attack


def _few_classes(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    rows = torch.arange(len(y), device=y.device)
    margin = logits[rows, target] - logits[rows, y]
    if logits.shape[1] == 2:
        return margin
    # Over z_1 - z_3 it would be -1, without a gradient, wherever y is the likeliest class and the target the least.
    ordered = logits.sort(dim=1)[0]
    return margin / (ordered[:, -1] - 0.5 * (ordered[:, -2] + ordered[:, -3]) + 1e-12)


def _generators_kept(x: Tensor) -> AbstractContextManager[None]:
    """torch's generators, which the reference reseeds, are after it as before."""
    return torch.random.fork_rng(devices=[x.device] if x.is_cuda else [])


def reference_version() -> str:
    import pyautoattack

    return f"pyautoattack {pyautoattack.__version__}"


def warnings_about(model: Predict, x: Tensor, y: Tensor) -> list[str]:
    """What the reference says of a network before it attacks: random, probabilities, or derivatives in its forward."""
    from pyautoattack import checks

    said: list[str] = []
    tracing, listener = sys.gettrace(), _Listener(said.append)
    try:
        with _generators_kept(x), torch.no_grad():
            checks.check_randomized(model, x, y, bs=len(x), logger=listener)
            checks.check_range_output(model, x, logger=listener)
            checks.funcs.update(dict.fromkeys(checks.funcs, 0))  # counts of an earlier network
            checks.check_dynamic(model, x, False, logger=listener)
    finally:
        sys.settrace(tracing)
        checks.funcs.update(dict.fromkeys(checks.funcs, 0))
    return said


def warnings_after(accuracies: dict[str, float]) -> list[str]:
    """What the reference says when Square lowers the accuracy that the attacks with gradients left."""
    from pyautoattack import checks

    said: list[str] = []
    checks.check_square_sr(accuracies, logger=_Listener(said.append))
    return said


class _Listener:
    """Takes the place of the logger that the reference speaks to."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn

    def warning(self, message: str) -> None:
        # Without the number of points, which is another for each batch and target.
        self.warn(re.sub(r"there are \d+ points", "there are points", message.partition(" See flags_doc")[0]))

    def debug(self, message: str) -> None: ...

    info = debug
