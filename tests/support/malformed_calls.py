"""A seeded fuzzer: malformed calls of every public function, and what became of each.

`python tests/support/malformed_calls.py --calls 5000 --seed 1` prints a table. A call is well formed in all arguments
but one or two, which are replaced, damaged or swapped. Fine are a result, an error that doubly raises itself, and an
error inside the caller's own function; obscure is an error from deep inside torch, numpy or Python.
"""

import argparse
import contextlib
import dis
import io
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import doubly
import malformed_targets

SOURCE = str(Path(doubly.__file__).parent)
TARGETS_FILE = malformed_targets.__file__
NUMBERS = (0, -1, 1.5, True, float("nan"), float("inf"), -float("inf"), 1e-30, 1e30, np.float32(2), np.int64(3))
OTHERS = (None, "seven", "", b"x", [], {}, (), object(), int, torch, "cpu", [1, 2], {"a": 1}, lambda *_: None)


class Outcome(NamedTuple):
    """What became of a call: a result, refused, own function, or obscure, with its error."""

    kind: str
    target: str
    changes: str
    error: str = ""


def outcomes(calls: int, seed: int) -> list[Outcome]:
    """Make so many malformed calls, going through all targets in turn, and return what became of each."""
    draw, targets = random.Random(seed), malformed_targets.targets()
    names = sorted(targets)
    results = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), torch.random.fork_rng():
        for number in range(calls):
            torch.manual_seed(0)
            name = names[number % len(names)]
            results.append(_call(name, targets[name], draw))
    return results


def count_kinds(results: list[Outcome]) -> Counter[str]:
    """Return how many calls ended in each way."""
    return Counter(result.kind for result in results)


def _call(name: str, make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]], draw: random.Random) -> Outcome:
    function, arguments = make()
    changes = []
    count = min(draw.choice((1, 1, 1, 2)), len(arguments))
    for changed in draw.sample(sorted(arguments), count):
        other = draw.choice(sorted(arguments))
        if count == 1 and draw.random() < 0.1 and other != changed:
            arguments[changed], arguments[other] = arguments[other], arguments[changed]
            changes.append(f"{changed} <-> {other}")
        else:
            arguments[changed] = _damaged(arguments[changed], draw)
            changes.append(f"{changed} = {_shown(arguments[changed])}")
    text = ", ".join(changes)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            function(**arguments)
    except Exception as error:
        return Outcome(_kind(error), name, text, f"{type(error).__name__}: {error}")
    return Outcome("result", name, text)


def _kind(error: BaseException) -> str:
    """Classify an error by where it was raised."""
    frames = []
    step: TracebackType | None = error.__traceback__
    while step is not None:
        frames.append(step)
        step = step.tb_next
    last = frames[-1]
    code = last.tb_frame.f_code
    operations = {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}
    if code.co_filename.startswith(SOURCE) and operations.get(last.tb_lasti, "").startswith(("RAISE", "RERAISE")):
        return "refused"
    files = [frame.tb_frame.f_code.co_filename for frame in frames[2:]]
    return "own function" if TARGETS_FILE in files else "obscure"


def _damaged(value: Any, draw: random.Random) -> Any:
    """Return something in the place of a valid argument."""
    if isinstance(value, Tensor) and draw.random() < 0.75:
        return _damaged_tensor(value, draw)
    if isinstance(value, np.ndarray) and draw.random() < 0.75:
        return _damaged_array(value, draw)
    if isinstance(value, nn.Module) and draw.random() < 0.75:
        return draw.choice(malformed_targets.NETWORKS)()
    if isinstance(value, doubly.Batch) and draw.random() < 0.75:
        field = draw.choice(("x", "y", "ids"))
        return value._replace(**{field: _damaged(getattr(value, field), draw)})
    if isinstance(value, tuple) and value and draw.random() < 0.6:
        position = draw.randrange(len(value))
        return (*value[:position], _damaged(value[position], draw), *value[position + 1 :])
    if callable(value) and hasattr(value, "variants") and draw.random() < 0.7:
        return draw.choice(value.variants)
    if isinstance(value, int | float) and draw.random() < 0.6:
        return draw.choice(NUMBERS)
    tensors = (torch.zeros(3), torch.tensor(2), torch.rand(6, 1, 2, 2), torch.arange(6))
    return draw.choice((*NUMBERS, *OTHERS, *tensors, np.zeros(3), np.array(["a"])))


def _damaged_tensor(value: Tensor, draw: random.Random) -> Any:
    spoiled = value.clone() if value.numel() else torch.zeros(1)
    if spoiled.is_floating_point():
        spoiled.view(-1)[0] = draw.choice((float("nan"), float("inf"), -float("inf"), 1e30, -3.0))
    else:
        spoiled.view(-1)[0] = draw.choice((-1, 100, 2**40 if spoiled.dtype is torch.int64 else 3))
    choices: tuple[Callable[[], Any], ...] = (
        lambda: spoiled,
        lambda: value.to(draw.choice((torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool))),
        lambda: value.to(torch.complex64),
        lambda: value.to("meta"),
        lambda: value[:0] if value.dim() else value.new_zeros(0),
        lambda: value[None],
        lambda: value.flatten(),
        lambda: value.sum(),
        lambda: value[: len(value) // 2] if value.dim() else value.new_zeros(2),
        lambda: torch.cat([value, value]) if value.dim() else value.new_zeros(2, 2),
        lambda: value.to_sparse(),
        lambda: value.detach().numpy(),
        lambda: value.tolist(),
        lambda: -value,
        lambda: value.unsqueeze(-1).expand(*value.shape, 3),
        lambda: value.mT if value.dim() > 1 else value,
    )
    return draw.choice(choices)()


def _damaged_array(value: Any, draw: random.Random) -> Any:
    spoiled = value.copy()
    with contextlib.suppress(ValueError, OverflowError, IndexError):
        spoiled.flat[0] = draw.choice((np.nan, np.inf, -1, 100))
    choices = (
        spoiled,
        value.astype(draw.choice((float, int, bool, str, object, complex))),
        value[:0],
        value[None],
        value.sum(),
        value[: len(value) // 2],
        value.tolist(),
        torch.as_tensor(value),
        -value if value.dtype != bool else ~value,
    )
    return draw.choice(choices)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.device}"
    return f"{type(value).__name__} {' '.join(repr(value).split()):.50}"


def main() -> None:
    """Print how many calls ended in each way, and the obscure ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = outcomes(options.calls, options.seed)
    for result in results:
        if result.kind == "obscure":
            print(f"{result.target}({result.changes}): {' '.join(result.error.split()):.160}")
    print(dict(count_kinds(results)), f"of {options.calls} calls, seed {options.seed}")
    sys.exit(any(result.kind == "obscure" for result in results))


if __name__ == "__main__":
    main()
