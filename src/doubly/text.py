"""Formatting and parsing of numbers, durations and names, and escaping of text for each output format. No torch."""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

import markupsafe
import rich.markup

from doubly.errors import UsageError

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes a cell that begins with one of these
MAX_FILE_NAME = 120  # bytes; file systems allow 255, and endings and numbers are added
TRUST_QUESTION = "are these numbers trustworthy?"
# Answers by the verdict of the checks: about the numbers, not about the network.
TRUST_ANSWERS = {
    "fine": "yes, as far as these checks can tell",
    "suspicious": "no, they look better than the network is: the suspicious checks say why",
    "unclear": "unclear: the unclear checks say why",
    "too little was measured": "too little was measured to say",
}
LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "[": "{[}",  # after a row it would begin an optional argument
    "]": "{]}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "ε": r"$\varepsilon$",
    "ℓ": r"$\ell$",
    "∞": r"$_\infty$",
    "\n": " ",
}


def duration(seconds: float) -> str:
    """Return a duration in the largest unit that fits, such as `45 s`, `12 min`, `3.5 h` or `4 days`."""
    for unit, length, limit in (("s", 1, 90), ("min", 60, 5400)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 3600:.1f} h" if seconds < 259_200 else f"{seconds / 86_400:.0f} days"


def format_percent(share: float, digits: int = 1) -> str:
    """Return a share in [0, 1] as a number of percent, without the sign: `46.3` for 0.463."""
    return f"{100 * share:.{digits}f}"


def format_mean_sd(mean: float, sd: float | None, digits: int = 1) -> str:
    """Return `46.3 ± 0.4`; only the mean where there is no standard deviation."""
    return f"{mean:.{digits}f}" if sd is None else f"{mean:.{digits}f} ± {sd:.{digits}f}"


def format_value(value: object) -> str:
    """Return a setting as text: floats with six significant digits, anything else as `str` has it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def format_radius(value: float) -> str:
    """Return the size of a perturbation as people type it: `8/255` where it is a multiple of 1/255, else a number."""
    levels = value * 255
    return f"{levels:.0f}/255" if levels > 0.5 and abs(levels - round(levels)) < 1e-6 else format_value(value)


def format_norm(name: str) -> str:
    """Return `ℓ∞` for Linf or threat.linf, `ℓ2` for L2; a threat that is not named after a norm keeps its name."""
    last = name.rpartition(".")[2].lower()
    return f"ℓ{last[1:].replace('inf', '∞')}" if re.fullmatch(r"l(\d+|inf)", last) else last


def format_ball(norm: str, radius: float) -> str:
    """Return the ball of an attack as `ℓ∞, ε = 8/255`."""
    return f"{format_norm(norm)}, ε = {format_radius(radius)}"


def method_label(name: str) -> str:
    """Return the label of a method made from the last part of a run's name: `DONE-PGD` for `cifar10.done_pgd`."""
    return name.rpartition(".")[2].upper().replace("_", "-")


def trust_answer(verdict: str) -> str:
    """Return the verdict of the checks of an evaluation as an answer to TRUST_QUESTION."""
    return TRUST_ANSWERS.get(verdict, verdict)


def dead_classes_sentence(names: Sequence[str], classes: int) -> str:
    """Return a sentence about the classes of which not even a clean image is recognized."""
    return (
        f"dead classes, {len(names)} of {classes}: {', '.join(map(shorten, names))}: no clean image of them is "
        "classified correctly, so averages say little about this network"
    )


def utf8(name: str) -> str:
    """Return a name that can be written as UTF-8: bytes of a file name that are not become backslash escapes."""
    try:
        name.encode()
        return name
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogateescape" if _is_undecoded(name) else "backslashreplace").decode(
            "utf-8", "backslashreplace"
        )


def _is_undecoded(name: str) -> bool:
    """Return whether all halves of surrogate pairs in a name stand for bytes that Python could not decode."""
    return all("\udc80" <= letter <= "\udcff" for letter in name if "\ud800" <= letter <= "\udfff")


def file_name(text: str) -> str:
    """Return a text as the name of a file, of letters, digits, dots and dashes; a long one ends in its checksum."""
    name = re.sub(r"[^\w.-]+", "_", text)
    if len(name.encode()) <= MAX_FILE_NAME:
        return name
    digest = hashlib.blake2b(utf8(text).encode(), digest_size=6).hexdigest()
    return f"{name.encode()[: MAX_FILE_NAME - 13].decode('utf-8', 'ignore')}-{digest}"


def _one_line(text: str) -> str:
    """Return a text without control characters and halves of surrogate pairs; line breaks and tabs become spaces."""
    return "".join(
        " " if mark.isspace() else "?" if unicodedata.category(mark) in ("Cc", "Cs") else mark for mark in text
    )


def printable(value: object) -> str:
    """Replace what a terminal would obey, or cannot write, by question marks: names come from data."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def printable_lines(text: str) -> str:
    """Return a text of several lines with each line `printable`; names and messages in it come from outside."""
    return "\n".join(printable(line) for line in text.split("\n"))


def shorten(text: str, max_length: int = 24) -> str:
    """Return one line that every font and XML can hold; a long text keeps both ends, where names differ."""
    line = " ".join("".join(mark if mark.isprintable() else " " for mark in text).split()) or "?"
    end = (max_length - 1) // 3
    return line if len(line) <= max_length else f"{line[: max_length - 1 - end]}…{line[-end:]}"


def escape_terminal(value: object) -> str:
    """Escape for rich: neither its markup nor control characters of the terminal take effect."""
    return rich.markup.escape(printable(value))


def escape_markdown(text: str) -> str:
    """Escape for a cell or a paragraph of Markdown; line breaks become spaces."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(_one_line(text).split()))


def escape_latex(text: str) -> str:
    """Escape for LaTeX text, and write the symbols that tables use as math."""
    return "".join(LATEX.get(mark, mark) for mark in _one_line(text))


def escape_csv(text: str) -> str:
    """Put an apostrophe before text that a spreadsheet would compute as a formula; quoting is the writer's part."""
    line = _one_line(text)
    return f"'{line}" if text.startswith(FORMULA_STARTS) or line.lstrip().startswith(FORMULA_STARTS) else line


def escape_html(text: str) -> str:
    """Escape for HTML text and for quoted attributes. Templates of the report escape by themselves."""
    return str(markupsafe.escape(_one_line(text)))


def parse_number(text: str) -> float:
    """Return the number of a text such as 8/255 or 0.03.

    Raises:
        UsageError: If it is neither.
    """
    try:
        return float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"'{text}' is not a number: write 0.03 or 8/255") from None
