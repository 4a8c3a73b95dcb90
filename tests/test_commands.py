"""Every command in the pages works: it is run here, cut down by a table, or it stands in a list that says where it is.

A command is a line of a fenced block, or inline code, that begins with `doubly`, `make`, `python` or `pip`. With a word
in capitals or `…` in it (`doubly evaluate DIR --quick`) it is a pattern: its verb and its flags must exist.
"""

import contextlib
import io
import re
import runpy
import shlex
import shutil
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from doubly.cli import VERBS, main
from doubly.rundir import read_json

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What makes a command cheap: the words that it begins with -> what is added to it. The longest beginning counts, and of
# a flag that is given twice the last.
TINY = "--epochs 1 --method.attack.steps 1 --validation.attack.steps 1 --validation.size 20 --threads 1 --device cpu"
CHEAP = {
    "train": TINY,
    "train cifar10.at": f"{TINY} --set model=model.small_cnn",  # a ResNet-18
    "evaluate": "--images 20 --no-trust --autoattack-images 2 --autoattack-chunk-size 2 --compile no --jobs 1 --device cpu",
    "compare": "--resamples 20",
    "reproduce": "--jobs 1",
    "reproduce cifar10": "--jobs 1 --methods at --seeds 1 --autoattack-images 2",
    "reproduce table1": "--dry-run --methods at --seeds 1",
    "reproduce table1 --scale paper": "--methods at --seeds 1",
    "search": "--trials 1 --splits 1 --jobs 1 --space space.json",
}
READ_RUNS = {"evaluate", "compare", "report", "export", "watch"}  # verbs whose arguments runs/NAME must be there before
INSTEAD = {  # hours: the function -> the results that stand in for it. tests/recipes runs the studies, small.
    "doubly.studies.digits_study.run_study": "digits.json",
    "doubly.studies.digits_comparison.run_comparison": "digits_comparison.json",
}
ELSEWHERE = {  # commands that are not doubly's, and where they are run
    "make check": "by .ci/run",
    "make test": "by .ci/run, of which this is a part",
    "make format": "by hand: it changes files, and make check fails where it would",
    "make demo": "tests/recipes/test_demo.py, with fewer seeds and epochs",
    "pip install .": "by the Makefile, before any test",
    "pip install 'doubly[tensorboard]'": "by the Makefile, as a part of the extra dev",
    'pip install "doubly[ray]"': "by hand, for the slow test in tests/runs/test_ray_jobs.py",
}
# Benchmarks take minutes: their --help is run, or they are compiled where they take no options. test_examples.py runs
# the examples.
SCRIPT = re.compile(r"python ((?:benchmarks|examples)/\w+\.py)(.*)")

RECIPES = [
    "stl10.at",
    "digits.imbalanced.done_gd",
    "digits.done_fast",
    "digits.at --set data.source=dataset.folder",
]  # whose flags

FENCED = re.compile(r"^(```|~~~)[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*((?:doubly|make|python|pip) .*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
CAPITALS = re.compile(r"\[?[A-Z][A-Z_]*(=[A-Z]+)?\]?")


def commands(text):
    """The commands of a page in their order, without comments."""
    blocks = [block.replace("\\\n", " ") for _, block in FENCED.findall(text)]
    code = [*"\n".join(blocks).splitlines(), *re.findall(r"`([^`\n]+)`", FENCED.sub("", text))]
    found = [match[1] for piece in code if (match := COMMAND.fullmatch(piece.strip()))]
    return list(dict.fromkeys(re.split(r"\s+#", command)[0].strip() for command in found))


def words_of(command):
    return shlex.split(command)[1:]


def is_pattern(command):
    """Whether it stands for many commands, or is the bare name of a verb."""
    words = words_of(command)
    if any(CAPITALS.fullmatch(word) or "…" in word or "package.module" in word for word in words):
        return True
    return command != "doubly doctor" and len(words) == (2 if words[0] == "data" else 1) and words[0] in VERBS


ALL = {command: page for page in PAGES for command in commands(page.read_text(encoding="utf-8"))}
OURS = [command for command in ALL if command.startswith("doubly ")]
PATTERNS = [command for command in OURS if is_pattern(command)]
RUN = [command for command in OURS if command not in PATTERNS]
OTHERS = [command for command in ALL if command not in OURS]


def called(*words):
    """(exit code, what it printed) of doubly in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code
    return code or 0, said.getvalue()


@cache
def flags(*verb):
    """Every flag of a verb; train's depend on the recipe."""
    asked = [verb, *((*verb, *recipe.split()) for recipe in RECIPES)] if verb == ("train",) else [verb]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        return {flag for words in asked for flag in FLAG.findall(called(*words, "--help")[1])}


def unknown_flags(words):
    """Those that the verb of the command does not have."""
    known = flags(*words[: 2 if words[0] == "data" else 1])
    return [flag for word in words for flag in FLAG.findall(word.partition("=")[0]) if flag not in known]


# --- a folder in which the pages' commands make sense ----------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, inline):
    """Data in their original formats, a folder of images, a network with weights, a run that was evaluated."""
    folder = tmp_path_factory.mktemp("pages")
    write = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "data" / "originals.py")))
    draw = np.random.default_rng(0)

    def part(count):
        return draw.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), np.arange(count) % 10

    write.cifar10_python(folder / "data", [part(20) for _ in range(5)], part(20))
    for name in ("cats", "dogs", "owls"):
        for k in range(10):
            place = folder / "my_images" / name / f"{k}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (36, 40, 3), dtype=np.uint8)).save(place)
    quick_start = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    (folder / "mynet.py").write_text(re.search(r"```python\n(# mynet\.py\n.*?)```", quick_start, re.DOTALL)[1])
    build = runpy.run_path(str(folder / "mynet.py"))["build"]
    save_file(build(10).state_dict(), folder / "net.safetensors")
    save_file(build(3).state_dict(), folder / "mynet.safetensors")
    (folder / "space.json").write_text('{"epochs": [1]}')
    with contextlib.chdir(folder):
        small = f"{TINY} --model.width 4".split()
        for words in (
            ["train", "digits.imbalanced.at", *small, "--data.holdout", "0.2", "--output", "run"],
            ["evaluate", "run", *CHEAP["evaluate"].split()],
            ["data", "imbalance", "cifar10", "--ratio", "0.2", "--data-root", "data", "--output", "imbalanced"],
        ):
            code, said = called(*words)
            assert code == 0, said
    return folder


