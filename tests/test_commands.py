"""Every command in the pages works: it is run here, cut down by a table, or a list says where it is run.

A command is a line of a fenced block, or inline code, that begins with `doubly`, `make`, `python` or `pip`; of
`torchrun … -m doubly …` it is the part from `doubly` on. With a word in capitals or `…` in it (`doubly evaluate DIR`)
it is a pattern: its verb, recipe and flags must exist.
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

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import dataset_writers as write
from doubly.cli import VERBS, main
from doubly.recipes import RECIPES
from doubly.rundir import read_json

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}

# What makes a command cheap: the words that it begins with -> what is added to it. The longest beginning counts, and of
# a flag that is given twice the last.
TINY = "--epochs 1 --method.attack.steps 1 --validation.attack.steps 1 --validation.size 20 --threads 1 --device cpu"
CHEAP = {
    "train": TINY,
    "train cifar10.at": f"{TINY} --set model=model.small_cnn",  # instead of a ResNet-18
    "train cifar10.done_pgd": f"{TINY} --set model=model.small_cnn",
    "evaluate": "--images 20 --no-trust --autoattack-images 2 --autoattack-chunk-size 2 --jobs 1 --device cpu",
    "check": "--images 20 --device cpu",
    "compare": "--resamples 20",
    "repair": "--rounds 1 --steps 1 --device cpu",
    "frontier": "--images 20 --scales 0 1 --repair.rounds 1 --device cpu",
    "reproduce": "--jobs 1",
    "reproduce cifar10": "--dry-run --methods at",
    "reproduce weak_classes": "--dry-run",
    "reproduce ablation": "--dry-run",
    "reproduce table1": "--dry-run --methods at --seeds 1",
    "reproduce table1 --scale paper": "--methods at --seeds 1",
    "search": "--trials 1 --splits 1 --jobs 1 --space space.json",
}
READ_RUNS = {
    "check",
    "evaluate",
    "repair",
    "frontier",
    "compare",
    "report",
    "export",
    "card",
    "push",
    "leaderboard",
    "watch",
}  # verbs whose arguments runs/NAME must exist
STORED = {  # studies that take hours: function -> results that replace it; tests/studies runs them at a small size
    "doubly.studies.digits_study.run_study": "digits.json",
    "doubly.studies.digits_comparison.run_comparison": "digits_comparison.json",
}
ELSEWHERE = {  # commands that are not run here, and where they are
    "make check": "by .ci/run",
    "make test": "by .ci/run, of which this is a part",
    "pip install --no-deps .": "by hand, in an environment with torch alone",
    "make docs": "by hand, since it needs the extra docs; tests/test_docs.py checks names, links and navigation",
    "make format": "by hand: it changes files, and make check fails where it would",
    "make demo": "tests/studies/test_demo.py, with fewer seeds and epochs",
    "pip install .": "by the Makefile, before any test",
    "pip install 'doubly[tensorboard]'": "by the Makefile, as a part of the extra dev",
    "pip install 'doubly[wandb]'": "by hand; tests/bridges/test_loggers.py then runs it offline",
    "pip install 'doubly[mlflow]'": "by hand; tests/bridges/test_loggers.py then runs it with files",
    "pip install 'doubly[onnx]'": "by hand; tests/bridges/test_out.py then runs it",
    "pip install 'doubly[hub]'": "by hand; tests/bridges/test_out.py then runs it without a network",
    "pip install 'doubly[lightning]'": "by hand; tests/bridges/test_frameworks.py then runs it",
    "pip install 'doubly[transformers]'": "by hand; tests/bridges/test_frameworks.py then runs it",
    'pip install "doubly[ray]"': "by hand, for the slow test in tests/jobs/test_ray.py",
    'pip install "doubly[huggingface]"': "by hand; tests/end_to_end/test_front_door.py has a stand-in",
    "doubly completion install": "tests/cli/test_completion.py, in another home folder",
    "make fuzz": "tests/test_refusals.py, with fewer calls",
    "make chaos": "tests/test_chaos.py, a few attempts",
    "make hashes": "by hand, since it asks pypi.org",
    "python tools/pin_hashes.py --wheel torch-….whl": "by hand, since it asks pypi.org",
    "make audit": "by hand, since it asks a database on the network",
    "make lower-bounds": "by hand, since it makes an environment",
    "doubly list passes": "tests/studies/test_passes.py",
}
# Benchmarks take minutes: their --help is run, or they are compiled if they take no options. test_examples.py runs the
# examples.
SCRIPT = re.compile(r"python ((?:benchmarks|examples)/\w+\.py)(.*)")

FLAG_RECIPES = [  # whose flags, together, are those of train
    "stl10.at",
    "digits.imbalanced.done_gd",
    "digits.done_fast",
    "digits.done_class",
    "digits.at --set data.source=dataset.folder",
]

FENCED = re.compile(r"^(```|~~~)[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:torchrun .* -m (?=doubly ))?((?:doubly|make|python|pip) .*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
CAPITALS = re.compile(r"\[?[A-Z][A-Z_]*(=[A-Z]+)?\]?")
RECIPE = re.compile(rf"`((?:{'|'.join({name.split('.')[0] for name in RECIPES})})\.[a-z][\w.]*)`")


def commands(text):
    """Return the commands of a page in their order, without comments."""
    blocks = [block.replace("\\\n", " ") for _, block in FENCED.findall(text)]
    code = [*"\n".join(blocks).splitlines(), *re.findall(r"`([^`\n]+)`", FENCED.sub("", text))]
    matches = [match[1] for piece in code if (match := COMMAND.fullmatch(piece.strip()))]
    return list(dict.fromkeys(re.split(r"\s+#", command)[0].strip() for command in matches))


def words_of(command):
    return shlex.split(command)[1:]


def is_pattern(command):
    """Return whether a command stands for many, names a folder of another machine, or is the bare name of a verb."""
    words = words_of(command)
    if any(CAPITALS.fullmatch(word) or "…" in word or "package.module" in word or word[0] == "/" for word in words):
        return True
    return command != "doubly doctor" and len(words) == (2 if words[0] == "data" else 1) and words[0] in VERBS


def is_run(command):
    return command.startswith("doubly ") and not is_pattern(command) and command not in ELSEWHERE


ALL = {command for text in TEXTS.values() for command in commands(text)}
PATTERNS = sorted(command for command in ALL if command.startswith("doubly ") and is_pattern(command))
OTHERS = sorted(command for command in ALL if command not in PATTERNS and not is_run(command))
RUN_BY_PAGE = {page: run for page, text in TEXTS.items() if (run := list(filter(is_run, commands(text))))}


def call(*words):
    """Run doubly in this process and return (exit code, output)."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code
    return code or 0, output.getvalue()


