"""Attacks of other libraries by name: foolbox:NAME, torchattacks:NAME and advlib:NAME, with options."""

import difflib
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor, nn

from doubly.attacks import Attack, frozen_parameters
from doubly.bridges.packages import import_package
from doubly.errors import UsageError
from doubly.reading import parse_json
from doubly.seeding import AnyGenerator, BatchGenerator, global_generators
from doubly.threat import Threat

LIBRARIES = {  # what the user writes: our module, the package, and what pip installs
    "foolbox": ("doubly.bridges.foolbox", "foolbox", "foolbox"),
    "torchattacks": ("doubly.bridges.torchattacks", "torchattacks", "torchattacks"),
    "advlib": ("doubly.bridges.adv_lib", "adv_lib.attacks", "adv-lib"),
}


@dataclass(frozen=True)
class ForeignAttack(Attack):
    """An attack of another library; a subclass in `bridges` knows how that library is called.

    What it returns is checked: an image outside the ball or [0, 1] counts as not broken.
    """

    threat: Threat
    """what the attacker may do"""
    name: str
    """name of the attack in its library"""
    options: tuple[tuple[str, Any], ...] = ()
    """further settings, as its library names them"""

    may_leave: ClassVar[bool] = True
    library: ClassVar[str]

    def __post_init__(self) -> None:
        self.prepare()

    @property
    def title(self) -> str:
        """The attack as it is named on the command line."""
        return f"{self.library}:{self.name}"

    @property
    def short_name(self) -> str:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.name)
        return f"{self.library}_{words}".lower()

    def describe(self) -> dict[str, Any]:
        package = self.package()
        version = str(getattr(package, "__version__", None) or importlib.metadata.version(LIBRARIES[self.library][2]))
        options = {name: str(value) if value == float("inf") else value for name, value in self.settings().items()}
        return {"kind": f"{self.library}.{self.name}", "version": version, "options": options}

    @classmethod
    def package(cls) -> ModuleType:
        """Import the library.

        Raises:
            UsageError: If it is not installed, or cannot be imported.
        """
        _, module, distribution = LIBRARIES[cls.library]
        return import_package(module, f"attacks {cls.library}:… need", distribution, cls.library)

    def prepare(self) -> None:
        """Check name and options before anything is attacked.

        Raises:
            UsageError: If there is no such attack, or it cannot attack within the threat.
        """
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Return the settings that the attack is called with."""
        return dict(self.options)

    def search(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the attacked images."""
        raise NotImplementedError

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        # These libraries draw from torch's global generators: the numbers follow from the seed and the chunk.
        draws = BatchGenerator.of(generator)
        start = 0 if draws.rows is None else draws.rows.start
        seed = (draws.generator.initial_seed() + start) % 2**63
        with global_generators(seed), frozen_parameters(model):  # some leave gradients on the parameters
            attacked = self.attempt(lambda: self.search(model, x.clone(), y.clone()))  # some libraries write into x
        if not isinstance(attacked, Tensor) or attacked.shape != x.shape:
            kind = tuple(attacked.shape) if isinstance(attacked, Tensor) else type(attacked).__name__
            raise UsageError(
                f"{self.title} returned {kind} for images of shape {tuple(x.shape)}: choose another attack"
            )
        return attacked.detach().to(x) - x

    def attempt(self, call: Callable[[], Any]) -> Any:
        """Call the library; whatever it raises becomes one sentence."""
        try:
            return call()
        except UsageError:
            raise
        except Exception as error:  # whatever the library raises
            reason = (str(error).splitlines() or [f"no reason is given, in an {self.threat.norm} ball"])[0]
            raise UsageError(
                f"{self.title} raised {type(error).__name__}: {reason:.160}; change its options, or take another attack"
            ) from None

    def select(self, kinds: Mapping[str, Any]) -> Any:
        """Return what the library has under the name of the attack, in capital or small letters.

        Raises:
            UsageError: If it has nothing of this name.
        """
        alike = {name.lower(): kind for name, kind in kinds.items()}
        if self.name in kinds or self.name.lower() in alike:
            return kinds.get(self.name, alike.get(self.name.lower()))
        close = difflib.get_close_matches(self.name, kinds, 3, 0.4)
        raise UsageError(
            f"{self.library} has no attack '{self.name:.60}': did you mean {', '.join(close or sorted(kinds)[:5])}?"
        )

    def check_options(self, allowed: Iterable[str]) -> None:
        """Refuse options that the attack does not have.

        Raises:
            UsageError: If there is one; the message lists what it has.
        """
        allowed = list(allowed)
        if extra := [name for name, _ in self.options if name not in allowed]:
            raise UsageError(f"{self.title} has no option '{extra[0]:.40}': it has {', '.join(allowed) or 'none'}")


def is_foreign(text: str) -> bool:
    """Return whether the name of an attack is that of another library."""
    return text.partition(":")[0] in LIBRARIES and ":" in text


def foreign_attack(text: str, threat: Threat) -> ForeignAttack:
    """Return an attack of another library.

    Args:
        text: LIBRARY:NAME, then options as ,name=JSON: foolbox:LinfFMNAttack,steps=50.
        threat: What the attacker may do.

    Raises:
        UsageError: If library, attack or option are unknown, or the library is not installed.
    """
    library, _, rest = text.partition(":")
    if library not in LIBRARIES:
        raise UsageError(f"'{library:.40}' is no library of attacks: write one of {', '.join(LIBRARIES)}, then :NAME")
    name, *options = re.split(r",(?=\s*[^\W\d]\w*=)", rest)
    if not name.isidentifier():
        raise UsageError(f"an attack is written {library}:NAME or {library}:NAME,option=value, got '{text:.80}'")
    kind: type[ForeignAttack] = importlib.import_module(LIBRARIES[library][0]).BRIDGE
    return kind(threat, name, tuple(_option(text, option) for option in options))


def _option(text: str, option: str) -> tuple[str, Any]:
    name, _, value = option.strip().partition("=")
    try:
        return name, parse_json(value)
    except ValueError:
        if re.fullmatch(r"[\w.+-]+", value):  # a word needs no quotes
            return name, value
        raise UsageError(
            f"the option '{option:.60}' of {text:.60} is no JSON value: write name=0.5 or name=true"
        ) from None