def stored(results, output, *_):
    output.mkdir(parents=True)
    return read_json(ROOT / "docs" / "results" / results)


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
    place = tmp_path / "here"
    shutil.copytree(prepared, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("DOUBLY_CACHE", str(place / "data"))
    for function, results in INSTEAD.items():
        monkeypatch.setattr(function, partial(stored, results))
    threads = torch.get_num_threads()
    yield place
    torch.set_num_threads(threads)


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", RUN)
def test_a_command_runs(command, folder):
    words = words_of(command)
    for word in words:
        resumed = words[0] == "train" and "--resume" in words
        if word.startswith("runs/") and (words[0] in READ_RUNS or resumed):
            shutil.copytree("run", word)
        if word.startswith("results/"):
            Path("results").symlink_to(ROOT / "results")
    beginnings = [" ".join(words[:count]) for count in range(len(words), 0, -1)]
    more = next((CHEAP[beginning] for beginning in beginnings if beginning in CHEAP), "")
    code, said = called(*words, *more.split())
    assert code == 0 and "Traceback" not in said, f"{ALL[command].name}: {command}\n{said}"


@pytest.mark.parametrize("command", PATTERNS)
def test_a_pattern_names_a_verb_and_flags_that_exist(command):
    words = words_of(command)
    assert words[0] in VERBS and unknown_flags(words) == []


@pytest.mark.parametrize("command", OTHERS)
def test_a_command_that_is_not_ours_is_known(command, monkeypatch):
    if not (script := SCRIPT.fullmatch(command)):
        assert command in ELSEWHERE
        return
    path, named, said = ROOT / script[1], set(FLAG.findall(script[2])), io.StringIO()
    if "ArgumentParser" in path.read_text():
        monkeypatch.setattr(sys, "argv", [script[1], "--help"])
        monkeypatch.syspath_prepend(path.parent)  # as Python does for a script
        with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        assert end.value.code == 0
    else:
        compile(path.read_text(), str(path), "exec")
    assert named <= set(FLAG.findall(said.getvalue()))


def test_the_lists_hold_nothing_that_is_not_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in ELSEWHERE if command.startswith("make")} <= targets
    assert set(ELSEWHERE) <= set(OTHERS)
    assert {beginning.split()[0] for beginning in CHEAP} | READ_RUNS <= set(VERBS)


def test_a_flag_that_is_named_by_itself_exists():
    """In inline code that begins with it: `--resume`, `--threat l2 --epsilon 0.5`."""
    data = [("data", verb) for verb in ("fetch", "inspect", "imbalance")]
    known = {flag for verb in [*((verb,) for verb in VERBS), *data] for flag in flags(*verb)}
    scripts = "".join(path.read_text() for path in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")])
    known |= {f"--{name}" for name in re.findall(r'add_argument\("--([\w-]+)"', scripts)}
    named = [
        (page.name, flag)
        for page in PAGES
        for code in re.findall(r"`(--[a-z][^`\n]*)`", FENCED.sub("", page.read_text(encoding="utf-8")))
        for flag in FLAG.findall(code)
    ]
    assert len(named) > 30 and {(page, flag) for page, flag in named if flag not in known} == set()


def test_what_would_be_missed_is_found():
    text = (
        "`doubly nonsense`, `doubly list methods`\n```\nOMP=1 python a.py  # c\n$ doubly train \\\n x\ndoubly: 1\n```"
    )
    assert commands(text) == ["python a.py", "doubly train   x", "doubly nonsense", "doubly list methods"]
    assert not is_pattern("doubly nonsense") and called("nonsense")[0] == 2
    assert (
        is_pattern("doubly evaluate DIR") and is_pattern("doubly report") and not is_pattern("doubly evaluate runs/a")
    )
    assert unknown_flags(["evaluate", "DIR", "--quick", "--no-such", "--tail-share"]) == ["--no-such"]
