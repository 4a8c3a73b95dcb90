"""Several processes find what one process finds: this file is both the test and the program that they run."""

import json
import os
import signal
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import numpy as np
import pytest
import scipy.stats  # noqa: F401 - before the processes are forked
import torch
import torch.distributed as dist
from torch import nn

from doubly.attacks import PGD
from doubly.attacks.autoattack import AutoAttack
from doubly.bilevel import SignStep
from doubly.callbacks import Callback
from doubly.cli import main
from doubly.data import Images
from doubly.distributed import join_processes
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.api import evaluate
from doubly.evaluation.predict import predict
from doubly.evaluation.result import EvalResult
from doubly.threat import LinfBall

BALL = LinfBall(0.08)
ATTACKS = {
    "pgd": PGD(BALL, 4, SignStep(0.05), restarts=2),
    "gaussian": PGD(BALL, 3, SignStep(0.07), "gaussian"),
    "short": PGD(BALL, 1, SignStep(0.1)),
}
ENSEMBLE = AutoAttack(BALL, ("apgd-ce", "square"), iterations=4, queries=20)
CHUNK_SIZE = 4
WORLD_SIZES = 2, 3


def network(classes=4):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, classes))


def images(n=13, classes=4):
    """Three chunks of 4 and one of a single image, which leaves a process without any."""
    x = torch.rand(n, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = network().eval()(x).argmax(1)
    y[0] = 0  # wrong: the network predicts 1 and 2 only, and files need an image of class 0
    return Images.of(x, y % classes, [str(k) for k in range(classes)])


class Pole(nn.Module):
    """Not finite on the last image only, which the last process has."""

    def forward(self, x):
        last = (x.flatten(1)[:, 0] == images().x[11].flatten()[0]).float()
        return torch.stack([x.mean((1, 2, 3)), x.amax((1, 2, 3)), *[x[:, 0, 0, 0]] * 2], 1) / (1 - last)[:, None]


class Recorder(Callback):
    def __init__(self):
        self.images, self.attacks = [], []

    def on_images(self, done, total):
        self.images.append((done, total))

    def on_attack(self, chunk, chunks, part, robust, seconds_left):
        self.attacks.append((chunk, part))


def everything(folder):
    """Return what one process finds, what its callback is told, and what it refuses, as JSON."""
    callback, model, data = Recorder(), network(), images()
    few = {"trust_images": 8, "curve_images": 5, "autoattack_chunk_size": 3}
    saved = {"save_examples": "npz", "max_examples": 3, "output": folder / "whole", "chunk_size": CHUNK_SIZE, **few}
    attacks = {**ATTACKS, "some": ENSEMBLE}
    result = evaluate(model, data, BALL, attacks, validation=images(7), callbacks=[callback], **saved)
    again = evaluate(model, data, BALL, {"some": ENSEMBLE}, autoattack_chunk_size=3, trust=False)
    assert [m.training for m in model.modules()] == [True] * 6
    with join_processes() as communicator:
        share = {"communicator": communicator}
        pgd = {"pgd": ATTACKS["pgd"]}
        one_class = predict(network(1), images(11, classes=1), pgd, chunk_size=CHUNK_SIZE, **share)
        not_finite = message_of(lambda: predict(Pole(), data, {}, chunk_size=12, **share), NonFiniteError)
    return {
        **values(result),
        "without a folder": again.predictions["autoattack_in_part"].tolist(),
        "validation": values(result.validation),
        "curve": result.curve,
        "trust": result.trust,
        "infinite": np.isinf(one_class.margins["pgd"]).tolist(),
        "calls": [callback.images, callback.attacks],
        "refused": [
            message_of(lambda: evaluate(model, data, BALL, [ENSEMBLE], shard=(0, 2)), UsageError),
            not_finite,
        ],
    }


def values(result):
    named = {"ids": result.ids, "y": result.y, **{f"loss {name}": part for name, part in result.losses.items()}}
    named |= {f"prediction {name}": part for name, part in result.predictions.items()}
    named |= {f"margin {name}": part for name, part in result.margins.items()}
    named |= {f"after {name}": part for name, part in result.robust_after.items()}
    return {**{name: part.tolist() for name, part in named.items()}, "examples": result.examples}


def message_of(call, kind):
    try:
        call()
    except kind as error:
        return str(error)
    return None


def program(folder):
    """Fork a process for each rank of each world size; importing torch before takes its seconds only once."""
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # this process holds it, as torchrun does
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    os.environ |= {**address, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [fork(folder / str(processes), processes, rank) for processes in WORLD_SIZES for rank in range(processes)]
    codes = [os.waitpid(rank, 0)[1] for rank in ranks]
    sys.exit(any(codes))


def under_torchrun(folder, processes, rank):
    """Run `doubly evaluate` with the environment variables that torchrun sets."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    words = f"--model {Path(__file__).stem}:network --data {folder / 'images.npz'} --output {folder / 'command'}"
    words += " --quick --autoattack-chunk-size 3 --autoattack-images 6 --chunk-size 4 --device cpu --no-trust"
    np.savez(folder / f"{rank}.npz", x_test=images().x, y_test=images().y, x_train=images().x, y_train=images().y)
    (folder / f"{rank}.npz").replace(folder / "images.npz")
    with (folder / f"log-{rank}").open("w") as log, redirect_stdout(log), redirect_stderr(log):
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
        if processes == WORLD_SIZES[0]:
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
            errors = started.communicate(timeout=600)[1]
        finally:
            with suppress(ProcessLookupError):  # one that waits for another's failure
                os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, errors


@pytest.fixture(scope="module", params=WORLD_SIZES)
def several(request, folder, launched):
    """Return the results of each process, by rank."""
    place = folder / str(request.param)
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(request.param)]


def test_all_processes_return_the_same_and_only_the_first_calls_its_callbacks(several):
    first, *others = several
    assert len(first["calls"][0]) == 4 and first["calls"][1]
    for other in others:
        assert other.pop("calls") == [[], []]
        assert other == {name: value for name, value in first.items() if name != "calls"}


def test_several_processes_find_what_one_finds(one, several):
    for name, expected in one.items():
        result = several[0][name]
        if name.startswith(("loss", "margin")):
            np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
        elif name in ("examples", "validation", "trust", "curve"):
            numbers, rest = leaves(result)
            assert (numbers, rest) == (pytest.approx(leaves(expected)[0], rel=1e-6, abs=1e-6), leaves(expected)[1])
        elif name not in ("calls", "refused"):
            assert result == expected, name
    pgd, clean = (np.mean(np.equal(one[f"prediction {name}"], one["y"])) for name in ("pgd", "clean"))
    assert 0 < pgd < clean and all(one["infinite"])
    assert one["prediction autoattack_in_part"] != one["prediction clean"]


def leaves(tree, name=""):
    """Return (numbers, everything else) of a tree, by their path."""
    if not isinstance(tree, dict | list):
        return ({name: tree}, {}) if isinstance(tree, float) else ({}, {name: tree})
    numbers, rest = {}, {}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        more = leaves(value, f"{name}/{key}")
        numbers |= more[0]
        rest |= more[1]
    return numbers, rest


def test_what_one_process_refuses_all_refuse_with_its_message(one, several):
    for rank in several:
        assert "by themselves: leave out the shard" in rank["refused"][0]
        size = 4 * -(-12 // len(several))
        assert rank["refused"][1] == f"the model's logits: 4 of {size} values are NaN or infinite"
    assert one["refused"][0] is None


def test_files_are_written_once_and_complete(one, several, folder):
    single, shared = folder / "1" / "whole", folder / str(len(several)) / "whole"
    names = [sorted(str(file.relative_to(root)) for file in root.rglob("*")) for root in (single, shared)]
    assert names[0] == names[1]
    result = EvalResult.load(shared)
    assert values(result)["prediction autoattack_in_part"] == one["prediction autoattack_in_part"]
    for name in ("pgd", "autoattack_in_part"):
        with (
            np.load(single / "examples" / name / "examples.npz") as expected,
            np.load(shared / "examples" / name / "examples.npz") as arrays,
        ):
            assert arrays["ids"].tolist() == expected["ids"].tolist() and len(arrays["ids"]) == 3
            np.testing.assert_allclose(arrays["x"], expected["x"], atol=1e-6)


def test_the_command_shares_the_work_too_and_only_the_first_process_prints(launched, folder):
    place = folder / str(WORLD_SIZES[0])
    result, printed = EvalResult.load(place / "command"), [(place / f"log-{rank}").read_text() for rank in (0, 1)]
    single = evaluate(network(), images(), attacks=["pgd"], chunk_size=CHUNK_SIZE, trust=False)
    assert result.predictions["pgd"].tolist() == single.predictions["pgd"].tolist() and result.label == "RA-APGD"
    assert "chunk 1 of 2, apgd-ce" in printed[0] and "RA-PGD" in printed[0] and "wrote" in printed[0]
    refused = "the processes of torchrun share AutoAttack's chunks by themselves: leave out --jobs"
    assert printed[1].strip() == f"doubly, process 1: {refused}"


if __name__ == "__main__":
    program(Path(sys.argv[1]))
