"""Several processes measure what one measures: this file is both the test and the program that they run."""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import numpy as np
import pytest
import scipy.stats  # noqa: F401 - before the processes part
import torch
import torch.distributed as dist
from torch import nn

from doubly.attacks import PGD
from doubly.attacks.autoattack import AutoAttack
from doubly.bilevel import SignStep
from doubly.cli import main
from doubly.data import Images
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.autoattack.runner import Callback
from doubly.evaluation.predict import answers
from doubly.evaluation.result import EvalResult
from doubly.threat import LinfBall

BALL = LinfBall(0.08)
PGDS = {
    "pgd": PGD(BALL, 4, SignStep(0.03), restarts=2),
    "gaussian": PGD(BALL, 3, SignStep(0.03), "gaussian"),
    "short": PGD(BALL, 1, SignStep(0.02)),
}
SOME = AutoAttack(BALL, ("apgd-ce", "square"), iterations=4, queries=20)
CHUNK = 4
WORLDS = 2, 3


def network(classes=4):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, classes))


def images(n=13, classes=4):
    """Three chunks of 4 and one of a single image, which leaves a process without any."""
    x = torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = network().eval()(x).argmax(1)
    y[0] = (y[0] + 1) % 4
    return Images.of(x, y % classes, [str(k) for k in range(classes)])


class Pole(nn.Module):
    """Not finite on the last image alone, which is the last process's."""

    def forward(self, x):
        last = (x.flatten(1)[:, 0] == images().x[11].flatten()[0]).float()
        return torch.stack([x.mean((1, 2, 3)), x.amax((1, 2, 3)), *[x[:, 0, 0, 0]] * 2], 1) / (1 - last)[:, None]


class Heard(Callback):
    def __init__(self):
        self.done, self.parts = [], []

    def images(self, done, of):
        self.done.append((done, of))

    def attack(self, chunk, of, part, standing, left):
        self.parts.append((chunk, part))


def everything(folder):
    """What one process finds, with what it heard and what it was refused, as JSON."""
    heard, network_, data = Heard(), network(), images()
    few = {"trust_images": 8, "curve_images": 5, "compile": "no"}
    kept = {"save_examples": "npz", "most_examples": 3, "output": folder / "whole", "chunk": CHUNK, **few}
    found = evaluate(
        network_, data, BALL, {**PGDS, "some": SOME}, validation=images(7), watch=heard, autoattack_chunk=3, **kept
    )
    again = evaluate(network_, data, BALL, {"some": SOME}, autoattack_chunk=3, compile="no", trust=False)
    assert [m.training for m in network_.modules()] == [True] * 6
    one_class = answers(network(1), images(11, classes=1), {"pgd": PGDS["pgd"]}, chunk=CHUNK)
    return {
        **outcome(found),
        "without a folder": again.answers["autoattack_in_part"].tolist(),
        "validation": outcome(found.validation),
        "curve": found.curve,
        "trust": found.trust,
        "infinite": np.isinf(one_class.margins["pgd"]).tolist(),
        "heard": [heard.done, heard.parts],
        "refused": [
            sentence(lambda: evaluate(network_, data, BALL, [SOME], shard=(0, 2), compile="no"), UsageError),
            sentence(lambda: answers(Pole(), data, {}, chunk=12), NonFiniteError),
        ],
    }


def outcome(found):
    named = {"ids": found.ids, "y": found.y, **{f"loss {name}": each for name, each in found.losses.items()}}
    named |= {f"answer {name}": each for name, each in found.answers.items()}
    named |= {f"margin {name}": each for name, each in found.margins.items()}
    named |= {f"after {name}": each for name, each in found.after.items()}
    return {**{name: each.tolist() for name, each in named.items()}, "examples": found.examples}


def sentence(call, kind):
    try:
        call()
    except kind as problem:
        return str(problem)
    return None


def program(folder):
    """A process for each rank of each world, forked once torch is imported: that takes seconds."""
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [fork(folder / str(processes), processes, rank) for processes in WORLDS for rank in range(processes)]
    codes = [os.waitpid(rank, 0)[1] for rank in ranks]
    sys.exit(any(codes))


