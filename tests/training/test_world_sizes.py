"""Any number of processes or microbatches trains to the same weights: this file is a test and its own program."""

import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from doubly import AT, DONE, PGD, LinfBall
from doubly.attacks import FGSM, NFGSM
from doubly.bilevel import BarrierStep, NormalizedStep, SignStep
from doubly.config import SGD, Data, Run, Validation
from doubly.config.user_code import InMemoryData, InMemoryModel
from doubly.data import Images, Splits
from doubly.data.augmentation import PadCropFlip
from doubly.errors import Interrupted, UsageError
from doubly.losses import TradesLoss
from doubly.methods import (
    ATBSL,
    AWP,
    CFA,
    CFOL,
    DAFA,
    FAAL,
    FAT,
    FRL,
    GAIRAT,
    MAIL,
    MART,
    METHODS,
    TRADES,
    WAT,
    WMMR,
    DONEClass,
    FastATGA,
    FastBAT,
    GroupDRO,
    RobustLT,
    Standard,
)
from doubly.rundir import read_metrics
from doubly.schedules import Constant
from doubly.training.loop import train_run

STEPS, BATCH, CUT = 20, 8, 13
BALL = LinfBall(0.1)
ATTACK = PGD(BALL, 2, SignStep(0.06))
NOISY = PGD(BALL, 2, SignStep(0.06), start="gaussian")
METHODS_HERE = {
    "standard": Standard(),
    "at": AT(ATTACK),
    "at, batch statistics": AT(replace(ATTACK, attack_mode="train")),
    "at, balanced": AT(ATTACK, balance="sampling"),
    "fast at": AT(FGSM(BALL)),
    "n-fgsm": AT(NFGSM(BALL)),
    "trades": TRADES(NOISY),
    "mart": MART(NOISY),
    "fat": FAT(ATTACK, tau=Constant(1.0)),
    "gairat": GAIRAT(ATTACK, burn_in=0.0),
    "mail": MAIL(ATTACK, burn_in=0.0, normalize="batch"),
    "wmmr": WMMR(ATTACK, normalize="batch"),
    "cfol": CFOL(ATTACK, eta=0.1),
    "cfol, reweighting": CFOL(ATTACK, eta=0.1, mode="reweighting"),
    "frl": FRL(NOISY),
    "at-bsl": ATBSL(ATTACK),
    "dafa": DAFA(NOISY, start=0.5),
    "cfa": CFA(NOISY),
    "faal": FAAL(ATTACK, start=0.3),
    "group dro": GroupDRO(ATTACK, eta=0.1),
    "robust lt": RobustLT(AT(ATTACK)),
    "wat": WAT(NOISY),
    "done class": DONEClass(ATTACK, rate=0.2),
    "done class, held out": DONEClass(ATTACK, driver="holdout", rate=0.2, interval=2),
    "done class, gradient": DONEClass(ATTACK, mode="gradient", temperature=Constant(0.5), implicit="exact"),
    "fast at ga": FastATGA(FGSM(BALL, reach=1.25)),
    "fast bat": FastBAT(),
    "done": DONE(ATTACK, cap=3.0),
    "done, literal": DONE(ATTACK, temperature=Constant(0.5), eta=0.7),
    "done, gd": DONE(PGD(BALL, 2, BarrierStep(5.0))),
    "done, first order": DONE(ATTACK, implicit="first_order", cap=3.0, damping=100.0),
    "done, full curvature": DONE(ATTACK, curvature="full"),
    "done, no term": DONE(PGD(BALL, 2, NormalizedStep(0.1)), implicit="none", divergence="cvar", cap=2.0),
    "done, trades": DONE(ATTACK, loss=TradesLoss(2.0)),
    "awp": AWP(AT(ATTACK), 0.01),
    "awp, done": AWP(DONE(ATTACK, cap=3.0), 0.01),
}
EPOCHS = {"plain, dafa": 2, "plain, cfa": 2}  # they follow the epoch before
STATISTICS = (
    "at",
    "at, batch statistics",
    "trades",
    "gairat",
    "fast at ga",
    "fast bat",
    "done",
    "done, first order",
    "awp",
)


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 5))


def normalized() -> nn.Module:
    convolutions = [
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Softplus(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
    ]
    return nn.Sequential(*convolutions, nn.Softplus(), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5))


CASES = {f"plain, {name}": (plain, method) for name, method in METHODS_HERE.items()} | {
    f"normalized, {name}": (normalized, METHODS_HERE[name]) for name in STATISTICS
}


def images(shift=0.0) -> Images:
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(STEPS * BATCH) % 5
    means = torch.rand(5, 1, 6, 6, generator=generator, dtype=torch.float64)
    x = 0.5 * means[y] + 0.5 * torch.rand(len(y), 1, 6, 6, generator=generator, dtype=torch.float64)
    return Images(x.clamp_max(1 - shift), y, tuple("abcde"))


def trained(case, output=None, stop=lambda: False, resume=False, shift=0.0, **changes) -> dict[str, torch.Tensor]:
    build, method = CASES[case]
    torch.manual_seed(0)
    model = build().double()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    data = Data(InMemoryData(), holdout=0.2 if method.validation_interval else 0.0, augment=PadCropFlip(1))
    validation = Validation(size=7, attack=PGD(BALL, 1, SignStep(0.1)))
    settings = {
        "epochs": EPOCHS.get(case, 1),
        "batch_size": BATCH,
        "channels_last": "no",
        "device": "cpu",
        "validation": validation,
        **changes,
    }
    run = Run(data, InMemoryModel(), method, SGD(Constant(0.1)), **settings)
    train_run(run, output, model=model, splits=Splits(images(shift), images()), stop=stop, resume=resume)
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - start
    assert moved.norm() > 0.05
    return {f"{case}/{name}": value for name, value in model.state_dict().items()}


