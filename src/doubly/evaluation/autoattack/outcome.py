"""The outcome of AutoAttack, combined from the chunks that are finished."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.attacks.autoattack import Part, warnings_after
from doubly.distributed import Communicator
from doubly.evaluation.autoattack.state import ChunkState
from doubly.evaluation.metrics import Bools, Ints, extended_names
from doubly.evaluation.predict import NOT_ATTACKED
from doubly.evaluation.result import EvalResult


@dataclass(frozen=True)
class Outcome:
    """Result of AutoAttack on all images of the finished chunks.

    Attributes:
        predictions: Predicted class of each image, (n,): the clean one if no attack has broken it, else the one that
            the attack led to; -1 in chunks that are not finished.
        robust_after: Which images are still correct after each attack and all before it, (n,).
        seconds: Time that each attack took.
        warnings: Warnings of the reference.
        largest: Largest |delta| / epsilon.
        attacked: Number of attacked images that were checked.
        outside: How many of these lie outside the threat or the image range, and so do not count.
        broken: Number of images that some attack has broken.
        chunks_done: Number of finished chunks.
        chunks: Number of chunks.
        examples: Some of the images that an attack has broken, by their position, if requested.
    """

    predictions: Ints
    robust_after: dict[Part, Bools]
    seconds: dict[Part, float]
    warnings: tuple[str, ...] = ()
    largest: float = 0.0
    attacked: int = 0
    outside: int = 0
    broken: int = 0
    chunks_done: int = 0
    chunks: int = 0
    examples: dict[int, Tensor] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all chunks are finished."""
        return self.chunks_done == self.chunks


class ChunkResults(NamedTuple):
    """Results of some chunks.

    Attributes:
        states: States of finished chunks, by their number.
        examples: Images that an attack has broken, by their position, in the order of the chunks.
    """

    states: dict[int, ChunkState]
    examples: dict[int, Tensor]


def all_gather_results(
    results: ChunkResults, chunk_size: int, images: Tensor, communicator: Communicator
) -> ChunkResults:
    """Return the results of all processes.

    Args:
        results: Results of this process.
        chunk_size: Images per chunk.
        images: Any images of the shape and type of the examples.
        communicator: The processes.
    """
    if communicator.world_size == 1:
        return results
    states = [json.loads(text) for text in communicator.all_gather_text(json.dumps(results.states))]
    positions = [json.loads(text) for text in communicator.all_gather_text(json.dumps(list(results.examples)))]
    start = sum(map(len, positions[: communicator.rank]))
    examples = torch.stack(list(results.examples.values())) if results.examples else images[:0]
    gathered = communicator.assemble(examples, start, sum(map(len, positions)))
    # Stable: the order within a chunk stays.
    pairs = sorted(zip(chain(*positions), gathered, strict=True), key=lambda pair: pair[0] // chunk_size)
    return ChunkResults({int(index): state for part in states for index, state in part.items()}, dict(pairs))


def merge_states(states: Mapping[int, ChunkState], y: Ints, chunk_size: int, parts: Sequence[Part]) -> Outcome:
    """Combine the states of finished chunks.

    Args:
        states: States by the number of the chunk.
        y: Labels of all images.
        chunk_size: Images per chunk.
        parts: The attacks.
    """
    predictions = np.full(len(y), NOT_ATTACKED, dtype=np.int64)
    for index, state in states.items():
        predictions[index * chunk_size : index * chunk_size + len(state["clean"])] = state["clean"]
    run, robust_after = predictions != NOT_ATTACKED, {}
    accuracies = {"clean": float(np.mean((predictions == y)[run]))} if states else {}
    for position, part in enumerate(parts):
        for index, state in states.items():
            attack = state["attacks"][position]
            predictions[index * chunk_size + np.array(attack["broken"], dtype=np.int64)] = attack["answers"]
        robust_after[part] = predictions == y
        accuracies |= {part: float(np.mean(robust_after[part][run]))} if states else {}
    attacks = [attack for state in states.values() for attack in state["attacks"]]
    return Outcome(
        predictions=predictions,
        robust_after=robust_after,
        seconds={part: sum(attack["seconds"] for attack in attacks if attack["name"] == part) for part in parts},
        warnings=tuple(sorted({text for a in attacks for text in a["warnings"]} | set(warnings_after(accuracies)))),
        largest=max((attack["largest"] for attack in attacks), default=0.0),
        attacked=sum(attack["made"] for attack in attacks),
        outside=sum(attack["outside"] for attack in attacks),
        broken=sum(len(attack["broken"]) for attack in attacks),
        chunks_done=len(states),
        chunks=-(-len(y) // chunk_size),
    )


def add_outcome(
    result: EvalResult, name: str, outcome: Outcome, info: Mapping[str, Any], rows: NDArray[Any]
) -> EvalResult:
    """Return a result with the outcome of AutoAttack.

    Args:
        result: The result before.
        name: Name of AutoAttack's predictions.
        outcome: The outcome.
        info: What evaluation.json keeps about AutoAttack.
        rows: Positions of the result's samples that AutoAttack was run on.
    """

    def spread(values: NDArray[Any], elsewhere: Any) -> NDArray[Any]:
        all_values = np.full(result.n, elsewhere, dtype=values.dtype)
        all_values[rows] = values
        return all_values

    checked = {"n": 0, "asked": 0, "outside": 0, "changed": 0, "largest": None, **result.examples}
    checked |= {"n": checked["n"] + outcome.attacked, "outside": checked["outside"] + outcome.outside}
    checked["largest"] = max(checked["largest"] or 0.0, outcome.largest)
    return replace(
        result,
        classes=extended_names(result.classes, int(outcome.predictions.max())),
        predictions={**result.predictions, name: spread(outcome.predictions, NOT_ATTACKED)},
        robust_after={part: spread(values, False) for part, values in outcome.robust_after.items()},
        autoattack=info,
        examples=checked,
    )
