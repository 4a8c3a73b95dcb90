"""Arguments become dataclasses."""

from dataclasses import dataclass, field

import pytest

from doubly.cli.options import parse_options, pop_flag
from doubly.errors import UsageError


@dataclass(frozen=True)
class Ball:
    """A ball."""

    radius: float = 8 / 255
    """its radius"""

    def __post_init__(self) -> None:
        if self.radius > 1:
            raise UsageError(f"radius is at most 1, got {self.radius:g}")


@dataclass(frozen=True)
class Options:
    """Some options."""

    ball: Ball = field(default_factory=Ball)
    """a ball"""
    steps: int = 3
    """number of steps"""
    trust: bool = True
    """whether to check"""
    sizes: tuple[float, ...] = ()
    """some sizes"""


def parse(*words):
    return parse_options(Options, words, "try")


def test_every_field_has_a_dotted_flag_and_numbers_may_be_fractions():
    assert parse() == Options()
    assert parse("--ball.radius", "1/4", "--steps", "5", "--no-trust") == Options(Ball(0.25), 5, False)
    assert parse("--sizes", "1/2", "3", "1e-3").sizes == (0.5, 3.0, 0.001)
    assert parse_options(Options, ["--steps", "5"], "try", Options(Ball(0.5))) == Options(Ball(0.5), 5)


def test_what_a_dataclass_refuses_is_raised_as_it_is(capsys):
    for words, message in [
        (["--ball.radius", "8"], "radius is at most 1, got 8"),
        (["--ball.radius", "8/0"], "'8/0' is not a number: write 0.03 or 8/255"),
    ]:
        with pytest.raises(UsageError, match=message):
            parse(*words)
    assert capsys.readouterr() == ("", "")


def test_flags_that_cannot_be_parsed_are_explained(capsys):
    for words, hint in [(["--step", "3"], "--steps"), (["--steps", "three"], "three"), (["more"], "more")]:
        with pytest.raises(SystemExit) as end:
            parse(*words)
        out, err = capsys.readouterr()
        assert end.value.code == 2 and out == "" and hint in err and "doubly try --help" in err
    with pytest.raises(SystemExit) as end:
        parse("--help")
    out, err = capsys.readouterr()
    assert end.value.code == 0 and "its radius" in out and err == ""


def test_a_repeated_flag_is_taken_out_with_its_values():
    words = ["a", "--set", "b=1", "--seed", "2", "--set=c=2"]
    assert pop_flag(words, "--set") == ["b=1", "c=2"] and words == ["a", "--seed", "2"]
    assert pop_flag(words, "--set") == []
    with pytest.raises(UsageError, match="--seed needs a value"):
        pop_flag(["--seed"], "--seed")
