"""From a Run to the things it names: images, network, device. The only place that chooses a device."""

import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from doubly.attacks import attacked, evaluating
from doubly.checks import check_scores
from doubly.config.run import Run
from doubly.data import Images, Splits, load_splits, train_split
from doubly.data.holdout import stratified_subset
from doubly.distributed import collectives as parallel
from doubly.distributed.launch import local_rank
from doubly.distributed.rank_zero import together
from doubly.errors import UsageError
from doubly.evaluation.memory import fitted
from doubly.seeding import derived_seed, global_generators


@dataclass(frozen=True)
class Prepared:
    """What training works on; `validation` is part of the hold-out, or of the test set where nothing is held out."""

    train: Images
    validation: Images
    chooses: bool  # whether the validation may choose the best epoch


def chosen_device(name: str) -> torch.device:
    if name == "auto":
        return _own_gpu() if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise UsageError(
            f"device '{name}' is not to be had here ({str(problem).splitlines()[0]}): use auto or cpu"
        ) from None
    return device


def _own_gpu() -> torch.device:
    if parallel.processes()[1] == 1:
        return torch.device("cuda")
    if local_rank() >= torch.cuda.device_count():
        raise UsageError(
            f"process {local_rank()} of this machine has no GPU of its own, there are {torch.cuda.device_count()}: "
            "start at most so many processes per machine, or take --device cpu"
        )
    return torch.device("cuda", local_rank())


def fetched_splits(run: Run) -> Splits:
    """As `load_splits`; of several processes the first goes ahead, so that files are fetched and unpacked once."""
    found = together(lambda: load_splits(run.data) if parallel.world()[0] == 0 else None, patiently=True)
    return found or load_splits(run.data)


def prepare(run: Run, splits: Splits, device: torch.device) -> Prepared:
    """Hold out, apply the imbalance, select the validation images, and move all of them to the device."""
    train, held_out = train_split(run.data, splits)
    candidates = splits.test if held_out is None else held_out
    validation = candidates.subset(stratified_subset(candidates.y, run.validation.size, run.data.split))
    return Prepared(train.to(device), validation.to(device), held_out is not None)


def build_model(run: Run, images: Images) -> nn.Module:
    """A fresh network; its initial weights follow from the seed."""
    mean, std = images.channel_statistics()
    with global_generators(derived_seed(run.seed, 0, 0, "weights")):
        return run.model.build(images.x.shape[1], len(images.classes), mean, std)


def check_model(model: nn.Module, images: Images) -> None:
    """One pass over a few images, so that a network that does not fit them is refused before anything is written."""
    x, y = images.pixels(slice(0, 2)), images.y[:2]
    try:
        with evaluating(model), torch.no_grad(), global_generators(0):
            logits = model(x)
    except (RuntimeError, TypeError, ValueError) as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise UsageError(f"the model cannot take images of shape {tuple(x.shape[1:])} ({reason:.160})") from None
    check_scores(logits, y)
    if logits.shape[1] != len(images.classes):
        raise UsageError(
            f"the model returns {logits.shape[1]} logits for {len(images.classes)} classes: build it with that many"
        )


def faster_channels_last(model: nn.Module, images: Images, batch: int, repeats: int = 3) -> bool:
    """Measure one input gradient, the work that an attack is made of, in both memory formats, alternating."""
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    if not convolutions or any(map(_corrupts_memory, convolutions)):
        return False
    x = images.pixels(slice(0, batch))
    formats = (torch.contiguous_format, torch.channels_last)
    seconds = {layout: float("inf") for layout in formats}

    def gradient(layout: torch.memory_format) -> None:
        point = x.contiguous(memory_format=layout).requires_grad_()
        with attacked(model, "eval"):
            torch.autograd.grad(model(point).sum(), point)[0].sum().item()

    for layout in formats * repeats:
        model.to(memory_format=layout)  # type: ignore[call-overload]
        begun = time.perf_counter()
        if fitted(partial(gradient, layout)) is None:  # out of memory: training will say so, or has a smaller part
            return False
        seconds[layout] = min(seconds[layout], time.perf_counter() - begun)
    return seconds[torch.channels_last] < seconds[torch.contiguous_format]


def _corrupts_memory(layer: nn.Conv2d) -> bool:
    """torch 2.13 on AVX2 writes past its buffers in the weight gradient of these, with channels last."""
    narrow = layer.in_channels < 8 and layer.weight.device.type == "cpu"
    return narrow and layer.kernel_size == (1, 1) and layer.stride != (1, 1)
