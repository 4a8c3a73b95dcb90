"""Recomputed activations give the same numbers, and nothing of it is to be seen afterwards."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.losses import TradesLoss
from doubly.methods import AT, AWP, DONE, FastATGA, FastBAT
from doubly.models import MODELS, NarrowResNet, PreActResNet18, ResNet18, SmallCNN, WideResNet
from doubly.models.preact_resnet import PreActBlock
from doubly.models.resnet import Block
from doubly.threat import LinfBall
from doubly.training.recompute import blocks, recomputing
from doubly.types import Batch, TrainStep

ATTACK = PGD(LinfBall(0.1), 2, SignStep(0.05))


def network(dropout=0.0):
    """Float64, with batch norm, and dropout inside a block."""
    torch.manual_seed(0)
    model = NarrowResNet(2, 1).build(1, 3, [0.5], [0.25])
    model.stages.append(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(dropout), nn.BatchNorm2d(8)))
    return model.double()


def outcome(method, model, recompute):
    """(scalar, gradients, buffers) of one objective; passes are differentiated inside and outside of the `with`."""
    torch.manual_seed(1)
    x, y = torch.rand(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3
    with recomputing(model) if recompute else nullcontext():
        found = method.objective(model, Batch(x, y, torch.arange(6)), {}, TrainStep(progress=0.7))
    found.loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return found.loss.detach(), gradients, torch.cat([b.flatten().double() for b in model.buffers()])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(
    "method",
    [
        AT(ATTACK),
        AT(PGD(LinfBall(0.1), 2, SignStep(0.05), attack_mode="train"), loss=TradesLoss()),
        DONE(ATTACK, implicit="exact"),
        DONE(ATTACK, implicit="exact", curvature="full"),
        DONE(ATTACK, implicit="first_order"),
        DONE(ATTACK, implicit="none"),
        FastBAT(),
        FastATGA(FGSM(LinfBall(0.1), 1.25)),
        AWP(AT(ATTACK), gamma=0.1),
        AWP(DONE(ATTACK, implicit="exact"), gamma=0.1),
    ],
    ids=["AT", "TRADES", "exact", "full", "first_order", "none", "FastBAT", "FastATGA", "AWP", "AWP_DONE"],
)
def test_gradients_and_statistics_are_the_same(method, dropout):
    plain, found = (outcome(method, network(dropout), recompute) for recompute in (False, True))
    for expected, value in zip(plain, found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    assert plain[1].norm() > 0.1


def test_blocks_run_again_in_every_backward_pass_and_only_then():
    model, runs = network(), []
    model.stages[0][0].conv1.register_forward_hook(lambda *_: runs.append(1))
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    with recomputing(model):
        with torch.no_grad():
            model(x)
        assert len(runs) == 1
        logits = model(x)
        assert len(runs) == 2
    logits.sum().backward()
    assert len(runs) == 3
    model(x).sum().backward()
    assert len(runs) == 4


def test_fewer_numbers_stay_in_memory():
    held = {}
    for recompute in (False, True):
        model, sizes = ResNet18().build(3, 10, [0.5] * 3, [0.25] * 3), []
        ours = {p.data_ptr() for p in model.parameters()}

        def keep(saved, ours=ours, sizes=sizes):
            if saved.data_ptr() not in ours:
                sizes.append((saved.data_ptr(), saved.numel()))
            return saved

        forgetting = recomputing(model) if recompute else nullcontext()
        with forgetting, torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            logits = model(torch.rand(2, 3, 16, 16))
        held[recompute] = sum(dict(sizes).values())
        assert logits.requires_grad
    assert held[True] < 0.35 * held[False]


def test_nothing_is_left_behind_and_copies_made_inside_are_plain():
    model = network()
    names = list(model.state_dict())
    with recomputing(model):
        assert list(model.state_dict()) == names
    assert list(model.state_dict()) == names and not any("forward" in vars(m) for m in model.modules())
    twin = copy.deepcopy(model)
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad(), recomputing(model):
        model.stages[0][0].conv1.weight.zero_()
        assert not torch.equal(twin.eval()(x), model.eval()(x))


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (ResNet18(), [nn.Sequential, *[Block] * 8, nn.Sequential]),
        (PreActResNet18(), [*[PreActBlock] * 8, nn.Sequential, nn.Sequential]),
        (WideResNet(10, 1), [*[PreActBlock] * 3, nn.Sequential, nn.Sequential]),
        (SmallCNN(), [nn.Sequential, nn.Sequential]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_what_a_block_is(model, kinds):
    assert [type(block) for block in blocks(model.build(3, 10, [0.5] * 3, [0.25] * 3))] == kinds


def test_lists_are_looked_into_and_a_shared_block_counts_once():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.parts, self.again, self.head = nn.ModuleList([block, nn.Linear(2, 2)]), block, nn.Linear(2, 2)

    assert [type(block) for block in blocks(Own())] == [nn.Sequential]


def test_every_network_has_blocks():
    for name in MODELS:
        model = MODELS[name](10, 1) if name == "wide_resnet" else MODELS[name]()
        assert blocks(model.build(1, 3, [0.5], [0.25]))


def block_network():
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3))


@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_a_run_is_the_same_to_the_bit_also_resumed(tiny, tmp_path, adversarial, same_bits, precision):
    tiny.network = block_network
    plain = tiny.run(adversarial, average=0.9, precision=precision, epochs=2)
    tiny.train(plain, tmp_path / "plain")
    run = tiny.run(adversarial, average=0.9, precision=precision, epochs=2, recompute_activations=True)
    tiny.stopped(run, tmp_path / "again", after=3)
    tiny.train(run, tmp_path / "again", resume=True)
    assert same_bits(tiny.checkpoint(tmp_path / "plain")[0], tiny.checkpoint(tmp_path / "again")[0])


def test_a_network_without_blocks_is_refused(tiny, tmp_path):
    with pytest.raises(UsageError, match=r"Sequential has no blocks to recompute.*group them into nn\.Sequential"):
        tiny.train(tiny.run(recompute_activations=True), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
