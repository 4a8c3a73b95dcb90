"""Attacks of torchattacks (Kim 2020): those with a parameter eps within the threat, the others with a radius."""

import inspect
from typing import Any, ClassVar

from torch import Tensor, nn

from doubly.bridges.attacks import ForeignAttack
from doubly.errors import UsageError


class TorchattacksAttack(ForeignAttack):
    """An attack class of `torchattacks`; eps is that of the threat, and alpha a quarter of it unless it is given."""

    library: ClassVar[str] = "torchattacks"

    @property
    def finds_radius(self) -> bool:
        return "eps" not in self._parameters()

    def prepare(self) -> None:
        parameters = self._parameters()
        self.check_options([name for name in parameters if name != "eps"])
        bound = "L2" if self.name.endswith("L2") else None if "norm" in parameters else "Linf"
        if not self.finds_radius and bound not in (None, self.threat.norm):
            raise UsageError(
                f"{self.title} stays in an {bound} ball and the threat is {self.threat.norm}: add --norm "
                f"{str(bound).lower()}, or choose an attack for {self.threat.norm}"
            )

    def settings(self) -> dict[str, Any]:
        parameters = self._parameters()
        values: dict[str, Any] = {}
        if "eps" in parameters:
            values = {"eps": self.threat.radius} | ({"alpha": self.threat.radius / 4} if "alpha" in parameters else {})
        if "norm" in parameters:
            values["norm"] = self.threat.norm
        return values | dict(self.options)

    def search(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        attack = self._kind()(model, **self.settings())
        attacked: Tensor = attack(x, y)
        return attacked

    def _kind(self) -> Any:
        package = self.package()
        base = package.attack.Attack
        kinds = {name: kind for name, kind in vars(package).items() if inspect.isclass(kind) and issubclass(kind, base)}
        return self.select(kinds)

    def _parameters(self) -> list[str]:
        return [name for name in inspect.signature(self._kind()).parameters if name != "model"]


BRIDGE = TorchattacksAttack
