"""PGD and FGSM: compared with foolbox and with plain loops."""

import copy
import re
import warnings
from dataclasses import replace

import eagerpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import FGSM, PGD, MarginPGD
from doubly.bilevel import AdamStep, BarrierStep, FirstThen, GradientStep, NormalizedStep, SignStep, StepRule
from doubly.config.serialize import from_json, to_json
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation.api import evaluate
from doubly.losses import CrossEntropy, LogitMargin, TradesLoss
from doubly.recipes import RECIPES
from doubly.threat import L2Ball, LinfBall

with warnings.catch_warnings(action="ignore"):  # foolbox imports a name that scipy has moved
    import foolbox

EPS, SIZE = 0.1, 0.03


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 9, 5)).eval()


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(12, 1, 8, 8, generator=generator)
    x[:, :, :2] = (x[:, :, :2] > 0.5).float()  # pixels at the ends of the range
    return x, torch.randint(5, (12,), generator=generator)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def losses(model, x, y, delta):
    with torch.no_grad():
        return F.cross_entropy(model(x + delta), y, reduction="none")


def from_start(attack):
    """Return foolbox's attack, from a given start."""

    class FromStart(attack):
        def __init__(self, start, **settings):
            super().__init__(random_start=True, **settings)
            self.start = start

        def get_random_start(self, x0, epsilon):
            return eagerpy.astensor(x0.raw + self.start)

    return FromStart


def test_equals_foolbox_step_by_step_from_the_same_start(model, batch):
    x, y = batch
    theirs = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    for start in ("zero", "uniform"):
        begin = PGD(LinfBall(EPS), 0, start=start)(model, x, y, seeded())
        assert (begin.abs().max() > 0) == (start == "uniform")
        for steps in (1, 2, 5, 10):
            attack = from_start(foolbox.attacks.LinfPGD)(begin, steps=steps, abs_stepsize=SIZE)
            expected = attack.run(theirs, x, foolbox.criteria.Misclassification(y), epsilon=EPS) - x
            delta = PGD(LinfBall(EPS), steps, SignStep(SIZE), start)(model, x, y, seeded())
            assert torch.allclose(delta, expected, atol=1e-5)
            assert torch.allclose(losses(model, x, y, delta), losses(model, x, y, expected), atol=1e-5)


@pytest.fixture(scope="module")
def smooth():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.Softplus(), nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8 * 9, 5)).eval()


def test_an_l2_attack_has_the_losses_of_foolbox_step_by_step(smooth):
    # Away from the ends of the image range, where foolbox clips and doubly projects onto ball and range at once.
    generator = torch.Generator().manual_seed(1)
    x, y = 0.4 + 0.2 * torch.rand(12, 1, 8, 8, generator=generator), torch.randint(5, (12,), generator=generator)
    theirs = foolbox.PyTorchModel(smooth, bounds=(0, 1), device="cpu")
    for start in ("zero", "uniform"):
        begin = PGD(L2Ball(0.4), 0, NormalizedStep(0.15), start)(smooth, x, y, seeded())
        assert (begin.abs().max() > 0) == (start == "uniform")
        previous = -torch.inf
        for steps in (1, 2, 4, 8):
            attack = from_start(foolbox.attacks.L2PGD)(begin, steps=steps, abs_stepsize=0.15)
            expected = attack.run(theirs, x, foolbox.criteria.Misclassification(y), epsilon=0.4) - x
            delta = PGD(L2Ball(0.4), steps, NormalizedStep(0.15), start)(smooth, x, y, seeded())
            ours, others = (losses(smooth, x, y, d) for d in (delta, expected))
            assert torch.allclose(ours, others, atol=1e-5) and torch.allclose(delta, expected, atol=1e-5)
            assert ours.mean() > previous - 1e-4
            previous = ours.mean()
        assert torch.allclose(delta.flatten(1).norm(dim=1), torch.tensor(0.4), rtol=1e-4)  # the ball was reached


