"""CFA: class radii and betas that follow the robust accuracy of the epoch before."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.errors import UsageError
from doubly.methods import AT, CFA, TRADES
from doubly.threat import LinfBall
from doubly.types import TrainStep
from method_problems import flat_gradient
from method_problems import small_network as network
from method_problems import three_classes as samples

ATTACK = PGD(LinfBall(0.1), 3, SignStep(0.05))
COUNTS = torch.tensor([30, 30, 30])
LATE = TrainStep(epoch=2, step=4, progress=0.7, seed=9)


def known(right, images):
    """Return a state at epoch 2 with these sums of the epoch before."""
    previous = torch.tensor([right, images], dtype=torch.float64)
    return {"tally": torch.zeros(2, 3).double(), "previous": previous, "epoch": torch.tensor(2)}


def test_radii_and_betas_by_a_loop_over_samples():
    """Accuracies 0.1, 0.5 and 0.9: radii 0.6, 1 and 1.4 times epsilon, betas 0.3 + 0.1 ... times 2."""
    model, twin, batch = network(), network(), samples(7)
    method = CFA(ATTACK, beta=2.0, beta_offset=0.3)
    result = method.objective(model, batch, known([1, 10, 27], [10, 20, 30]), LATE)
    attack = ATTACK.with_class_factors(torch.tensor([0.6, 1.0, 1.4], dtype=torch.float64))
    delta = attack.maximize_divergence(twin, batch.x, batch.y, LATE.generator("attack"))
    attacked, clean = twin(batch.x + delta), twin(batch.x)
    total = 0.0
    for i, y in enumerate(batch.y.tolist()):
        p, q, b = clean[i].softmax(0), attacked[i].softmax(0), [0.8, 1.6, 2.4][y]
        kl = sum(p[j] * (p[j].log() - q[j].log()) for j in range(3))
        total = total + 3 * (-(1 - b / (1 + b)) * p[y].log() + b / (1 + b) * kl)
    assert result.loss.item() == pytest.approx(total.item() / 7, rel=1e-10)
    assert torch.allclose(flat_gradient(result.loss, model), flat_gradient(total / 7, twin), rtol=1e-8, atol=1e-12)
    assert result.record["smallest_class_radius"].item() == pytest.approx(0.6)
    assert result.record["largest_class_radius"].item() == pytest.approx(1.4)


def test_the_form_at_is_at_with_class_radii():
    model, twin, batch = network(), network(), samples(7)
    result = CFA(ATTACK, "at").objective(model, batch, known([1, 10, 27], [10, 20, 30]), LATE)
    attack = ATTACK.with_class_factors(torch.tensor([0.6, 1.0, 1.4], dtype=torch.float64))
    delta = attack(twin, batch.x, batch.y, LATE.generator("attack"))
    expected = F.cross_entropy(twin(batch.x + delta), batch.y)
    assert torch.allclose(flat_gradient(result.loss, model), flat_gradient(expected, twin), rtol=1e-9, atol=1e-13)


def test_before_start_it_is_at_or_trades():
    state, early = known([1, 10, 27], [10, 20, 30]), LATE._replace(progress=0.049)
    for method, plain in ((CFA(ATTACK, "at"), AT(ATTACK)), (CFA(ATTACK), TRADES(ATTACK))):
        for state_, step in ((state, early), (method.init(COUNTS), LATE)):  # the second: nothing is counted yet
            model, twin = network(), network()
            result = method.objective(model, samples(), state_, step)
            expected = plain.objective(twin, samples(), {}, step)
            assert torch.allclose(result.sample_losses, expected.sample_losses)
            slope = flat_gradient(expected.loss, twin)
            assert torch.allclose(flat_gradient(result.loss, model), slope, rtol=1e-9, atol=1e-13)


def test_accuracies_are_those_of_the_epoch_before_by_hand():
    method, model, batch, state = CFA(ATTACK), network(), samples(), CFA(ATTACK).init(COUNTS)
    right = [0, 0, 0]
    for position in range(4):
        result = method.objective(model, batch, state, TrainStep(0, position, position / 40))
        state = result.state
        for prediction, y in zip(result.logits.argmax(1).tolist(), batch.y.tolist(), strict=True):
            right[y] += prediction == y
        model.zero_grad()
        result.loss.backward()
        torch.optim.SGD(model.parameters(), 0.5).step()
    assert state["tally"].tolist() == [right, [12, 12, 12]] and len(set(right)) > 1
    state = method.objective(model, batch, state, TrainStep(1, 0, 0.1)).state
    factors = method.class_factors(state, 0.1, 0.5)
    assert factors.tolist() == pytest.approx([0.5 + r / 12 for r in right])
    assert state["tally"][1].tolist() == [3, 3, 3]


def test_a_class_that_an_epoch_left_out_keeps_its_accuracy():
    method, batch = CFA(ATTACK), samples()
    state = {**known([1, 10, 27], [10, 20, 30]), "tally": torch.tensor([[2, 0, 8], [8, 0, 8]], dtype=torch.float64)}
    state = method.objective(network(), batch, state, TrainStep(3, 0, 0.8)).state
    assert method.class_factors(state, 0.8, 0.5).tolist() == pytest.approx([0.75, 1.0, 1.5])
    never = {**known([1, 0, 27], [10, 0, 30])}
    assert method.class_factors(never, 0.8, 0.5).tolist() == pytest.approx([0.6, 1, 1.4])


def test_refusals():
    for settings, message in [
        ({"beta": -1.0}, "beta"),
        ({"radius_offset": 0.0}, "radius_offset"),
        ({"radius_offset": float("nan")}, "radius_offset"),
        ({"beta_offset": -0.1}, "beta_offset"),
        ({"start": 1.0}, r"\[0, 1\)"),
        ({"attack": dataclasses.replace(ATTACK, start="zero")}, "gaussian or uniform"),
    ]:
        with pytest.raises(UsageError, match=message):
            CFA(**settings)
    assert CFA(dataclasses.replace(ATTACK, start="zero"), "at").form == "at"
    with pytest.raises(UsageError, match="counts"):
        CFA().init()
