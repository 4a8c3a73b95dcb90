"""The defaults of the method protocol, and batches that are split into microbatches."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import SignStep
from doubly.distributed.microbatch import WholeBatch, microbatch_rows, microbatch_sizes
from doubly.losses import TradesLoss
from doubly.methods import (
    AT,
    ATBSL,
    AWP,
    CFA,
    CFOL,
    DAFA,
    DONE,
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
    Method,
    RobustLT,
    Standard,
)
from doubly.schedules import Constant
from doubly.seeding import Rows
from doubly.threat import LinfBall
from doubly.types import Batch, Objective, TrainStep

ATTACK = PGD(LinfBall(0.1), 2, SignStep(0.06))
NOISY = PGD(LinfBall(0.1), 2, SignStep(0.06), start="gaussian")
STEP = TrainStep(epoch=1, step=2, progress=0.9, seed=4)
METHODS_HERE = [  # with settings by which weights depend on the whole batch, and others by which they do not
    Standard(),
    AT(ATTACK),
    TRADES(NOISY),
    MART(NOISY),
    FAT(ATTACK),
    GAIRAT(ATTACK),
    GAIRAT(ATTACK, burn_in=0.95),
    MAIL(NOISY),
    MAIL(NOISY, normalize="batch"),
    MAIL(NOISY, normalize="batch", margin="natural"),
    WMMR(ATTACK),
    WMMR(ATTACK, normalize="batch"),
    CFOL(ATTACK, eta=0.1),
    FRL(NOISY),
    ATBSL(ATTACK),
    DAFA(NOISY),
    CFA(NOISY),
    FAAL(ATTACK),
    GroupDRO(ATTACK, eta=0.1),
    GroupDRO(ATTACK, TradesLoss(2.0), eta=0.1),
    RobustLT(AT(ATTACK)),
    RobustLT(FRL(NOISY)),
    RobustLT(DONE(ATTACK, implicit="first_order", damping=100.0)),
    RobustLT(AWP(AT(ATTACK))),
    AWP(RobustLT(FAAL(ATTACK))),
    WAT(NOISY),
    DONEClass(ATTACK),
    DONEClass(ATTACK, mode="gradient", temperature=Constant(0.5), cap=2.0, implicit="exact"),
    FastATGA(FGSM(LinfBall(0.1))),
    FastATGA(FGSM(LinfBall(0.1)), strength=0.0),
    FastBAT(),
    DONE(ATTACK, cap=3.0),
    DONE(ATTACK, implicit="none"),
    DONE(ATTACK, implicit="first_order", damping=100.0),
    AWP(AT(ATTACK)),
    AWP(AT(ATTACK), gamma=0.0),
    AWP(CFOL(ATTACK, eta=0.1)),
    AWP(DONE(ATTACK, implicit="first_order", damping=100.0)),
]


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples(count=8):
    y = torch.arange(count) % 3
    x = 0.5 * torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double()
    return Batch(x + 0.2 * y.view(-1, 1, 1, 1), y, torch.arange(count))


def accumulated(method, sizes):
    """Return weights, losses, state and summed gradient over microbatches of these sizes."""
    model, batch, state = network(), samples(sum(sizes)), method.init(torch.tensor([3, 3, 2]))
    parts = [Batch(*columns) for columns in zip(*(torch.split(values, sizes) for values in batch), strict=True)]
    steps = [STEP._replace(rows=rows) for rows in microbatch_rows(Rows(0, sum(sizes)), sizes)]
    weights, losses = [], []
    for objective in method.microbatch_objectives(model, parts, state, steps):
        (objective.loss * len(objective.sample_losses) / sum(sizes)).backward()
        weights.append(objective.weights)
        losses.append(objective.sample_losses)
    slopes = torch.cat([p.grad.flatten() for p in model.parameters()])
    return torch.cat(weights), torch.cat(losses), objective.state, slopes


def test_microbatches_of_every_method_are_together_the_whole_batch():
    assert {type(method) for method in METHODS_HERE} == set(METHODS.values())
    for method in METHODS_HERE:
        weights, losses, state, slopes = accumulated(method, [8])
        for sizes in ([3, 3, 2], [4, 4]):
            parts = accumulated(method, sizes)
            for one, other in zip((weights, losses, slopes), (parts[0], parts[1], parts[3]), strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-10), method
            assert parts[2].keys() == state.keys()
            assert all(torch.allclose(parts[2][key], state[key], atol=1e-10) for key in state), method


def test_the_whole_batch_is_gathered_whatever_a_microbatch_brings():
    values = torch.arange(6.0)
    communicator = WholeBatch(values)
    assert communicator.all_gather(values[2:4]) is values
    assert (communicator.rank, communicator.world_size) == (0, 1) and communicator.mean([values])[0] is values


def test_microbatches_are_few_and_nearly_equal_and_no_single_image():
    for count, limit, sizes in [
        (8, None, [8]),
        (8, 8, [8]),
        (8, 3, [3, 3, 2]),
        (9, 4, [3, 3, 3]),
        (5, 2, [3, 2]),  # batch norm cannot normalize a single image
        (3, 2, [3]),
        (3, 1, [1, 1, 1]),
        (1, 4, [1]),
    ]:
        assert microbatch_sizes(count, limit) == sizes
    assert microbatch_rows(Rows(10, 30), [3, 3, 2]) == [Rows(10, 30), Rows(13, 30), Rows(16, 30)]


@dataclass(frozen=True)
class Minimal(Method):
    """A user's method that implements the least that it has to."""

    def objective(self, model, batch, state, step):
        losses = nn.functional.cross_entropy(model(batch.x), batch.y, reduction="none")
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), torch.zeros(len(losses), 3), state)


def test_everything_but_the_objective_has_a_default():
    method = Minimal()
    assert (method.attack, method.wrapped, method.needs_second_derivatives) == (None, None, False)
    assert method.init() == {} and method.init(torch.ones(3)) == {} and method.sampling({}) is None
    assert method.scaled(0.5) is method and method.costliest() is method
    assert method.perturb(network(), samples(), {}, STEP) is None
    whole, parts = accumulated(method, [8]), accumulated(method, [4, 4])
    assert torch.allclose(whole[3], parts[3])
    with pytest.raises(NotImplementedError):
        Method().objective(network(), samples(), {}, STEP)


def test_scaling_a_method_scales_its_attack():
    for kind in METHODS.values():
        method = kind()
        if method.attack is not None:
            assert method.scaled(0.5).attack == method.attack.scaled(0.5)
        else:
            assert method.scaled(0.5) == method
