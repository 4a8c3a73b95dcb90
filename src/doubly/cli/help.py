"""A help that fits on a screen: the flags that people set, in groups; --help-all shows every flag."""

import ast
import dataclasses
import fnmatch
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

from doubly.text import format_value

WIDTH, INDENT = 100, 30  # columns of a line, and of the flags in it
MAX_TEXT = 80  # characters of a text that cannot be cut at the end of a clause
MAX_CHOICES = 24  # columns of a list of choices; longer ones are named by their type


class Flag(NamedTuple):
    """A flag of a verb.

    Attributes:
        name: As it is written, such as --method.cap.
        value: What follows it; empty for a switch.
        text: What it does, the first clause.
        default: Its value if it is not given, as text.
    """

    name: str
    value: str
    text: str
    default: str


@dataclass(frozen=True)
class ShortHelp:
    """What the help of a verb shows.

    Attributes:
        about: Usage and a sentence, above the groups.
        groups: By the title of a group the names of its flags, without dashes and in the order of the help; *
            stands for any characters, as in method.*, and - before a pattern leaves its flags out. A flag that is in no
            group is left to --help-all.
        further: Flags that are not fields.
        defaults: What to say of the defaults of some flags, by their names, in place of what their fields say.
    """

    about: str
    groups: Mapping[str, str]
    further: Sequence[Flag] = ()
    defaults: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def text(self, options: object) -> str:
        """Return the help for options whose values are the defaults."""
        flags = {flag.name.removeprefix("--"): flag for flag in (*flags_of(options), *self.further)}
        parts = [self.about]
        for title, patterns in self.groups.items():
            wanted, others = (
                [p for p in patterns.split() if p.startswith("-") == is_other] for is_other in (False, True)
            )
            names = [name for pattern in wanted for name in fnmatch.filter(flags, pattern)]
            names = [name for name in names if not any(fnmatch.fnmatch(name, other[1:]) for other in others)]
            members = [flags.pop(name) for name in dict.fromkeys(names)]  # a flag is in the first of its groups
            members = [flag._replace(default=self.defaults.get(flag.name, flag.default)) for flag in members]
            if members:
                parts.append("\n".join([f"{title}:", *map(_line, members)]))
        return "\n\n".join([*parts, "--help-all lists every flag, with its whole text."])


def flags_of(options: Any, prefix: str = "") -> list[Flag]:
    """Return the flags of a dataclass of options and of those inside it; arguments without a flag are left out."""
    flags: list[Flag] = []
    hints = get_type_hints(type(options), include_extras=True)
    texts = _field_texts(type(options))  # type: ignore[arg-type]  # a class is hashable
    for field in fields(options):
        settings = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Positional in settings or tyro.conf.Suppress in settings:
            continue
        value = getattr(options, field.name)
        name, metavar, hint = _named(settings, field.name)
        path = ".".join(part for part in (prefix, name) if part)
        if is_dataclass(value):
            flags += flags_of(value, path)
        elif isinstance(value, bool):
            *parents, last = path.split(".")
            flags.append(Flag("--" + ".".join([*parents, f"no-{last}" if value else last]), "", texts[field.name], ""))
        else:
            metavar = metavar or _metavar(hints[field.name])
            flags.append(Flag(f"--{path}", metavar, texts[field.name], hint or _shown(value)))
    return flags


def _named(settings: Sequence[Any], name: str) -> tuple[str, str | None, str | None]:
    """Return the name, the metavar and the note about the default of a field."""
    for setting in settings:
        if hasattr(setting, "help_behavior_hint"):  # of tyro.conf.arg
            given = name if setting.name is None else setting.name
            hint = setting.help_behavior_hint
            note = None if not isinstance(hint, str) else hint.removeprefix("(default: ").removesuffix(")")
            return given.replace("_", "-"), setting.metavar, note
    return name.replace("_", "-"), None, None


@cache
def _field_texts(kind: type) -> dict[str, str]:
    """Return the first clause of the string below each field of a dataclass, those of its bases included."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = node.body if isinstance(node, ast.ClassDef) else []
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = (
                    below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
                )
                texts[field.target.id] = _first_clause(str(text))
    return {field.name: texts.get(field.name, "") for field in fields(kind)}


def _first_clause(text: str) -> str:
    """Return a text up to the first full stop, colon or semicolon; what begins with a choice is cut at its length."""
    line = " ".join(text.split())
    clause = re.split(r"[;:]\s|\.\s", line, maxsplit=1)[0]
    return clause if " " in clause else textwrap.shorten(line, MAX_TEXT, placeholder=" …")


def _metavar(hint: Any) -> str:
    """Return how a value of a type is called in the help."""
    if hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    parts = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) in (Union, UnionType) and len(parts) == 1:
        return _metavar(parts[0])
    if get_origin(hint) is Literal:
        choices = "{" + ",".join(map(str, parts)) + "}"
        return choices if len(choices) <= MAX_CHOICES else "NAME"
    if get_origin(hint) is tuple:
        return f"{_metavar(parts[0])}…"
    return {int: "INT", float: "NUMBER"}.get(hint, "PATH" if getattr(hint, "__name__", "") == "Path" else "TEXT")


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return " ".join(_shown(item) for item in value)
    return "" if value == "" else format_value(value).replace("None", "none")


def _line(flag: Flag) -> str:
    """Return the lines of a flag."""
    head = f"  {flag.name} {flag.value}".rstrip()
    text = flag.text + (f" ({flag.default})" if flag.default else "")
    start = f"{head}  " if len(head) > INDENT - 2 else f"{head:{INDENT}}"  # after a long name the text follows at once
    return textwrap.fill(f"{start}{text}", WIDTH, subsequent_indent=" " * INDENT)
