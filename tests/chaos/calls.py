"""Malformed calls of public functions, by the fuzzer of `make fuzz`."""

from collections.abc import Iterator
from pathlib import Path

from tests.chaos.outcomes import Outcome

import malformed_calls

KINDS = {"result": "survived", "own function": "survived", "refused": "refused", "obscure": "traceback"}


def malformed(base: Path, seed: int, count: int) -> Iterator[Outcome]:
    """Call public functions with one or two arguments replaced, damaged or swapped."""
    for outcome in malformed_calls.outcomes(count, seed):
        kind = KINDS[outcome.kind]
        note = f"{outcome.target}({outcome.changes}): {outcome.error}" if kind == "traceback" else ""
        yield Outcome(kind, note)