def test_the_uniform_start_fills_the_ball_cut_to_the_image_range(model, batch):
    x, y = batch
    begin = PGD(LinfBall(EPS), 0)(model, x, y, seeded())
    lower, upper = (x - EPS).clamp(0, 1) - x, (x + EPS).clamp(0, 1) - x
    share = (begin - lower) / (upper - lower)
    assert share.min() >= -1e-5 and share.max() <= 1 + 1e-5
    quartiles = share.flatten().quantile(torch.tensor([0.25, 0.5, 0.75]))
    assert torch.allclose(quartiles, torch.tensor([0.25, 0.5, 0.75]), atol=0.06)


def test_the_gaussian_start_has_a_standard_deviation_of_a_thousandth(model, batch):
    x, y = torch.full((12, 1, 8, 8), 0.5), batch[1]
    begin = PGD(LinfBall(EPS), 0, start="gaussian")(model, x, y, seeded())
    assert begin.std().item() == pytest.approx(1e-3, rel=0.1) and abs(begin.mean()) < 1e-4


def test_equals_a_plain_loop(model, batch):
    x, y = batch
    for loss in (CrossEntropy(), LogitMargin()):
        for rule in (SignStep(SIZE), GradientStep(2.0)):
            attacked = x.clone()
            for _ in range(7):
                attacked.requires_grad_()
                (gradient,) = torch.autograd.grad(loss(model(attacked), y).sum(), attacked)
                ascent = SIZE * gradient.sign() if isinstance(rule, SignStep) else 2.0 * gradient
                attacked = torch.max(torch.min(attacked.detach() + ascent, x + EPS), x - EPS).clamp(0, 1)
            delta = PGD(LinfBall(EPS), 7, rule, "zero", loss=loss)(model, x, y, seeded())
            assert torch.allclose(x + delta, attacked, atol=1e-6)
    assert torch.equal(MarginPGD(LinfBall(EPS), 7, rule, "zero")(model, x, y, seeded()), delta)


def test_every_rule_raises_the_loss(model, batch):
    x, y = batch
    for rule in (SignStep(SIZE), AdamStep(SIZE), GradientStep(5.0)):
        delta = PGD(LinfBall(EPS), 10, rule)(model, x, y, seeded())
        assert (losses(model, x, y, delta) > losses(model, x, y, 0 * x) + 0.02).all()


def test_restarts_keep_the_highest_loss_of_each_sample(model, batch):
    x, y = batch
    source, attempts = seeded(), []
    attack = PGD(LinfBall(EPS), 2, SignStep(SIZE))
    for restarts in range(1, 5):
        attempts.append(losses(model, x, y, attack(model, x, y, source)))
        delta = PGD(LinfBall(EPS), 2, SignStep(SIZE), restarts=restarts)(model, x, y, seeded())
        assert torch.allclose(losses(model, x, y, delta), torch.stack(attempts).amax(0))
    assert (torch.stack(attempts).argmax(0) > 0).any()


def test_fgsm_is_one_step_from_the_image_or_a_random_start(model, batch):
    x, y = batch
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(point), y, reduction="sum"), point)
    expected = (x + EPS * gradient.sign()).clamp(0, 1) - x
    assert torch.allclose(FGSM(LinfBall(EPS))(model, x, y, seeded()), expected, atol=1e-6)
    fast_at = FGSM(LinfBall(EPS), reach=1.25, start="uniform")(model, x, y, seeded())
    assert torch.equal(fast_at, PGD(LinfBall(EPS), 1, SignStep(1.25 * EPS))(model, x, y, seeded()))
    l2 = FGSM(L2Ball(0.4))(model, x, y, seeded())
    assert torch.equal(l2, PGD(L2Ball(0.4), 1, NormalizedStep(0.4), "zero")(model, x, y, seeded()))


def test_double_precision_goes_through(model, batch):
    x, y = batch
    delta = PGD(LinfBall(EPS), 3, SignStep(SIZE))(copy.deepcopy(model).double(), x.double(), y, seeded())
    assert delta.dtype is torch.float64
    assert torch.allclose(delta.float(), PGD(LinfBall(EPS), 3, SignStep(SIZE))(model, x, y, seeded()), atol=1e-5)


