"""One exchange of our own after the backward pass against DistributedDataParallel, on two processes. A part of run.py.

The attack calls the network itself in both, since DDP exchanges nothing there. Compared are the pass whose gradients
are exchanged, for AT and for DONE's double backward, and the resulting gradients.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from clock import timed
from lines import Outcome, Settings, answer, medians, ratio
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from doubly import AT, DONE, PGD, Batch, TrainStep
from doubly.distributed import ProcessGroup
from doubly.methods import Method
from doubly.models import MODELS
from doubly.types import Perturbation

METHODS: dict[str, Method] = {"AT": AT(), "DONE exact": DONE(cap=5.0, implicit="exact")}


def work(settings: Settings, name: str) -> dict[str, list[float]]:
    """Measure in each process: seconds of the contestants, who take turns, and how much their gradients differ."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count = 8 if settings.quick else 64
    model = MODELS["small_cnn" if settings.quick else name]().build(3, 10, [0.5] * 3, [0.25] * 3)
    model = model.to(memory_format=torch.channels_last).train()
    torch.manual_seed(dist.get_rank())
    x = torch.rand(count, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    batch = Batch(x, torch.randint(10, (count,)), torch.arange(count))
    communicator = ProcessGroup()
    step = TrainStep(progress=0.9, communicator=communicator)
    perturbation = Perturbation(PGD(steps=1)(model, batch.x, batch.y, step.generator("attack")))
    wrapped = DistributedDataParallel(model, forward_sync_buffers=False)
    results: dict[str, list[float]] = {}

    def update(method: Method, ours: bool) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        method.objective(model if ours else wrapped, batch, {}, step, perturbation).loss.backward()
        if ours:
            communicator.average_gradients(model.parameters())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for label, method in METHODS.items():
        pair = [torch.cat([g.flatten() for g in update(method, ours)]) for ours in (True, False)]
        results[f"{label}, difference"] = [((pair[0] - pair[1]).norm() / pair[1].norm()).item()]
    for turn in range(settings.rounds):
        for label, method in METHODS.items():
            for ours in (True, False) if turn % 2 else (False, True):
                dist.barrier()
                seconds = timed(partial(update, method, ours), torch.device("cpu"))
                results.setdefault(f"{label}, {'one exchange' if ours else 'DDP'}", []).append(seconds)
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        dist.barrier()
        exchange = timed(partial(dist.all_reduce, flat), torch.device("cpu"))
        results.setdefault("the exchange alone", []).append(exchange)
    return results


def measure(settings: Settings) -> Outcome:
    seconds = run_two_processes(settings, "narrow_resnet")
    equal = all(seconds.pop(f"{label}, difference")[0] < 1e-4 for label in METHODS)
    lines = [
        *(ratio(seconds, f"{label}, one exchange", f"{label}, DDP") for label in METHODS),
        ratio(seconds, "the exchange alone", "AT, one exchange"),
        answer("gradients agree to 1e-4, with DONE's double backward too", equal),
    ]
    return Outcome(lines, "narrow ResNet, 64 images per process, one update without its attack", medians(seconds))


def run_two_processes(settings: Settings, name: str) -> dict[str, list[float]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, str(settings.rounds), str(int(settings.quick)), name]
        processes = [subprocess.Popen([*command, rank], env=environment) for rank in "01"]
        if any([process.wait() for process in processes]):  # noqa: C419 - both are waited for
            raise RuntimeError("a process failed")
        results: dict[str, list[float]] = json.loads((Path(folder) / "results.json").read_text())
    return results


if __name__ == "__main__":
    folder, rounds, quick, name, rank = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=2)
    results = work(Settings("reduction", int(rounds), quick == "1"), name)
    if rank == "0":
        (Path(folder) / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()
