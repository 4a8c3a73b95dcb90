"""The list of campaigns: what each does, how often, and in parts of which size."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.chaos.calls import malformed
from tests.chaos.checkpoints import damaged_checkpoints
from tests.chaos.command_lines import malformed_lines
from tests.chaos.data import hostile_data
from tests.chaos.files import damaged_files
from tests.chaos.kills import kill
from tests.chaos.names import hostile_names
from tests.chaos.outcomes import Outcome
from tests.chaos.processes import at_once, kill_imports, kill_ranks
from tests.chaos.workers import Task


class Campaign(NamedTuple):
    """A row of the table.

    Attributes:
        name: Its name.
        function: Yields outcomes; see `Task`.
        count: Number of attempts in a full campaign.
        part: Attempts of one task.
        about: What it does, for docs/reliability.md.
    """

    name: str
    function: Callable[[Path, int, int], Iterator[Outcome]]
    count: int
    part: int
    about: str


KILLS = (
    "The command is ended by SIGKILL, SIGTERM or SIGINT, before a random change of a file (an open for writing, a "
    "rename, a removal, a flush) or at a random moment, and started again, up to ten times; the last time it comes to "
    "its end. Weights and metrics must be those of a training that was not killed, to the last bit; so must the "
    "predictions under AutoAttack, the repaired network, the winner of the search and the table of the study, and no "
    "worker may stay behind."
)
CAMPAIGNS = (
    Campaign(
        "malformed calls", malformed, 4500, 500,
        "Every public class and function is called with one or two arguments replaced, damaged or swapped: tensors of "
        "other shapes and types, NaN, networks that return something else (`make fuzz`).",
    ),
    Campaign(
        "damaged checkpoints", damaged_checkpoints, 1200, 150,
        "A bit, a range or a value of any file of a checkpoint is changed, or the file is cut or removed; then the "
        "network is loaded, exported or evaluated, or training is resumed. Lost is a run that goes on with other "
        "weights than those that were saved.",
    ),
    Campaign(
        "damaged run files", damaged_files, 1400, 100,
        "The same for `config.json`, `evaluation.json` and `.npz`, `gallery.npz`, `metrics.jsonl`, `environment.json`, "
        "`repair.json`, a comparison of frontiers and the state of AutoAttack, read by `report`, `compare`, `watch`, "
        "`frontier`, `train`, `evaluate`, `repair`, `search`, `export` and `doubly.load`.",
    ),
    Campaign(
        "hostile data and weights", hostile_data, 1900, 200,
        "Files of nine datasets, archives and weights are damaged, or replaced by small files that unpack to large "
        "ones, and by pickles that would create a file. Executed is a pickle that did.",
    ),
    Campaign(
        "hostile names", hostile_names, 600, 100,
        "Names of runs, tables, attacks and classes hold escape sequences, HTML, formulas, LaTeX, and half surrogate "
        "pairs. Executed is one that comes out unescaped in the terminal, the page, the CSV or the LaTeX table.",
    ),
    Campaign(
        "malformed command lines", malformed_lines, 1200, 150,
        "Every verb is called with its own flags and missing, wrong and absurd values.",
    ),
    *(
        Campaign(f"kills of {name}", partial(kill, name), number, part, KILLS) for name, number, part in (
            ("train", 120, 20), ("evaluate", 40, 10), ("repair", 14, 7), ("report", 14, 7), ("search", 6, 6),
            ("reproduce", 6, 6),
        )
    ),
    Campaign(
        "kills during import", kill_imports, 12, 6,
        "A training is ended in its first seconds, while Python imports torch, and then trains.",
    ),
    Campaign(
        "kills of torchrun", kill_ranks, 4, 4,
        "One of two processes that train under `torchrun` is ended by SIGKILL; the same command then ends with the "
        "bits of a training that was not killed.",
    ),
    Campaign(
        "commands at once", at_once, 24, 24,
        "Two `reproduce` in one folder; `evaluate`, `report`, `watch`, `export` and a second `train` in a run "
        "directory that is training, whose weights must not change by it.",
    ),
)  # fmt: skip


def tasks_of(names: Sequence[str], seed: int, scale: float) -> list[Task]:
    """Return the tasks of campaigns; each has a seed of its own that follows from the number of the task."""
    tasks = []
    for row, campaign in enumerate(CAMPAIGNS):
        left, part = max(1, round(campaign.count * scale)), 0
        while left > 0 and campaign.name in names:
            size = min(left, campaign.part)
            tasks.append(Task(campaign.name, campaign.function, 1_000_000 * seed + 1000 * row + part, size))
            left, part = left - size, part + 1
    return tasks[::-1]  # the long ones first, so that no process waits for the last of them
