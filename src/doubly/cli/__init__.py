"""The command line: doubly train | evaluate | report | … This file finds the verb, and turns errors into exit codes.

The module of a verb is imported when the verb is called, so that `doubly --help` and `doubly report` need no torch.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from doubly.errors import Interrupted, ProcessLost, UsageError
from doubly.text import printable_lines
from doubly.version import __version__

OUT, ERR = Console(), Console(stderr=True)

VerbFunction = Callable[[list[str], Console, Console], int]
"""Takes the arguments, the console for results and the one for messages; returns the exit code."""

OUT_OF_MEMORY = (
    "there is not enough memory: end other programs, raise the limit (`ulimit -v` shows it), or use fewer images at a "
    "time (--batch-size, --microbatch) or a smaller network; finished work is saved"
)
# Texts of errors by which torch and the loader of shared libraries say that memory ran out.
MEMORY_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "failed to map segment",
    "bad_alloc",
    "can't start new thread",
    "could not create a primitive",  # oneDNN
)
WRONG_INPUT, PROCESS_LOST, BROKEN_PIPE = 2, 75, 141  # exit codes; after a signal it is 128 + its number


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        summary: Its line in `doubly --help`.
        function: Name of its function in the module of the verb's name.
        distributed: Whether it can be started by torchrun.
    """

    summary: str
    function: str
    distributed: bool = False


VERBS = {
    "train": Verb(
        "Train: doubly train RECIPE | --data DATA --method METHOD [--epsilon 8/255] [--epochs 60] …", "train", True
    ),
    "watch": Verb("Show the metrics of runs while they train: doubly watch DIR…", "watch"),
    "check": Verb(
        "From a network to a page in minutes: doubly check M:F --weights FILE --data DATA | doubly check DIR", "check"
    ),
    "evaluate": Verb(
        "Attack the network of a run, or any network: doubly evaluate DIR | --model M:F --data NAME", "evaluate", True
    ),
    "repair": Verb(
        "Raise the weakest classes of a finished network by class offsets: doubly repair DIR [--priority 0.5]", "repair"
    ),
    "frontier": Verb("Average against weakest classes along class offsets: doubly frontier DIR…", "frontier"),
    "compare": Verb("Compare two evaluations of the same images: doubly compare DIR DIR", "compare"),
    "report": Verb("Write tables, figures and one page about runs: doubly report DIR… --output DIR", "report"),
    "leaderboard": Verb(
        "Rank evaluated networks on one page, a table per protocol: doubly leaderboard DIR…", "leaderboard"
    ),
    "search": Verb("Search hyperparameters on a hold-out: doubly search RECIPE [--trials 12] [--jobs 2]", "search"),
    "reproduce": Verb("Run a study and write its report: doubly reproduce table1|figure5|demo|…", "reproduce"),
    "data": Verb("Download or inspect a dataset, or make it imbalanced: doubly data fetch|inspect|imbalance", "data"),
    "export": Verb("Write a network as safetensors, ONNX or torch.export: doubly export DIR --output FILE", "export"),
    "card": Verb("Write a model card with the robustness of every class: doubly card DIR", "card"),
    "push": Verb("Upload a network to the Hugging Face Hub: doubly push DIR --repo OWNER/NAME [--dry-run]", "push"),
    "list": Verb("List methods, attacks, models, datasets, recipes, … by name: doubly list methods", "list_entries"),
    "completion": Verb("Complete words by TAB in your shell: doubly completion install [bash|zsh|fish]", "completion"),
    "doctor": Verb("Check this installation: versions, device, and the gradients in a few seconds", "doctor"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: The words after `doubly`; those of the process if None.

    Returns:
        The exit code: 0, 1 if there is no result, 2 for wrong input, 130 or 143 after a signal, 75 if another process
        of the run was lost.
    """
    _print_any_character()
    words = [*(sys.argv[1:] if arguments is None else arguments)]  # `list` may be the module of that verb here
    rank = os.environ.get("RANK", "0") if _is_distributed() else "0"
    OUT.quiet = rank != "0"  # of the processes of torchrun only the first prints results
    name = "doubly" if rank == "0" else f"doubly, process {rank}"
    try:
        return _run(words)
    except SystemExit as end:  # after --help, or after a message about a flag
        return end.code if isinstance(end.code, int) else 0
    except Interrupted as stopped:
        _print_error(f"{name}: {stopped}", style=None)
        return 128 + stopped.number
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return BROKEN_PIPE
    except ProcessLost as lost:
        _print_error(f"{name}: {lost}")
        return PROCESS_LOST
    except (UsageError, ArithmeticError) as error:
        _print_error(f"{name}: {error}")
        return WRONG_INPUT
    except ValueError as error:
        if "embedded null" not in str(error):
            raise
        _print_error(f"{name}: a path has a null character, as no file name can: correct it where it was given")
        return WRONG_INPUT
    except OSError as error:  # of files that others read or write for us
        _print_error(f"{name}: {_describe(error)}")
        return WRONG_INPUT
    except (MemoryError, RuntimeError, ImportError, SystemError) as error:
        if not _is_out_of_memory(error):
            raise
        _print_error(f"{name}: {OUT_OF_MEMORY}")
        return WRONG_INPUT


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        _print_help()
        return 0 if words else WRONG_INPUT
    if words[0] == "--version":
        OUT.print(f"doubly {__version__}", highlight=False)
        return 0
    if words[0] not in VERBS:
        raise UsageError(f"there is no verb '{words[0]}': valid are {', '.join(VERBS)}")
    if _is_distributed() and not VERBS[words[0]].distributed:
        allowed = " and ".join(name for name, verb in VERBS.items() if verb.distributed)
        raise UsageError(f"{words[0]} runs in one process: start it without torchrun, which is for {allowed}")
    function: VerbFunction = getattr(import_module(f"doubly.cli.{words[0]}"), VERBS[words[0]].function)
    return function(words[1:], OUT, ERR)


def _print_any_character() -> None:
    """Print a question mark for a character that the terminal's encoding does not have, in place of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _describe(error: OSError) -> str:
    """Return what the system reported, and what to do."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename} cannot be used ({error.strerror}): check the path, its permissions and the disk"


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory ran out, also where torch says so, or where a library could not be loaded for it."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in MEMORY_SIGNS)


def _is_distributed() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _print_error(message: str, style: str | None = "red") -> None:
    ERR.print(printable_lines(message), style=style, highlight=False, markup=False, soft_wrap=True)


def _print_help() -> None:
    title = "doubly: train and evaluate image classifiers that are robust on every class, not only on average"
    table = Table("verb", "what it does", title=title)
    for name, verb in VERBS.items():
        table.add_row(name, verb.summary)
    OUT.print(table)
    OUT.print("doubly VERB --help shows the options of a verb, doubly --version the version.", highlight=False)
