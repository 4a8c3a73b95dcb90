"""Two processes equal one: this file is both the test and the program that the two of them run."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from doubly.bilevel import (
    Box,
    ChiSquare,
    CVaR,
    Descent,
    Direct,
    GradientStep,
    LogMeanExp,
    MeanVariance,
    RunningMean,
    Terms,
)
from doubly.bilevel import minimize as minimize
from doubly.distributed import collectives as parallel

N, D, P, STEPS = 12, 3, 2, 4


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DATA = normal(N, D, P, seed=1), normal(N, D, seed=2), normal(N, D, seed=3)


def problem(theta, delta, batch):
    """Curvature that depends on theta and on the sample, so that nothing is the same for all by chance."""
    a, b, c = batch
    near = delta - (a @ theta["a"]).sin() - b
    inner = (near.square().sum(1) + 0.2 * (1 + theta["b"].square()) * near.pow(4).sum(1)) / 2
    outer = (delta - c).square().sum(1) / 2 + theta["a"] @ theta["a"] * c[:, 0].square() + theta["b"] * delta[..., 1]
    return Terms(outer, inner)


def pair(theta, delta, batch):
    terms = problem(theta, delta, batch)
    return terms._replace(outer=torch.stack([terms.outer, (delta + batch[2]).square().sum(1)], 1))


OPTIONS = {
    "full batch": {"batch_size": N, "composition": LogMeanExp(0.5, 0.9)},
    "mean": {"composition": RunningMean(lambda u: (1 + u).log())},
    "width two": {"problem": pair, "composition": RunningMean(lambda u: u[0] * (1 + u[1]).log(), 0.7)},
    "kl": {"composition": LogMeanExp(0.5, 0.9)},
    "kl with cap and storm": {"composition": LogMeanExp(0.5, 0.6, 2.0), "storm": True},
    "cvar": {"composition": CVaR(0.4, 0.9)},
    "chi-square": {"composition": ChiSquare(0.5, 0.5)},
    "mean-variance": {"composition": MeanVariance(2.0, 0.5)},
    "tolerance": {"constraint": Box(-0.5, 0.5), "descent": Descent(GradientStep(0.3), 60, 1e-2)},
    "box": {"constraint": Box(-0.5, 0.5), "solve": Direct()},
    "no solver": {"solve": None},
}
CASES = {
    f"{shape}, {name}": {"batch_size": 4, **options, "shared": shape == "shared"}
    for shape in ("rows", "shared")
    for name, options in OPTIONS.items()
}
START = torch.tensor([0.5, -0.5], dtype=torch.float64)


def run(problem=problem, **options):
    """theta, delta, u and the state as plain tensors, with the columns of the history that all processes share."""
    theta = {"a": START.clone(), "b": torch.tensor(0.3).double()}
    delta = 0.1 * normal(D, seed=4) if options["shared"] else 0.1 * normal(N, D, seed=4)
    found = minimize(
        problem,
        theta,
        delta,
        DATA,
        **{"descent": Descent(GradientStep(0.3), 5), **options},
        optimizer=partial(torch.optim.SGD, lr=0.05),
        steps=STEPS,
        processes=parallel,
    )
    names = ("value", "gradient", "step_size", "gap", "residual")
    history = {name: found.history[name].nan_to_num(-1) for name in names}
    named = {"theta a": theta["a"], "theta b": theta["b"], "delta": found.delta, "u": found.u, **history}
    return {**named, **{f"state {key}": value for key, value in found.state.items()}}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes found, by its rank."""
    folder = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, str(folder)]
    started = [subprocess.Popen([*command, rank], env=environment, stderr=subprocess.PIPE, text=True) for rank in "01"]
    try:
        said = [process.communicate(timeout=100)[1] for process in started]
    finally:
        for process in started:  # one that waits for the other's failure
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0, 0], said
    return [load_file(folder / f"{rank}.safetensors") for rank in "01"]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(two, case):
    alone = run(**CASES[case])
    assert (alone["theta a"] - START).norm() > 0.01  # something happened
    for rank in two:
        for name, expected in alone.items():
            found = rank[f"{case}/{name}"]
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("case", CASES)
def test_the_two_processes_agree_to_the_last_bit(two, case):
    for name in (key for key in two[0] if key.startswith(f"{case}/")):
        assert torch.equal(two[0][name], two[1][name]), name


def program(folder, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    found = {f"{case}/{name}": value for case, options in CASES.items() for name, value in run(**options).items()}
    dist.destroy_process_group()
    save_file({name: value.contiguous().clone() for name, value in found.items()}, folder / f"{rank}.safetensors")


if __name__ == "__main__":
    program(Path(sys.argv[1]), int(sys.argv[2]))
