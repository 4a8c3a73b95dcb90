"""The l1 threat: its projection against a slow one, and attacks within it against foolbox."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from doubly import evaluate
from doubly.bilevel import SparseStep
from doubly.bridges.attacks import foreign_attack
from doubly.threat import L1Ball, is_image, is_inside


def test_the_projection_is_the_nearest_point():
    random = torch.Generator().manual_seed(0)
    for radius in (0.3, 1.0, 5.0):
        x = torch.rand(4, 1, 2, 3, generator=random, dtype=torch.float64)
        delta = 2 * torch.randn(x.shape, generator=random, dtype=torch.float64)
        ours = L1Ball(radius).around(x).project(delta)
        assert is_inside(L1Ball(radius), ours).all() and is_image(x + ours).all()
        for row in range(4):
            # delta = p - q with p, q >= 0 makes the problem smooth.
            goal, low, high = delta[row].flatten().numpy(), -x[row].flatten().numpy(), 1 - x[row].flatten().numpy()
            found = minimize(
                lambda z, goal=goal: np.square(z[:6] - z[6:] - goal).sum(),
                np.zeros(12),
                bounds=[*((0, h) for h in high), *((0, -b) for b in low)],
                constraints={"type": "ineq", "fun": lambda z, radius=radius: radius - z.sum()},
                options={"maxiter": 500, "ftol": 1e-14},
            )
            assert np.allclose(ours[row].flatten().numpy(), found.x[:6] - found.x[6:], atol=1e-5)


def test_a_sparse_step_moves_the_share_with_the_largest_gradients():
    gradient = torch.tensor([[[[1.0, -4.0, 0.5, 3.0]]], [[[0.0, 0.0, 0.0, 0.0]]]])
    box = L1Ball(1.0).around(torch.full_like(gradient, 0.5))
    step, _ = SparseStep(0.6, share=0.5).step(gradient, torch.zeros_like(gradient), box, {})
    assert torch.allclose(step[0].flatten(), torch.tensor([0, 0.3, 0, -0.3])) and not step[1].any()


@pytest.mark.filterwarnings("ignore")
def test_attacks_in_l1_are_as_strong_as_those_of_foolbox():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:1000]), y[:1000]).backward()
        optimizer.step()
    _compare_autoattack(net, x[1200:1212], y[1200:1212])
    ball = L1Ball(1.0)
    theirs = [foreign_attack(f"foolbox:{name}", ball) for name in ("SparseL1DescentAttack,steps=20", "L1FMNAttack")]
    result = evaluate(net, (x[1200:1300], y[1200:1300]), ball, ["pgd", "strong", *theirs], trust=False)
    others = [result.accuracy(name) for name in result.attacks[2:]]
    assert result.sa > 0.9
    assert result.accuracy("strong") <= min(others) + 0.03 and result.ra_pgd <= others[0] + 0.02
    assert "failed" not in result.examples and result.examples["outside"] == 0
    assert (result.radii["foolbox_l1_fmn_attack"] >= 0).all()


def _compare_autoattack(net, x, y):
    """AutoAttack in l1 breaks the images that the reference breaks."""
    from pyautoattack import AutoAttack as Reference

    reference = Reference(net, norm="L1", eps=0.8, seed=0, device="cpu")
    reference.attacks_to_run = ["apgd-ce", "apgd-t"]
    found = reference.run_standard_evaluation(x, y, batch_size=12)
    broken = net(found[0] if isinstance(found, tuple) else found).argmax(1) != y
    result = evaluate(net, (x, y), L1Ball(0.8), ["quick"], trust=False)
    assert torch.equal(torch.from_numpy(~result.correct["apgd"]), broken) and 0 < broken.sum() < 12
