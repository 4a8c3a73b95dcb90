"""Who still stands after each of AutoAttack's attacks: the outcome of all chunks that are done, put together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from doubly.attacks.autoattack import Part, warnings_after
from doubly.evaluation.metrics import Bools, Ints

State = dict[str, Any]  # of one chunk, as its file keeps it


@dataclass(frozen=True)
class Standing:
    answers: Ints  # (n,): the clean answer of a sample that stands, else the answer that broke it; -1 where not done
    after: dict[Part, Bools]  # right after this attack and all before it
    seconds: dict[Part, float]
    warnings: tuple[str, ...] = ()
    largest: float = 0.0  # of |delta| / epsilon
    made: int = 0  # attacked images that were looked at
    outside: int = 0  # of these, those that left the ball or the image range, which do not count
    broken: int = 0
    done: int = 0  # chunks
    chunks: int = 0
    examples: dict[int, Tensor] = field(default_factory=dict)  # position -> attacked image, if asked for

    @property
    def complete(self) -> bool:
        return self.done == self.chunks


def finished(state: State, parts: Sequence[Part]) -> bool:
    return [each["name"] for each in state["attacks"]] == list(parts)


def merged(known: Mapping[int, State], y: Ints, size: int, parts: Sequence[Part]) -> Standing:
    """`known`: the states of finished chunks, by their number; a chunk has `size` samples."""
    answers = np.full(len(y), -1, dtype=np.int64)
    for index, state in known.items():
        answers[index * size : index * size + len(state["clean"])] = state["clean"]
    measured, after = answers >= 0, {}
    accuracies = {"clean": float(np.mean((answers == y)[measured]))} if known else {}
    for position, part in enumerate(parts):
        for index, state in known.items():
            outcome = state["attacks"][position]
            answers[index * size + np.array(outcome["broken"], dtype=np.int64)] = outcome["answers"]
        after[part] = answers == y
        accuracies |= {part: float(np.mean(after[part][measured]))} if known else {}
    done = [outcome for state in known.values() for outcome in state["attacks"]]
    return Standing(
        answers,
        after,
        {part: sum(o["seconds"] for o in done if o["name"] == part) for part in parts},
        tuple(sorted({text for o in done for text in o["warnings"]} | set(warnings_after(accuracies)))),
        max((o["largest"] for o in done), default=0.0),
        sum(o["made"] for o in done),
        sum(o["outside"] for o in done),
        sum(len(o["broken"]) for o in done),
        len(known),
        -(-len(y) // size),
    )
