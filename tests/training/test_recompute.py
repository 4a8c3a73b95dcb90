"""Recomputed activations give the same numbers, and leave no trace in the network."""

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
from doubly.training.recompute import find_blocks, recomputed_activations
from doubly.types import Batch, TrainStep

ATTACK = PGD(LinfBall(0.1), 2, SignStep(0.05))


def network(dropout=0.0):
    """Return a network in float64 with batch norm, and dropout inside a block."""
    torch.manual_seed(0)
    model = NarrowResNet(2, 1).build(1, 3, [0.5], [0.25])
    model.stages.append(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout(dropout), nn.BatchNorm2d(8)))
    return model.double()


def outcome(method, model, recompute):
    """Return loss, gradients and buffers of one objective, which is differentiated inside and outside of the `with`."""
    torch.manual_seed(1)
    x, y = torch.rand(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3
    with recomputed_activations(model) if recompute else nullcontext():
        result = method.objective(model, Batch(x, y, torch.arange(6)), {}, TrainStep(progress=0.7))
    result.loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return result.loss.detach(), gradients, torch.cat([b.flatten().double() for b in model.buffers()])


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
    plain, recomputed = (outcome(method, network(dropout), recompute) for recompute in (False, True))
    for expected, value in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    assert plain[1].norm() > 0.1


def test_blocks_run_again_in_every_backward_pass_and_only_then():
    model, runs = network(), []
    model.stages[0][0].conv1.register_forward_hook(lambda *_: runs.append(1))
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    with recomputed_activations(model):
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
        parameters = {p.data_ptr() for p in model.parameters()}

        def keep(saved, parameters=parameters, sizes=sizes):
            if saved.data_ptr() not in parameters:
                sizes.append((saved.data_ptr(), saved.numel()))
            return saved

        context = recomputed_activations(model) if recompute else nullcontext()
        with context, torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            logits = model(torch.rand(2, 3, 16, 16))
        held[recompute] = sum(dict(sizes).values())
        assert logits.requires_grad
    assert held[True] < 0.35 * held[False]


def test_forward_functions_are_restored_and_copies_are_plain():
    model = network()
    replaced = model.stages[1][0]
    replaced.forward = own_forward = replaced.forward  # a user may have replaced it as well
    with recomputed_activations(model):
        assert replaced.forward is not own_forward
    assert replaced.forward is own_forward
    del replaced.forward
    names = list(model.state_dict())
    with recomputed_activations(model):
        assert list(model.state_dict()) == names
    assert list(model.state_dict()) == names and not any("forward" in vars(m) for m in model.modules())
    twin = copy.deepcopy(model)
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad(), recomputed_activations(model):
        model.stages[0][0].conv1.weight.zero_()
        assert not torch.equal(twin.eval()(x), model.eval()(x))


def test_what_a_block_is():
    for model, kinds in [
        (ResNet18(), [nn.Sequential, *[Block] * 8, nn.Sequential]),
        (PreActResNet18(), [*[PreActBlock] * 8, nn.Sequential, nn.Sequential]),
        (WideResNet(10, 1), [*[PreActBlock] * 3, nn.Sequential, nn.Sequential]),
        (SmallCNN(), [nn.Sequential, nn.Sequential]),
    ]:
        assert [type(block) for block in find_blocks(model.build(3, 10, [0.5] * 3, [0.25] * 3))] == kinds
    for name in MODELS:
        model = MODELS[name](10, 1) if name == "wide_resnet" else MODELS[name]()
        assert find_blocks(model.build(1, 3, [0.5], [0.25]))


def test_lists_are_looked_into_and_a_shared_block_counts_once():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.parts, self.again, self.head = nn.ModuleList([block, nn.Linear(2, 2)]), block, nn.Linear(2, 2)

    assert [type(block) for block in find_blocks(Own())] == [nn.Sequential]


def block_network():
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3))


def test_a_run_is_the_same_to_the_bit_also_resumed(tiny, tmp_path, adversarial, same_bits):
    tiny.network = block_network
    for precision in ("float32", "fp16"):
        plain, again = tmp_path / precision / "plain", tmp_path / precision / "again"
        settings = {"ema_decay": 0.9, "precision": precision, "epochs": 2}
        tiny.train(tiny.run(adversarial, **settings), plain)
        run = tiny.run(adversarial, recompute_activations=True, **settings)
        tiny.stopped(run, again, after=3)
        tiny.train(run, again, resume=True)
        assert same_bits(tiny.checkpoint(plain)[0], tiny.checkpoint(again)[0])


def test_a_network_without_blocks_is_refused(tiny, tmp_path):
    with pytest.raises(UsageError, match=r"Sequential has no blocks to recompute.*group them into nn\.Sequential"):
        tiny.train(tiny.run(recompute_activations=True), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