@cache
def flags(*verb):
    """Return every flag of a verb; those of train and search depend on the recipe."""
    with_recipe = verb in (("train",), ("search",))
    calls = [verb, *((*verb, *recipe.split()) for recipe in FLAG_RECIPES)] if with_recipe else [verb]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        texts = [call(*words, help_flag)[1] for words in calls for help_flag in ("--help", "--help-all")]
        return {flag for text in texts for flag in FLAG.findall(text)}


def unknown_flags(words):
    """Return the flags of a command that its verb does not have."""
    valid = flags(*words[: 2 if words[0] == "data" else 1])
    return [flag for word in words for flag in FLAG.findall(word.partition("=")[0]) if flag not in valid]


# --- a folder in which the commands of the pages make sense -----------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, inline):
    """Make data in their original formats, a folder of images, a network with weights, and an evaluated run."""
    folder = tmp_path_factory.mktemp("pages")
    draw = np.random.default_rng(0)

    def part(count):
        return draw.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), np.arange(count) % 10

    write.cifar10_python(folder / "data", [part(20) for _ in range(5)], part(20))
    for name in ("cats", "dogs", "owls"):
        for k in range(10):
            path = folder / "my_images" / name / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (36, 40, 3), dtype=np.uint8)).save(path)
    quick_start = TEXTS[ROOT / "docs" / "quick-start.md"]
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
            code, output = call(*words)
            assert code == 0, output
    return folder


