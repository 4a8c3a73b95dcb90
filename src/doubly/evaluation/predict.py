"""Predictions of a network on clean and attacked images, chunk by chunk; each process does its share of every chunk."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from doubly.attacks import Attack, eval_mode, model_device
from doubly.checks import check_logits
from doubly.data import Images
from doubly.distributed import SINGLE_PROCESS, Communicator, run_together
from doubly.errors import UsageError
from doubly.evaluation.memory import MicrobatchLimit
from doubly.evaluation.metrics import Floats, Ints
from doubly.evaluation.network import is_decided
from doubly.evaluation.searches import settle
from doubly.losses import CrossEntropy, LogitMargin
from doubly.seeding import BatchGenerator, Rows, generator
from doubly.threat import is_image, is_inside

NOT_ATTACKED = -1  # prediction of a sample that an attack was not run on
# attack, position of the first image, losses, attacked images, labels of those that it turns from right to wrong
OnChunk = Callable[[str, int, Tensor, Tensor, Tensor], None]


class SampleScores(NamedTuple):
    """Predicted classes, losses and margins of some images, (B,) each.

    Attributes:
        classes: Predicted class.
        losses: Cross-entropy.
        margins: z_y - max_{j != y} z_j: negative where the prediction is wrong, infinite if there is one class.
    """

    classes: Tensor
    losses: Tensor
    margins: Tensor


@dataclass
class Predictions:
    """Predictions per sample, in the order of the images, by attack; and a check of the attacked images themselves."""

    classes: dict[str, Ints] = field(default_factory=dict)
    losses: dict[str, Floats] = field(default_factory=dict)
    margins: dict[str, Floats] = field(default_factory=dict)
    attacked: dict[str, Tensor] = field(default_factory=dict)  # attacked images that were to be kept
    checked: int = 0  # attacked images
    outside: int = 0  # of these, outside the threat or the image range
    changed: int = 0  # of these, predicted otherwise in another batch
    radii: dict[str, Floats] = field(default_factory=dict)  # of attacks that look for the smallest perturbation
    failed: dict[str, int] = field(default_factory=dict)  # images that another library's attack moved out of the threat
    largest: float | None = None  # |delta| / epsilon

    @property
    def examples(self) -> dict[str, Any]:
        """The check of the attacked images, as evaluation.json keeps it."""
        return {
            "n": self.checked,
            "asked": self.checked,
            "outside": self.outside,
            "changed": self.changed,
            "largest": self.largest,
            **({"failed": self.failed} if self.failed else {}),
        }


def predict(
    model: nn.Module,
    images: Images,
    attacks: Mapping[str, Attack],
    *,
    seed: int = 0,
    chunk_size: int = 500,
    communicator: Communicator = SINGLE_PROCESS,
    limit: MicrobatchLimit | None = None,
    keep: Tensor | None = None,
    on_chunk: OnChunk | None = None,
    on_images: Callable[[int], None] = lambda count: None,
) -> Predictions:
    """Attack every image with every attack, and predict clean and attacked images.

    Random numbers belong to the chunk, so `chunk_size` is part of the protocol. Of several processes each attacks a
    part of every chunk, and all return the same.

    Args:
        model: The network; it is left as it was found.
        images: The images.
        attacks: Attacks by name.
        seed: Seed of the attacks; all attacks start at the same points.
        chunk_size: Images that are attacked at a time.
        communicator: The processes that share the work.
        limit: How many images fit into memory at a time.
        keep: Positions, in rising order, of images whose attacked versions are kept.
        on_chunk: Called with each attacked chunk.
        on_images: Called with the number of images done.

    Returns:
        Classes, losses and margins by attack, and what the check of the attacked images found.

    Raises:
        UsageError: If the chunk is empty, or the network cannot be evaluated.
        NonFiniteError: If the network returns NaN or infinity.
    """
    if chunk_size < 1:
        raise UsageError(f"a chunk has at least 1 image, got {chunk_size}")
    result = Predictions()
    wants_images = keep is not None or on_chunk is not None
    predictor = Predictor(model, images, attacks, seed, wants_images, limit or MicrobatchLimit(), communicator)
    scores: dict[str, list[SampleScores]] = {name: [] for name in ("clean", *attacks)}
    attacked_chunks: dict[str, list[Tensor]] = {name: [] for name in attacks if keep is not None}
    searches: list[Tensor] = []
    with eval_mode(model):
        for index, start in enumerate(range(0, len(images), chunk_size)):
            end = min(start + chunk_size, len(images))
            y, (logits, attacked, search) = images.y[start:end].cpu(), predictor.predict_chunk(index, start, end)
            searches.append(search)
            scores["clean"].append(_scores(logits[0], y))
            for k, name in enumerate(attacks):
                first, again = logits[1 + 2 * k : 3 + 2 * k]
                scores[name].append(_scores(first, y))
                result.checked += len(y)
                result.changed += int(((first.argmax(1) != again.argmax(1)) & is_decided(first)).sum())
                if on_chunk is not None:
                    broken = (scores["clean"][-1].classes == y) & (scores[name][-1].classes != y)
                    on_chunk(name, start, scores[name][-1].losses, attacked[k], torch.where(broken, y, -1))
                if keep is not None:
                    attacked_chunks[name].append(attacked[k][keep[(keep >= start) & (keep < end)].cpu() - start])
            on_images(end)
    result.outside, result.largest = predictor.check_of_all_processes()
    for name, chunks in scores.items():
        classes, losses, margins = (torch.cat(values).numpy() for values in zip(*chunks, strict=True))
        result.classes[name] = classes
        result.losses[name], result.margins[name] = losses.astype(np.float64), margins.astype(np.float64)
    result.attacked = {name: torch.cat(rows) for name, rows in attacked_chunks.items()}
    for name, radii, failed in zip(attacks, *torch.cat(searches).permute(2, 1, 0), strict=True):
        if (covered := attacks[name].covers(images.ids)) is not None:
            result.classes[name][~covered.cpu().numpy()] = NOT_ATTACKED
        if attacks[name].finds_radius:
            result.radii[name] = radii.numpy()
        if failed.any():
            result.failed[name] = int(failed.sum())
    return result


class _Microbatch(NamedTuple):
    """Logits and attacked images of some rows of a chunk, on the CPU."""

    logits: Tensor  # (B, 1 + 2 * attacks, classes): clean, and of each attack its images, twice in different batches
    attacked: tuple[Tensor, ...]  # images of each attack, (B, ...); none if they are not kept
    search: Tensor  # (B, attacks, 2): the radius that each attack found, and whether it left the threat


class Predictor:
    """Predicts one chunk after the other, on each process its share of it."""

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        attacks: Mapping[str, Attack],
        seed: int,
        wants_images: bool,
        limit: MicrobatchLimit,
        communicator: Communicator,
    ) -> None:
        self.model, self.images, self.attacks, self.seed = model, images, attacks, seed
        self.wants_images, self.limit, self.communicator = wants_images, limit, communicator
        self.outside = 0  # attacked images of this process outside the threat or the image range
        self.largest: float | None = None  # |delta| / epsilon, of this process

    def predict_chunk(self, index: int, start: int, end: int) -> tuple[tuple[Tensor, ...], list[Tensor], Tensor]:
        """Return logits, attacked images and radii of a chunk, as all processes together computed them."""
        first, last = self.communicator.share(end - start)

        def compute(low: int, high: int) -> _Microbatch:
            rows = Rows(first + low, end - start)
            return self._microbatch(index, slice(start + first + low, start + first + high), rows)

        def compute_share() -> list[_Microbatch]:
            return self.limit.map(last - first, compute) if first < last else [self._empty(index, start)]

        def assembled(parts: Iterable[Tensor]) -> Tensor:
            return self.communicator.assemble(torch.cat(list(parts)), first, end - start)

        microbatches = run_together(self.communicator, compute_share)
        attacked = [assembled(parts) for parts in zip(*(part.attacked for part in microbatches), strict=True)]
        search = torch.zeros(end - start, len(self.attacks), 2, dtype=torch.float64)
        if any(attack.may_leave for attack in self.attacks.values()):
            search = assembled(part.search for part in microbatches)
        return assembled(part.logits for part in microbatches).unbind(1), attacked, search

    def _microbatch(self, index: int, positions: slice, rows: Rows) -> _Microbatch:
        device = model_device(self.model)
        x, y = self.images.pixels(positions).to(device), self.images.y[positions].to(device)
        logits, attacked = [self._logits(x, y).cpu()], []
        search = torch.zeros(len(y), len(self.attacks), 2, dtype=torch.float64)
        for column, attack in enumerate(self.attacks.values()):
            # All attacks start at the same points: what differs between two of them is then the attack.
            draws = BatchGenerator(generator(self.seed, 0, index, "evaluation"), rows)
            point = x + attack.for_images(self.images.ids[positions], y)(self.model, x, y, draws)
            if attack.may_leave:
                outcome = settle(self.model, attack, x, y, point, logits[0].to(device))
                point, search[:, column] = outcome.point, outcome.search.cpu()
            logits.append(self._logits(point, y).cpu())
            with torch.no_grad():
                logits.append(self.model(point.flip(0)).flip(0).cpu())  # is it predicted alike in another batch?
            attacked += [point.cpu()] if self.wants_images else []
            length = float(attack.threat.length(point - x).max()) / attack.threat.radius
            self.largest = length if self.largest is None else max(self.largest, length)
            self.outside += int((~(is_image(point) & is_inside(attack.threat, point - x))).sum())
        return _Microbatch(torch.stack(logits, 1), tuple(attacked), search)

    def _empty(self, index: int, start: int) -> _Microbatch:
        """Return no rows, of the shapes that the other processes have, which one image tells."""
        outside, largest = self.outside, self.largest
        single = self._microbatch(index, slice(start, start + 1), Rows(0, 1))
        self.outside, self.largest = outside, largest
        return _Microbatch(single.logits[:0], tuple(rows[:0] for rows in single.attacked), single.search[:0])

    def _logits(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(x)
        check_logits(logits, y)
        return logits

    def check_of_all_processes(self) -> tuple[int, float | None]:
        """Return how many attacked images were outside, and the largest |delta| / epsilon, over all processes."""
        largest = -1.0 if self.largest is None else self.largest
        counts = self.communicator.all_gather(torch.tensor([[float(self.outside), largest]], dtype=torch.float64))
        outside, largest = int(counts[:, 0].sum()), float(counts[:, 1].max())
        return outside, None if largest < 0 else largest


def _scores(logits: Tensor, y: Tensor) -> SampleScores:
    return SampleScores(logits.argmax(1), CrossEntropy()(logits, y), -LogitMargin()(logits, y))