@cache
def expected(case, **changes):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return trained(case, **changes)
    finally:
        torch.set_num_threads(threads)


IN_MICROBATCHES = ("done", "done, first order", "awp, done", "cfol", "fast at ga")  # on two processes as well
# Four processes on two cores take long: of each method one form.
FORMS = ("at, b", "fast at", "n-fgsm", "cfol, r", "done, l", "done, g", "done, no", "done, t", "awp, d")
FEW = [case for case in CASES if not case.partition(", ")[2].startswith(FORMS) or case == "plain, fast at ga"]
FEW = [case for case in FEW if not case.startswith("normalized") or "done" in case or case.endswith(", at")]


@pytest.fixture(scope="module", params=[2, 4])
def world(request, tmp_path_factory):
    """Return the weights of all cases on each of so many processes."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    folder = tmp_path_factory.mktemp("world")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, __file__, str(folder), str(request.param)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        errors = process.communicate(timeout=600)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, errors
    return [load_file(folder / f"{rank}.safetensors") for rank in range(request.param)]


def test_every_method_is_here():
    methods = [CASES[case][1] for case in FEW]
    assert {*METHODS.values()} == {type(method) for method in methods} and len(FEW) < len(CASES)


@pytest.mark.parametrize("case", CASES)
def test_several_processes_train_to_the_weights_of_one(world, case):
    if not any(name.startswith(f"{case}/") for name in world[0]):
        assert len(world) == 4 and case not in FEW
        return
    single = expected(case)
    for rank in world:
        for name, value in single.items():
            assert torch.allclose(rank[name], value, rtol=0, atol=1e-10), name


@pytest.mark.parametrize("world", [2], indirect=True)
def test_microbatches_on_two_processes_train_to_the_weights_of_one(world):
    for name in IN_MICROBATCHES:
        for key, value in expected(f"plain, {name}").items():
            for rank in world:
                assert torch.allclose(rank[f"microbatches/{key}"], value, rtol=0, atol=1e-10), key


def test_all_processes_end_with_the_same_bits(world):
    for rank in world[1:]:
        assert all(torch.equal(rank[name], value) for name, value in world[0].items())


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("plain")])
def test_a_batch_in_microbatches_trains_to_the_weights_of_the_whole(case):
    whole, parts = expected(case), expected(case, microbatch=3)  # of 3, 3 and 2 images
    assert all(torch.allclose(parts[name], value, rtol=0, atol=1e-10) for name, value in whole.items())


def test_one_process_resumes_what_several_have_begun(world, tmp_path):
    """In the middle of an epoch: weights and the epoch's row are those of a run that was not interrupted."""
    (folder,) = {rank["folder"].numpy().tobytes().decode() for rank in world}
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    shutil.copytree(folder, cut)
    assert json.loads((cut / "checkpoints" / "last" / "state.json").read_text())["step"] == CUT
    resumed, single = trained("plain, done", cut, resume=True), trained("plain, done", whole)
    assert all(torch.allclose(resumed[name], value, rtol=0, atol=1e-10) for name, value in single.items())
    (row,), (expected_row,) = (read_metrics(path / "metrics.jsonl") for path in (cut, whole))
    for name in ("loss", "weighted_loss", "train_accuracy", "weight_mean", "weight_max", "weight_ess"):
        assert row[name] == pytest.approx(expected_row[name], rel=1e-6), name
    assert row["validation"] == expected_row["validation"]


REFUSED = {
    "images": "process 1 has other training images than process 0",
    "settings": "process 1 has other settings than process 0",
    "directory": "is not empty (strange): choose another --output",
    "batch": "a global batch of 9 cannot be shared by",
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_processes_refuse_with_the_same_sentence(world, case):
    for rank in world:
        assert REFUSED[case] in rank[f"refused/{case}"].numpy().tobytes().decode()


def refused(folder, rank):
    """Return the message of each case in which the processes must not begin."""
    (folder / "stranger").mkdir(exist_ok=True)
    (folder / "stranger" / "strange").touch()
    cases = {
        "images": {"shift": 0.01 * rank},
        "settings": {"seed": rank},
        "directory": {"output": folder / "stranger"},
        "batch": {"batch_size": 9},
    }
    messages = {}
    for name, changes in cases.items():
        with pytest.raises(UsageError) as error:
            trained("plain, at", **changes)
        messages[f"refused/{name}"] = as_bytes(str(error.value))
    return messages


def as_bytes(text):
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def interrupted(folder, rank):
    """Begin a run of which one process, and not the first, is asked to stop."""
    steps = iter(range(STEPS))
    with pytest.raises(Interrupted):
        trained("plain, done", folder, stop=lambda: next(steps) == CUT - 1 and rank == 1)
    return as_bytes(str(folder))


def program(folder, size, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    path = interrupted(folder / "begun", rank)
    results = {"folder": path, **refused(folder, rank)}
    for case in CASES if size == 2 else FEW:
        results |= {name: value.contiguous() for name, value in trained(case).items()}
    for name in IN_MICROBATCHES if size == 2 else ():
        weights = trained(f"plain, {name}", microbatch=3)  # two of two images each
        results |= {f"microbatches/{key}": value.contiguous() for key, value in weights.items()}
    dist.destroy_process_group()
    save_file(results, folder / f"{rank}.safetensors")


def fork_processes(folder, size):
    """Run the program in so many processes, which share the imports of this one."""
    import torch._dynamo  # noqa: F401 - the first optimizer of each process would import it

    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                program(folder, size, rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(fork_processes(Path(sys.argv[1]), int(sys.argv[2])))