def under_torchrun(folder, processes, rank):
    """`doubly evaluate` with what torchrun sets."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    words = f"--model {Path(__file__).stem}:network --data {folder / 'images.npz'} --output {folder / 'command'}"
    words += " --quick --autoattack-chunk 3 --autoattack-images 6 --compile no --chunk 4 --device cpu --no-trust"
    np.savez(folder / f"{rank}.npz", x_test=images().x, y_test=images().y, x_train=images().x, y_train=images().y)
    (folder / f"{rank}.npz").replace(folder / "images.npz")
    with (folder / f"said-{rank}").open("w") as said, redirect_stdout(said), redirect_stderr(said):
        codes = [main(["evaluate", *words.split(), *more]) for more in ([], ["--jobs", "2"])]
    assert codes == [0, 2] and not dist.is_initialized(), codes


def fork(folder, processes, rank):
    folder.mkdir(exist_ok=True)
    if (child := os.fork()) != 0:
        return child
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=processes)
        (folder / f"{rank}.json").write_text(json.dumps(everything(folder)))
        dist.destroy_process_group()
        if processes == WORLDS[0]:
            under_torchrun(folder, processes, rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def one(folder):
    (folder / "1").mkdir()
    return json.loads(json.dumps(everything(folder / "1")))


@pytest.fixture(scope="module")
def launched(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, str(folder)]
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=environment, **options) as started:
        try:
            said = started.communicate(timeout=100)[1]
        finally:
            with suppress(ProcessLookupError):  # one that waits for another's failure
                os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, said


@pytest.fixture(scope="module", params=WORLDS)
def several(request, folder, launched):
    """What each of them found, by its rank."""
    place = folder / str(request.param)
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(request.param)]


def test_the_ranks_agree_and_the_first_alone_speaks(several):
    first, *others = several
    assert len(first["heard"][0]) == 4 and first["heard"][1]
    for other in others:
        assert other.pop("heard") == [[], []]
        assert other == {name: value for name, value in first.items() if name != "heard"}


def test_several_processes_find_what_one_finds(one, several):
    for name, expected in one.items():
        found = several[0][name]
        if name.startswith(("loss", "margin")):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        elif name in ("examples", "validation", "trust", "curve"):
            numbers, words = leaves(found)
            assert (numbers, words) == (pytest.approx(leaves(expected)[0], rel=1e-6, abs=1e-6), leaves(expected)[1])
        elif name not in ("heard", "refused"):
            assert found == expected, name
    assert 0 < np.mean(np.equal(one["answer pgd"], one["y"])) < np.mean(np.equal(one["answer clean"], one["y"]))
    assert one["answer autoattack_in_part"] != one["answer clean"] and all(one["infinite"])


def leaves(tree, name=""):
    """(numbers, everything else) of a tree, by their path."""
    if not isinstance(tree, dict | list):
        return ({name: tree}, {}) if isinstance(tree, float) else ({}, {name: tree})
    numbers, words = {}, {}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        more = leaves(value, f"{name}/{key}")
        numbers |= more[0]
        words |= more[1]
    return numbers, words


def test_what_is_refused_to_one_is_refused_to_all_with_its_sentence(one, several):
    for rank in several:
        assert "by themselves: leave out the shard" in rank["refused"][0]
        assert rank["refused"][1] == "the model's logits: 4 of 16 values are NaN or infinite".replace(
            "16", str(4 * -(-12 // len(several)))
        )
    assert one["refused"][0] is None


def test_files_are_written_once_and_whole(one, several, folder):
    alone, place = folder / "1" / "whole", folder / str(len(several)) / "whole"
    names = [sorted(str(f.relative_to(p)) for p in (root,) for f in p.rglob("*")) for root in (alone, place)]
    assert names[0] == names[1]
    found = EvalResult.load(place)
    assert outcome(found)["answer autoattack_in_part"] == one["answer autoattack_in_part"]
    for name in ("pgd", "autoattack_in_part"):
        with (
            np.load(alone / "examples" / name / "examples.npz") as expected,
            np.load(place / "examples" / name / "examples.npz") as kept,
        ):
            assert kept["ids"].tolist() == expected["ids"].tolist() and len(kept["ids"]) == 3
            np.testing.assert_allclose(kept["x"], expected["x"], atol=1e-6)


def test_the_command_is_shared_too_and_the_first_process_speaks(launched, folder):
    place = folder / str(WORLDS[0])
    found, said = EvalResult.load(place / "command"), [(place / f"said-{rank}").read_text() for rank in (0, 1)]
    alone = evaluate(network(), images(), attacks=["pgd"], chunk=CHUNK, trust=False)
    assert found.answers["pgd"].tolist() == alone.answers["pgd"].tolist() and found.label == "RA-APGD"
    assert "chunk 1 of 2, apgd-ce" in said[0] and "RA-PGD" in said[0] and "wrote" in said[0]
    refused = "the processes of torchrun share AutoAttack's chunks by themselves: leave out --jobs"
    assert said[1].strip() == f"doubly, process 1: {refused}"


if __name__ == "__main__":
    program(Path(sys.argv[1]))
