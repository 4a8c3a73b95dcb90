"""N-FGSM (de Jorge et al. 2022): a sign step from strong noise, and no projection onto the ball.

    noise ~ U(-k epsilon, k epsilon), cut to the image range;  delta = noise + reach * epsilon * sign(gradient there)

delta is cut to the image range only, so it leaves the ball by design, by up to k + reach radii: that is what keeps fast
training from overfitting its own attack. For training; no accuracy under it says anything about the ball.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from doubly.attacks.forward import Mode
from doubly.attacks.mode import attacked
from doubly.bilevel import Box, SignStep, projected_descent
from doubly.checks import check_images, check_scores
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.threat import LinfBall


@dataclass(frozen=True)
class NFGSM:
    """One sign step from noise, within the image range alone."""

    threat: LinfBall = field(default_factory=LinfBall)
    """its radius is epsilon; delta may leave it"""
    noise: float = 2.0
    """k: the noise reaches so many radii"""
    reach: float = 1.0
    """step size as a multiple of epsilon"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what the attacker increases"""
    attack_mode: Mode = "eval"
    """eval or train: see PGD; the released code trains"""

    leaves_the_ball = True  # a fact about the class, not a setting

    def __post_init__(self) -> None:
        check_plain(self.loss, "N-FGSM")
        if self.noise < 0 or not self.reach > 0:
            raise UsageError(f"N-FGSM needs noise >= 0 and reach > 0, got {self.noise:g} and {self.reach:g}")

    def scaled(self, share: float) -> "NFGSM":
        """The attack with `share` of the radius."""
        return replace(self, threat=self.threat.scaled(share))

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        check_images(x, y)
        image_range = Box(-x, 1 - x)
        start = self.noise * self.threat.radius * (2 * parallel.uniform(x, generator) - 1)

        def inner(delta: Tensor) -> Tensor:
            logits = model(x + delta)
            check_scores(logits, y)
            return -self.loss(logits, y)

        with attacked(model, self.attack_mode):
            return projected_descent(inner, start, image_range, SignStep(self.reach * self.threat.radius), 1)
