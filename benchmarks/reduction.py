"""One exchange of our own after the backward pass against DistributedDataParallel, on two processes. A part of run.py.

The attack asks the network itself in both, as it must: DDP's reducer has no business there. What is compared is the
pass whose gradients are exchanged, for AT and for DONE's double backward, and the gradients that come of it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from clock import timed
from lines import Outcome, Settings, answer, medians, ratio
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from doubly import AT, DONE, PGD, Batch, TrainStep
from doubly.distributed import collectives as parallel
from doubly.models import MODELS

Update = Callable[[nn.Module, Batch, Tensor], None]


def at(model: nn.Module, batch: Batch, delta: Tensor) -> None:
    AT(lambda *given: delta).objective(model, batch, {}, TrainStep()).loss.backward()  # type: ignore[no-untyped-call]


def done(model: nn.Module, batch: Batch, delta: Tensor) -> None:
    DONE(cap=5.0).direction(model, batch, delta, {}, TrainStep(progress=0.9)).loss.backward()  # type: ignore[no-untyped-call]


UPDATES: dict[str, Update] = {"AT": at, "DONE exact": done}


def work(settings: Settings, name: str) -> dict[str, list[float]]:
    """In each process: seconds of the contestants, who take turns; and how far their gradients are apart."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count = 8 if settings.quick else 64
    model = MODELS["small_cnn" if settings.quick else name]().build(3, 10, [0.5] * 3, [0.25] * 3)
    model = model.to(memory_format=torch.channels_last).train()
    torch.manual_seed(dist.get_rank())
    x = torch.rand(count, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    batch = Batch(x, torch.randint(10, (count,)), torch.arange(count))
    delta = PGD(steps=1)(model, batch.x, batch.y, TrainStep().generator("attack"))
    wrapped = DistributedDataParallel(model, forward_sync_buffers=False)
    found: dict[str, list[float]] = {}

    def step(update: Update, ours: bool) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        update(model if ours else wrapped, batch, delta)
        if ours:
            parallel.average_gradients(model.parameters())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for label, update in UPDATES.items():
        pairs = [torch.cat([g.flatten() for g in step(update, ours)]) for ours in (True, False)]
        found[f"{label}, difference"] = [((pairs[0] - pairs[1]).norm() / pairs[1].norm()).item()]
    for turn in range(settings.rounds):
        for label, update in UPDATES.items():
            for ours in (True, False) if turn % 2 else (False, True):
                dist.barrier()
                seconds = timed(lambda update=update, ours=ours: step(update, ours), torch.device("cpu"))
                found.setdefault(f"{label}, {'one exchange' if ours else 'DDP'}", []).append(seconds)
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        dist.barrier()
        alone = timed(partial(dist.all_reduce, flat), torch.device("cpu"))
        found.setdefault("the exchange alone", []).append(alone)
    return found


def measure(settings: Settings) -> Outcome:
    seconds = together(settings, "narrow_resnet")
    same = all(seconds.pop(f"{label}, difference")[0] < 1e-4 for label in UPDATES)
    lines = [
        *(ratio(seconds, f"{label}, one exchange", f"{label}, DDP") for label in UPDATES),
        ratio(seconds, "the exchange alone", "AT, one exchange"),
        answer("gradients agree to 1e-4, with DONE's double backward too", same),
    ]
    return Outcome(lines, "narrow ResNet, 64 images per process, one update without its attack", medians(seconds))


def together(settings: Settings, name: str) -> dict[str, list[float]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        asked = [sys.executable, __file__, folder, str(settings.rounds), str(int(settings.quick)), name]
        started = [subprocess.Popen([*asked, rank], env=environment) for rank in "01"]
        if any([process.wait() for process in started]):  # noqa: C419 - both are waited for
            raise RuntimeError("a process failed")
        found: dict[str, list[float]] = json.loads((Path(folder) / "found.json").read_text())
    return found


if __name__ == "__main__":
    folder, rounds, quick, name, rank = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=2)
    found = work(Settings("reduction", int(rounds), quick == "1"), name)
    if rank == "0":
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
