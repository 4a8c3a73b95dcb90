"""Attacks of adv-lib (Rony and Ben Ayed): those that need eps within the threat, the others with a radius."""

import inspect
from typing import Any, ClassVar

from torch import Tensor, nn

from doubly.bridges.attacks import ForeignAttack

EPSILONS = ("eps", "ε", "epsilon")
NORMS = {"Linf": float("inf"), "L2": 2.0, "L1": 1.0}


class AdvLibAttack(ForeignAttack):
    """A function of `adv_lib.attacks`; its options are its parameters after model, inputs and labels."""

    library: ClassVar[str] = "advlib"

    @property
    def finds_radius(self) -> bool:
        return self._radius() is None

    def prepare(self) -> None:
        self.check_options([name for name in self._parameters() if name != self._radius()])

    def settings(self) -> dict[str, Any]:
        parameters = self._parameters()
        radius = self._radius()
        values: dict[str, Any] = {} if radius is None else {radius: self.threat.radius}
        values |= {"norm": NORMS[self.threat.norm]} if "norm" in parameters else {}
        values |= {"targeted": False} if "targeted" in parameters else {}
        return values | dict(self.options)

    def search(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        attacked: Tensor = self._function()(model, x, y, **self.settings())
        return attacked

    def _radius(self) -> str | None:
        """Return the parameter that is a radius; one with a default is a tolerance, or may be left out."""
        parameters = self._parameters()
        required = [
            name for name in EPSILONS if name in parameters and parameters[name].default is inspect.Parameter.empty
        ]
        return required[0] if required else None

    def _function(self) -> Any:
        functions = {
            name: function
            for name, function in vars(self.package()).items()
            if inspect.isfunction(function) and list(inspect.signature(function).parameters)[:2] == ["model", "inputs"]
        }
        return self.select(functions)

    def _parameters(self) -> dict[str, inspect.Parameter]:
        parameters = dict(inspect.signature(self._function()).parameters)
        return {name: parameters[name] for name in parameters if name not in ("model", "inputs", "labels")}


BRIDGE = AdvLibAttack
