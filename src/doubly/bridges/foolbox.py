"""Attacks of foolbox (Rauber et al. 2020): fixed-epsilon ones within the threat, minimum-norm ones with a radius."""

import inspect
from typing import Any, ClassVar

from torch import Tensor, nn

from doubly.bridges.attacks import ForeignAttack
from doubly.errors import UsageError

NORMS = {"inf": "Linf", "2": "L2", "1": "L1", "0": "L0"}


class FoolboxAttack(ForeignAttack):
    """An attack class of `foolbox.attacks`; its options are those of the class."""

    library: ClassVar[str] = "foolbox"

    @property
    def finds_radius(self) -> bool:
        kind = self._kind()
        return not issubclass(kind, self.package().attacks.base.FixedEpsilonAttack)

    def prepare(self) -> None:
        kind = self._kind()
        self.check_options([name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")])
        norm = self._norm(self.attempt(lambda: kind(**dict(self.options))))
        if norm is not None and norm != self.threat.norm:
            raise UsageError(
                f"{self.title} measures perturbations in {norm} and the threat is {self.threat.norm}: add --norm "
                f"{norm.lower()}, or choose an attack for {self.threat.norm}"
            )

    def search(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        foolbox = self.package()
        attack = self._kind()(**dict(self.options))
        wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=x.device)
        epsilon = None if self.finds_radius else self.threat.radius
        _, clipped, _ = attack(wrapped, x, foolbox.Misclassification(y), epsilons=epsilon)
        attacked: Tensor = clipped
        return attacked

    def _kind(self) -> Any:
        attacks = self.package().attacks
        kinds = {
            name: kind
            for name, kind in vars(attacks).items()
            if inspect.isclass(kind) and issubclass(kind, attacks.base.Attack) and not inspect.isabstract(kind)
        }
        return self.select(kinds)

    def _norm(self, attack: Any) -> str | None:
        """Return the norm that the attack minimizes or is bounded in; None if it does not say."""
        try:
            return NORMS.get(f"{float(attack.distance.p):g}")
        except (AttributeError, TypeError, ValueError):
            return None


BRIDGE = FoolboxAttack
