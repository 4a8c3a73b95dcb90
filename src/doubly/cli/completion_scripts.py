"""Completion scripts for shells, made of the words that the command line takes; they run neither Python nor torch."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from doubly.version import __version__

HEADER = "# completion of the command line of doubly"
HELP_FLAGS = ("--help", "--help-all")


@dataclass(frozen=True)
class Words:
    """The words that can be completed.

    Attributes:
        verbs: Names of the verbs.
        arguments: What can follow a verb, without dashes.
        flags: Flags of a verb.
        values: What can follow a flag.
    """

    verbs: tuple[str, ...]
    arguments: Mapping[str, tuple[str, ...]]
    flags: Mapping[str, tuple[str, ...]]
    values: Mapping[str, tuple[str, ...]]


def collect_words(verbs: Iterable[str]) -> Words:
    """Return the words of the command line, from the options of the verbs and the tables of names.

    Args:
        verbs: Names of the verbs.
    """
    from doubly.attacks import ATTACKS
    from doubly.cli.data import DATA_VERBS
    from doubly.cli.list import TABLES
    from doubly.cli.reproduce import CLASS_STUDIES, DIGITS_STUDIES
    from doubly.data import DATASETS
    from doubly.recipes import RECIPES
    from doubly.studies.plans import PLANS
    from doubly.threat import THREATS

    recipes = tuple(RECIPES)
    arguments: dict[str, tuple[str, ...]] = {
        "train": recipes,
        "search": recipes,
        "reproduce": (*PLANS, *DIGITS_STUDIES, *CLASS_STUDIES),
        "data": (*DATA_VERBS, *DATASETS),
        "list": TABLES,
        "completion": ("install", "bash", "zsh", "fish"),
    }
    methods = tuple(dict.fromkeys(name.rpartition(".")[2] for name in recipes))
    values: dict[str, tuple[str, ...]] = {
        "--method": methods,
        "--methods": methods,
        "--data": tuple(DATASETS),
        "--attacks": (*ATTACKS,),
        "--norm": tuple(THREATS),
        "--checkpoint": ("last", "best"),
        "--variant": ("literal",),
    }
    return Words(tuple(verbs), arguments, _flags(), values)


def _flags() -> dict[str, tuple[str, ...]]:
    """Return the flags of each verb."""
    from doubly.cli.check import CheckOptions
    from doubly.cli.compare import CompareOptions
    from doubly.cli.data import FetchOptions, ImbalanceOptions, InspectOptions
    from doubly.cli.evaluate import EvaluateOptions
    from doubly.cli.export import ExportOptions
    from doubly.cli.frontier import FrontierOptions
    from doubly.cli.help import flags_of
    from doubly.cli.repair import RepairOptions
    from doubly.cli.report import ReportOptions
    from doubly.cli.reproduce import ReproduceOptions
    from doubly.cli.search_options import SearchOptions
    from doubly.cli.train_options import TrainOptions
    from doubly.cli.watch import WatchOptions
    from doubly.recipes import RECIPES

    plain: dict[str, tuple[type, ...]] = {
        "evaluate": (EvaluateOptions,),
        "check": (CheckOptions,),
        "repair": (RepairOptions,),
        "frontier": (FrontierOptions,),
        "compare": (CompareOptions,),
        "report": (ReportOptions,),
        "reproduce": (ReproduceOptions,),
        "export": (ExportOptions,),
        "watch": (WatchOptions,),
        "data": (FetchOptions, InspectOptions, ImbalanceOptions),
    }
    flags = {verb: [flag.name for kind in kinds for flag in flags_of(_made(kind))] for verb, kinds in plain.items()}
    # A recipe of each method has the fields of that method; those of a large dataset have its network and data.
    runs = [make() for name, make in RECIPES.items() if name.startswith("digits.") or name == "cifar10.imbalanced.at"]
    for verb, kind in (("train", TrainOptions), ("search", SearchOptions)):
        flags[verb] = [flag.name for run in runs for flag in flags_of(kind(run))]
        flags[verb] += ["--config", "--set", "--variant"]
    for verb in ("evaluate", "check", "repair"):
        flags[verb] += ["--set"]
    flags |= {"doctor": ["--compile"], "list": ["--names"], "completion": ["--print"]}
    return {verb: (*dict.fromkeys(names), *HELP_FLAGS) for verb, names in flags.items()}


def _made(kind: type[Any]) -> Any:
    """Return options with their defaults; a field without one is empty."""
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return kind(**dict.fromkeys(required, ""))


def bash_script(words: Words) -> str:
    """Return the completion script for bash."""
    return f"""\
{HEADER}, version {__version__}, for bash
_doubly() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}} choices=
    if (( COMP_CWORD == 1 )); then
        choices="{" ".join(words.verbs)} --help --version"
    elif [[ $word == -* ]]; then
        case $verb in
{_cases(words.flags, "            {key}) choices='{values}' ;;")}
        esac
    else
        case $previous in
{_cases(words.values, "            {key}) choices='{values}' ;;")}
            *) case $verb in
{_cases(words.arguments, "                {key}) choices='{values}' ;;")}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
}}
complete -o bashdefault -o default -F _doubly doubly
"""


def zsh_script(words: Words) -> str:
    """Return the completion script for zsh, a file _doubly in its fpath."""
    return f"""\
#compdef doubly
{HEADER}, version {__version__}, for zsh
_doubly() {{
    local word=$words[CURRENT] previous=$words[CURRENT-1] verb=$words[2]
    local -a choices
    if (( CURRENT == 2 )); then
        choices=({" ".join(words.verbs)} --help --version)
    elif [[ $word == -* ]]; then
        case $verb in
{_cases(words.flags, "            ({key}) choices=({values}) ;;")}
        esac
    else
        case $previous in
{_cases(words.values, "            ({key}) choices=({values}) ;;")}
            (*) case $verb in
{_cases(words.arguments, "                ({key}) choices=({values}) ;;")}
            esac ;;
        esac
    fi
    (( $#choices )) && compadd -- $choices
    [[ $word == -* ]] || _files
}}
if [[ $funcstack[1] == _doubly ]]; then _doubly "$@"; else compdef _doubly doubly; fi
"""


def fish_script(words: Words) -> str:
    """Return the completion script for fish."""
    lines = [
        f"{HEADER}, version {__version__}, for fish",
        f"complete -c doubly -n __fish_use_subcommand -f -a '{' '.join(words.verbs)}'",
    ]
    for verb, choices in words.arguments.items():
        lines.append(f"complete -c doubly -n '__fish_seen_subcommand_from {verb}' -a '{' '.join(choices)}'")
    for verb, flags in words.flags.items():
        for flag in flags:
            values = f" -r -a '{' '.join(words.values[flag])}'" if flag in words.values else ""
            lines.append(f"complete -c doubly -n '__fish_seen_subcommand_from {verb}' -l {flag[2:]}{values}")
    return "\n".join(lines) + "\n"


def _cases(table: Mapping[str, Iterable[str]], line: str) -> str:
    return "\n".join(line.format(key=key, values=" ".join(values)) for key, values in table.items())


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