def test_batch_norm_in_train_mode_uses_the_batch():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3)).train()
    net[1].running_mean.fill_(5.0)
    x, y = torch.rand(6, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    evaluation, training = (
        PGD(LinfBall(EPS), 1, GradientStep(1.0), "zero", attack_mode=mode)(net, x, y, seeded())
        for mode in ("eval", "train")
    )
    point = x.clone().requires_grad_()
    copied = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    copied.load_state_dict({k: v for k, v in net.state_dict().items() if "running" not in k and "num_" not in k})
    (gradient,) = torch.autograd.grad(F.cross_entropy(copied(point), y, reduction="sum"), point)
    assert torch.allclose(training, (x + gradient.clamp(-EPS, EPS)).clamp(0, 1) - x, atol=1e-6)
    assert not torch.allclose(training, evaluation, atol=1e-3)


def test_every_attack_can_be_scaled():
    assert PGD(L2Ball(1.0), rule=SignStep(0.1)).scaled(0.5) == PGD(L2Ball(0.5), rule=SignStep(0.05))
    assert FGSM(LinfBall(0.2)).scaled(0.5) == FGSM(LinfBall(0.1))
    rule = FirstThen(SignStep(0.1), GradientStep(4.0))
    assert PGD(LinfBall(0.2), rule=rule).scaled(0.5).rule == FirstThen(SignStep(0.05), GradientStep(2.0))
    with pytest.raises(UsageError, match="Sizeless has no size, so its steps cannot be scaled"):
        PGD(rule=Sizeless()).scaled(0.5)


class Sizeless(StepRule):
    """A step rule without a step size."""


def test_refused_settings():
    for settings, message in [
        ({"steps": -1}, "steps=-1"),
        ({"restarts": 0}, "restarts=0"),
        ({"threat": L2Ball(), "rule": BarrierStep()}, "barrier of a box"),
        ({"threat": L2Ball(), "rule": FirstThen(SignStep(), BarrierStep())}, "barrier of a box"),
        ({"rule": SignStep(-0.1)}, "must be positive"),
        ({"rule": FirstThen(SignStep(0.1), GradientStep(0.0))}, "must be positive"),
        ({"loss": TradesLoss()}, "an attack knows one set of logits"),
    ]:
        with pytest.raises(UsageError, match=message):
            PGD(**settings)


def test_refused_images_labels_and_models(model, batch):
    x, y = batch
    cases = [
        (model, (255 * x).to(torch.uint8), y, "divide uint8"),
        (model, 2 * x, y, "normalization"),
        (nn.Flatten(0), x, y, "classes"),
        *((model, x, y.clone().index_fill(0, torch.tensor(3), label), "5 logits") for label in (-1, -100, 5, 1000)),
    ]
    for network, images, labels, message in cases:
        with pytest.raises(UsageError, match=message):
            PGD()(network, images, labels, seeded())


def test_a_network_whose_gradient_or_logits_are_not_finite_is_not_called_robust():
    class Broken(nn.Module):
        def forward(self, x):
            return torch.stack([x.sum((1, 2, 3)), (x - x).sqrt().sum((1, 2, 3))], 1)  # finite, but not its gradient

    class NotANumber(nn.Module):
        def forward(self, x):
            return x.flatten(1) * torch.nan

    x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    with pytest.raises(NonFiniteError, match="gradient"):
        PGD()(Broken(), x, y, seeded())
    with pytest.raises(NonFiniteError, match="logits"):
        PGD()(NotANumber(), x, y, seeded())


def test_class_factors_scale_radius_and_step_of_each_class(smooth, batch):
    x, y = batch
    factors = torch.tensor([1.0, 0.5, 1.5, 0.25, 2.0])
    value = lambda logits: F.cross_entropy(logits, y, reduction="none")  # noqa: E731
    for attack in (
        PGD(LinfBall(EPS), 4, SignStep(SIZE)),
        PGD(LinfBall(EPS), 3, SignStep(SIZE), "gaussian", restarts=2),
        PGD(L2Ball(0.4), 4, NormalizedStep(0.15), "zero"),
        MarginPGD(LinfBall(EPS), 4, AdamStep(SIZE)),
    ):
        delta = attack.with_class_factors(factors)(smooth, x, y, seeded())
        for label, factor in enumerate(factors.tolist()):
            if attack.start == "gaussian":  # the noise of the start does not follow the radius
                continue
            expected = attack.scaled(factor)(smooth, x, y, seeded())
            assert torch.allclose(delta[y == label], expected[y == label], atol=1e-5)
        assert (attack.threat.length(delta) <= attack.threat.radius * factors[y] * (1 + 1e-5)).all()
        assert (x + delta).min() > -1e-6 and (x + delta).max() < 1 + 1e-6
    attack = PGD(LinfBall(EPS), 4, SignStep(SIZE)).with_class_factors(factors)
    active = attack.maximize(smooth, x, y, seeded(), value, lambda: torch.ones(len(x), dtype=torch.bool))
    assert torch.allclose(active, attack(smooth, x, y, seeded()), atol=1e-6)
    box = attack.box(x, y)
    assert torch.equal(
        attack.scaled(0.5).box(x, y).upper, torch.minimum(1 - x, EPS / 2 * factors[y][:, None, None, None])
    )
    assert torch.equal(box.lower, torch.maximum(-x, -EPS * factors[y][:, None, None, None])) and box.strength > 0
    with pytest.raises(UsageError, match="FGSM has one radius for all classes: use PGD"):
        FGSM(LinfBall(EPS)).with_class_factors(factors)


def test_the_default_step_follows_radius_norm_and_steps():
    for attack, rule in [
        (PGD(), SignStep(2 / 255)),
        (PGD(LinfBall(0.3)), SignStep(0.3 * 0.25)),
        (PGD(LinfBall(0.3), 20), SignStep(0.3 * 0.125)),
        (PGD(L2Ball(1.0)), NormalizedStep(0.25)),
        (MarginPGD(L2Ball(0.5), 5), NormalizedStep(0.25)),
        (PGD(LinfBall(0.3), rule=SignStep(0.01)), SignStep(0.01)),
        (from_json(to_json(PGD(LinfBall(0.3)))), SignStep(0.3 * 0.25)),  # config.json names the step
        (from_json({"kind": "attack.pgd", "steps": 5}), SignStep(4 / 255)),
        (replace(PGD(LinfBall(0.3)), threat=LinfBall(0.1)), SignStep(0.1 * 0.25)),
        (replace(MarginPGD(LinfBall(0.3), 5), threat=L2Ball(1.0)), NormalizedStep(0.5)),
        (replace(replace(PGD(LinfBall(0.3)), start="zero"), threat=LinfBall(0.1)), SignStep(0.1 * 0.25)),
        (replace(PGD(LinfBall(0.3), rule=SignStep(0.01)), threat=LinfBall(0.1)), SignStep(0.01)),  # it was given
        (replace(PGD(LinfBall(0.3)), threat=LinfBall(0.1), rule=SignStep(0.02)), SignStep(0.02)),
        (replace(PGD(LinfBall(0.3)), steps=50), SignStep(0.3 * 0.25)),  # more of the same steps
    ]:
        assert attack.rule == rule


def test_steps_that_cannot_cross_the_ball_are_mentioned_with_the_remedy(model, batch):
    short = PGD(LinfBall(0.3), rule=SignStep(2 / 255))
    assert short.weakness is not None and re.search("at most 0.26 radii, .* takes 2, .* leave rule out", short.weakness)
    for attack, weak in [
        (PGD(LinfBall(0.3), 10, SignStep(0.05)), True),  # 1.7 radii from anywhere in the ball
        (PGD(LinfBall(0.3), 10, SignStep(0.05), "zero"), False),  # from its center one is enough
        (PGD(L2Ball(1.0), 10, NormalizedStep(0.1)), True),
        (PGD(LinfBall(0.3), 10, AdamStep(0.01)), True),
        (PGD(LinfBall(0.3), 10, GradientStep(0.01)), False),  # its length is not its size
        (PGD(LinfBall(0.3), 1, SignStep(1.25 * 0.3)), False),  # Fast-AT's step
        (PGD(LinfBall(0.3), 0), True),
        *((make().method.attack, False) for make in RECIPES.values()),
        *((make().validation.attack, False) for make in RECIPES.values()),
    ]:
        assert attack is None or bool(attack.weakness) == weak, attack
    with pytest.warns(UserWarning, match="leave rule out"):
        evaluate(model, batch, attacks=[short], trust=False)
    with pytest.warns(UserWarning, match="PGD with 0 steps only adds noise"):
        evaluate(model, batch, attacks=[PGD(LinfBall(0.3), 0)], trust=False)
