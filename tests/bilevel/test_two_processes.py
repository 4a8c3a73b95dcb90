"""Two processes compute what one does. This file is both the test and the program that each of them runs."""

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
    SingleProcess,
    Terms,
    minimize,
)

N, D, P, STEPS = 12, 3, 2, 4


class Gloo:
    """A communicator on torch.distributed, with no more than `minimize` needs."""

    def __init__(self):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, values):
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts)

    def average_gradients(self, parameters):
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DATA = normal(N, D, P, seed=1), normal(N, D, seed=2), normal(N, D, seed=3)


def problem(theta, delta, batch):
    """A problem whose curvature depends on theta and on the sample, so that no two numbers are equal by chance."""
    a, b, c = batch
    distance = delta - (a @ theta["a"]).sin() - b
    inner = (distance.square().sum(1) + 0.2 * (1 + theta["b"].square()) * distance.pow(4).sum(1)) / 2
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


def run(communicator, problem=problem, **options):
    """Return theta, delta, u, the state and the history as plain tensors."""
    theta = {"a": START.clone(), "b": torch.tensor(0.3).double()}
    delta = 0.1 * normal(D, seed=4) if options["shared"] else 0.1 * normal(N, D, seed=4)
    result = minimize(
        problem,
        theta,
        delta,
        DATA,
        **{"descent": Descent(GradientStep(0.3), 5), **options},
        optimizer=partial(torch.optim.SGD, lr=0.05),
        steps=STEPS,
        communicator=communicator,
    )
    history = {name: column.nan_to_num(-1) for name, column in result.history.items()}
    state = {f"state {name}": value for name, value in result.state.items()}
    return {"theta a": theta["a"], "theta b": theta["b"], "delta": result.delta, "u": result.u, **history, **state}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The results of all cases in each of two processes, by rank."""
    folder = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, str(folder)]
    processes = [
        subprocess.Popen([*command, rank], env=environment, stderr=subprocess.PIPE, text=True) for rank in "01"
    ]
    try:
        messages = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:  # one may still wait for the other, which failed
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], messages
    return [load_file(folder / f"{rank}.safetensors") for rank in "01"]


@pytest.mark.parametrize("shape", ["rows", "shared"])
def test_two_processes_equal_one_and_each_other_to_the_last_bit(two, shape):
    for case, options in CASES.items():
        if case.startswith(shape):
            expected = run(SingleProcess(), **options)
            assert (expected["theta a"] - START).norm() > 0.01, case  # theta moved
            for name, value in expected.items():
                first, second = (results[f"{case}/{name}"] for results in two)
                assert torch.allclose(first, value, rtol=1e-12, atol=1e-12), (case, name)
                assert torch.equal(first, second), (case, name)


def program(folder, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    results = {
        f"{case}/{name}": value.contiguous().clone()
        for case, options in CASES.items()
        for name, value in run(Gloo(), **options).items()
    }
    dist.destroy_process_group()
    save_file(results, folder / f"{rank}.safetensors")


if __name__ == "__main__":
    program(Path(sys.argv[1]), int(sys.argv[2]))
