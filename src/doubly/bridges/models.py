"""Models of other libraries by name: hf:ORG/NAME or hf:./folder, timm:NAME, torchvision:NAME, robustbench:NAME."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.functional import interpolate

from doubly.bridges.packages import import_package
from doubly.errors import UsageError
from doubly.models.adapt import AdaptedModel

LIBRARIES = {  # what the user writes: our module, and the package
    "hf": ("doubly.bridges.hugging_face", "transformers"),
    "timm": ("doubly.bridges.timm", "timm"),
    "torchvision": ("doubly.bridges.torchvision", "torchvision"),
    "robustbench": ("doubly.bridges.robustbench", "robustbench"),
}
MAX_NAMED = 5  # labels that a sentence shows
T = TypeVar("T")


class ResizedModel(AdaptedModel):
    """A network from images in [0, 1] of any size to logits; it resizes (bilinear) and normalizes as its library does.

    Its state dict is that of the network inside.
    """

    def __init__(
        self,
        model: nn.Module,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(model, mean, std)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        if self.size is not None and x.shape[-2:] != self.size:
            x = interpolate(x, self.size, mode="bilinear", align_corners=False, antialias=True)
        return super().forward(x)


@dataclass(frozen=True, eq=False)
class FoundModel:
    """A model with its weights, and what its library says about it.

    Attributes:
        title: Its name on the command line.
        model: The network.
        classes: Number of classes.
        labels: Names of the classes in the order of the logits; empty if the library does not say.
        size: Height and width that it takes; None if it takes any.
        mean: Mean of the channels that it expects to be subtracted; None if it takes images in [0, 1].
        std: Standard deviation of the channels.
        channels: Channels that it takes.
    """

    title: str
    model: nn.Module
    classes: int
    labels: tuple[str, ...] = ()
    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    channels: int = 3

    @property
    def sentence(self) -> str:
        """What was found, in one line."""
        more = ", …" if len(self.labels) > MAX_NAMED else ""
        labels = f" in the order {', '.join(self.labels[:MAX_NAMED])}{more}" if self.labels else ", labels not named"
        size = "any size" if self.size is None else f"{self.size[0]} × {self.size[1]} pixels"
        normalized = "takes images in [0, 1]"
        if self.mean is not None and self.std is not None:
            numbers = [", ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std)]
            normalized = f"mean {numbers[0]}, std {numbers[1]}"
        return f"{self.title}: {type(self.model).__name__}, {self.classes} classes{labels}, {size}, {normalized}"

    def check_data(self, channels: int, classes: int, names: Sequence[str] = ()) -> None:
        """Refuse images that the model was not made for.

        Args:
            channels: Channels of the images.
            classes: Number of classes of the data.
            names: Names of these classes, if they are known.

        Raises:
            UsageError: If channels or classes differ in number, or the classes have another order.
        """
        if channels != self.channels:
            raise UsageError(
                f"{self.title} takes images with {self.channels} channel(s) and the data has {channels}: convert the "
                "images, or choose another model"
            )
        if classes != self.classes:
            raise UsageError(
                f"{self.title} has {self.classes} classes and the data {classes}: give a model trained on these "
                "classes, or write a function that replaces its last layer, --model package.module:function"
            )
        ours, theirs = [_plain(name) for name in names], [_plain(name) for name in self.labels]
        if ours != theirs and sorted(ours) == sorted(theirs):
            first = next(index for index in range(len(ours)) if ours[index] != theirs[index])
            raise UsageError(
                f"the labels of {self.title} have another order than the classes of the data, where class {first} is "
                f"'{names[first]}' and not '{self.labels[first]}': name the classes in the order of the model"
            )

    def network(self, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> nn.Module:
        """Return the network from images in [0, 1] to logits; `mean` and `std` replace those that were found."""
        if mean is None or std is None:
            mean, std = self.mean, self.std
        return ResizedModel(self.model, mean, std, self.size)


def _plain(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def find_model(title: str) -> FoundModel:
    """Load a model by its name; its weights are read without executing anything.

    Args:
        title: LIBRARY:NAME.

    Raises:
        UsageError: If the library is not installed, or there is no such model, or it cannot be fetched.
    """
    library, _, name = title.partition(":")
    if library not in LIBRARIES or not name:
        raise UsageError(
            f"a model by name is written {', '.join(f'{word}:NAME' for word in LIBRARIES)}, got '{title:.80}'"
        )
    find: Callable[[str], FoundModel] = importlib.import_module(LIBRARIES[library][0]).find
    return find(name)


def build_model(
    title: str, channels: int, classes: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> nn.Module:
    """Load a model by its name as a network from images in [0, 1] to logits; arguments as in `FoundModel`."""
    found = find_model(title)
    found.check_data(channels, classes)
    return found.network(mean, std)


def library_of(library: str) -> ModuleType:
    """Import the package of a library.

    Raises:
        UsageError: If it is not installed, or cannot be imported.
    """
    package = LIBRARIES[library][1]
    return import_package(package, f"--model {library}:… needs", package, library)


def attempt(title: str, call: Callable[[], T], advice: str) -> T:
    """Call a library; whatever it raises becomes one sentence with this advice."""
    try:
        return call()
    except UsageError:
        raise
    except Exception as error:  # whatever the library raises
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise UsageError(f"{title} cannot be loaded ({type(error).__name__}: {reason:.120}): {advice}") from None