def stored_results(file, output, *_):
    output.mkdir(parents=True)
    return read_json(ROOT / "docs" / "results" / file)


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path / "pages")
    (tmp_path / "pages" / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path / "pages")
    monkeypatch.setenv("DOUBLY_CACHE", "data")
    monkeypatch.setattr("doubly.jobs.cost._timed", lambda *_: 0.01)  # seconds of a pass
    monkeypatch.setattr("doubly.report.pictures._draw", lambda wanted, stem: [])  # tests/report draws them
    for function, file in STORED.items():
        monkeypatch.setattr(function, partial(stored_results, file))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run_command(command):
    words = words_of(command)
    for word in (word for word in words if word.startswith("runs/")):
        if words[0] in READ_RUNS or "--resume" in words:
            if not Path(word).exists():
                shutil.copytree("run", word)
        else:
            shutil.rmtree(word, ignore_errors=True)
    beginnings = [" ".join(words[:count]) for count in range(len(words), 0, -1)]
    more = next((CHEAP[beginning] for beginning in beginnings if beginning in CHEAP), "")
    code, output = call(*words, *more.split())
    assert code == 0 and "Traceback" not in output, f"{command}\n{output}"


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", RUN_BY_PAGE, ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, folder):
    for command in RUN_BY_PAGE[page]:
        run_command(command)


def test_a_pattern_names_a_verb_a_recipe_and_flags_that_exist():
    for command in PATTERNS:
        words = words_of(command)
        assert words[0] in VERBS and unknown_flags(words) == [], command
        recipe = words[1] if words[0] in ("train", "search") and len(words) > 1 else ""
        assert recipe in RECIPES or "." not in recipe, command


def test_every_recipe_in_a_page_exists():
    """Also beginnings of recipes, such as `cifar10.imbalanced.small`."""
    named = {(page.name, name) for page, text in TEXTS.items() for name in RECIPE.findall(text)}
    assert len(named) > 50
    assert {(page, name) for page, name in named if not any(recipe.startswith(name) for recipe in RECIPES)} == set()


def test_a_command_that_is_not_run_here_is_a_script_or_listed(monkeypatch):
    for command in OTHERS:
        if not (script := SCRIPT.fullmatch(command)):
            assert command in ELSEWHERE, command
            continue
        path, output = ROOT / script[1], io.StringIO()
        if "ArgumentParser" in path.read_text():
            with monkeypatch.context() as patch, contextlib.redirect_stdout(output), pytest.raises(SystemExit) as end:
                patch.setattr(sys, "argv", [script[1], "--help"])
                patch.syspath_prepend(path.parent)  # as Python does for a script
                runpy.run_path(str(path), run_name="__main__")
            assert end.value.code == 0, command
        else:
            compile(path.read_text(), str(path), "exec")
        assert set(FLAG.findall(script[2])) <= set(FLAG.findall(output.getvalue())), command


def test_the_lists_have_no_entry_too_many():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in ELSEWHERE if command.startswith("make")} <= targets
    assert set(ELSEWHERE) <= set(OTHERS)
    assert all(
        (ROOT / path).exists() for place in ELSEWHERE.values() for path in re.findall(r"tests/[\w/]+\.py", place)
    )
    assert {beginning.split()[0] for beginning in CHEAP} | READ_RUNS <= set(VERBS)


def test_a_flag_that_is_named_alone_exists():
    """In inline code that begins with it: `--resume`, `--threat l2 --epsilon 0.5`."""
    data = [("data", verb) for verb in ("fetch", "inspect", "imbalance")]
    valid = {flag for verb in [*((verb,) for verb in VERBS), *data] for flag in flags(*verb)}
    scripts = "".join(path.read_text() for path in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py")])
    valid |= {f"--{name}" for name in re.findall(r'add_argument\("--([\w-]+)"', scripts)}
    named = [
        (page.name, flag)
        for page, text in TEXTS.items()
        for code in re.findall(r"`(--[a-z][^`\n…]*)`", FENCED.sub("", text))
        for flag in FLAG.findall(code)
    ]
    assert len(named) > 30 and {(page, flag) for page, flag in named if flag not in valid} == set()


def test_commands_are_recognized_and_mistakes_detected():
    text = (
        "`doubly nonsense`, `doubly list methods`\n```\nOMP=1 python a.py  # c\n$ doubly train \\\n x\ndoubly: 1\n"
        "torchrun --nnodes 2 -m doubly train y\n```"
    )
    assert commands(text) == [
        "python a.py",
        "doubly train   x",
        "doubly train y",
        "doubly nonsense",
        "doubly list methods",
    ]
    assert not is_pattern("doubly nonsense") and call("nonsense")[0] == 2
    assert is_pattern("doubly evaluate DIR") and is_pattern("doubly report")
    assert not is_pattern("doubly evaluate runs/a") and is_pattern("doubly evaluate /shared/a")
    assert unknown_flags(["evaluate", "DIR", "--quick", "--no-such", "--tail-share"]) == ["--no-such"]
