import copy
import warnings

import eagerpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doubly.attacks import FGSM, PGD
from doubly.bilevel import AdamStep, BarrierStep, GradientStep, NormalizedStep, SignStep
from doubly.errors import NonFiniteError, UsageError
from doubly.losses import CrossEntropy, LogitMargin
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
    """Foolbox's attack from a start that is handed in."""

    class FromStart(attack):
        def __init__(self, start, **settings):
            super().__init__(random_start=True, **settings)
            self.start = start

        def get_random_start(self, x0, epsilon):
            return eagerpy.astensor(x0.raw + self.start)

    return FromStart


@pytest.mark.parametrize("start", ["zero", "uniform"])
def test_equals_foolbox_step_by_step_from_the_same_start(model, batch, start):
    x, y = batch
    begin = PGD(LinfBall(EPS), 0, start=start)(model, x, y, seeded())
    assert (begin.abs().max() > 0) == (start == "uniform")
    theirs = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    for steps in range(1, 11):
        attack = from_start(foolbox.attacks.LinfPGD)(begin, steps=steps, abs_stepsize=SIZE)
        expected = attack.run(theirs, x, foolbox.criteria.Misclassification(y), epsilon=EPS) - x
        found = PGD(LinfBall(EPS), steps, SignStep(SIZE), start)(model, x, y, seeded())
        assert torch.allclose(found, expected, atol=1e-5)
        assert torch.allclose(losses(model, x, y, found), losses(model, x, y, expected), atol=1e-5)


@pytest.fixture(scope="module")
def smooth():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.Softplus(), nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8 * 9, 5)).eval()


@pytest.fixture(scope="module")
def inner_batch():
    """Away from the ends of the image range, where foolbox clips and doubly projects onto ball and range at once."""
    generator = torch.Generator().manual_seed(1)
    return 0.4 + 0.2 * torch.rand(12, 1, 8, 8, generator=generator), torch.randint(5, (12,), generator=generator)


@pytest.mark.parametrize("start", ["zero", "uniform"])
def test_an_l2_attack_has_the_losses_of_foolbox_step_by_step(smooth, inner_batch, start):
    x, y = inner_batch
    begin = PGD(L2Ball(0.4), 0, NormalizedStep(0.15), start)(smooth, x, y, seeded())
    assert (begin.abs().max() > 0) == (start == "uniform")
    theirs = foolbox.PyTorchModel(smooth, bounds=(0, 1), device="cpu")
    previous = -torch.inf
    for steps in range(1, 9):
        attack = from_start(foolbox.attacks.L2PGD)(begin, steps=steps, abs_stepsize=0.15)
        expected = attack.run(theirs, x, foolbox.criteria.Misclassification(y), epsilon=0.4) - x
        found = PGD(L2Ball(0.4), steps, NormalizedStep(0.15), start)(smooth, x, y, seeded())
        ours, others = (losses(smooth, x, y, delta) for delta in (found, expected))
        assert torch.allclose(ours, others, atol=1e-5) and torch.allclose(found, expected, atol=1e-5)
        assert ours.mean() > previous - 1e-4
        previous = ours.mean()
    assert torch.allclose(found.flatten(1).norm(dim=1), torch.tensor(0.4), rtol=1e-4)  # the ball was reached


def test_the_uniform_start_fills_the_ball_cut_to_the_image_range(model, batch):
    x, y = batch
    begin = PGD(LinfBall(EPS), 0)(model, x, y, seeded())
    lower, upper = (x - EPS).clamp(0, 1) - x, (x + EPS).clamp(0, 1) - x
    share = (begin - lower) / (upper - lower)
    assert share.min() >= -1e-5 and share.max() <= 1 + 1e-5
    quartiles = share.flatten().quantile(torch.tensor([0.25, 0.5, 0.75]))
    assert torch.allclose(quartiles, torch.tensor([0.25, 0.5, 0.75]), atol=0.06)


@pytest.mark.parametrize("loss", [CrossEntropy(), LogitMargin()])
@pytest.mark.parametrize("rule", [SignStep(SIZE), GradientStep(2.0)])
def test_equals_a_plain_loop(model, batch, rule, loss):
    x, y = batch
    x_adv = x.clone()
    for _ in range(7):
        x_adv.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(model(x_adv), y).sum(), x_adv)
        ascent = SIZE * gradient.sign() if isinstance(rule, SignStep) else 2.0 * gradient
        x_adv = torch.max(torch.min(x_adv.detach() + ascent, x + EPS), x - EPS).clamp(0, 1)
    found = PGD(LinfBall(EPS), 7, rule, "zero", loss=loss)(model, x, y, seeded())
    assert torch.allclose(x + found, x_adv, atol=1e-6)


@pytest.mark.parametrize("rule", [SignStep(SIZE), AdamStep(SIZE), GradientStep(5.0)])
def test_every_rule_raises_the_loss(model, batch, rule):
    x, y = batch
    found = PGD(LinfBall(EPS), 10, rule)(model, x, y, seeded())
    assert (losses(model, x, y, found) > losses(model, x, y, 0 * x) + 0.02).all()


def test_restarts_never_lower_the_loss_of_any_sample(model, batch):
    x, y = batch
    best = None
    for restarts in range(1, 6):
        now = losses(model, x, y, PGD(LinfBall(EPS), 2, SignStep(SIZE), restarts=restarts)(model, x, y, seeded()))
        assert best is None or (now >= best).all()
        best = now
    assert (best > losses(model, x, y, PGD(LinfBall(EPS), 2, SignStep(SIZE))(model, x, y, seeded()))).any()


def test_restarts_keep_the_best_of_what_they_tried(model, batch):
    x, y = batch
    source, tried = seeded(), []
    for _ in range(3):
        tried.append(PGD(LinfBall(EPS), 2, SignStep(SIZE))(model, x, y, source))
    expected = torch.stack([losses(model, x, y, delta) for delta in tried]).amax(0)
    found = PGD(LinfBall(EPS), 2, SignStep(SIZE), restarts=3)(model, x, y, seeded())
    assert torch.allclose(losses(model, x, y, found), expected)


def test_an_l2_attack_stays_in_its_ball(model, batch):
    x, y = batch
    found = PGD(L2Ball(0.5), 10, GradientStep(5.0))(model, x, y, seeded())
    assert (found.flatten(1).norm(dim=1) <= 0.5 * (1 + 1e-6)).all()
    assert (x + found).min() >= 0 and (x + found).max() <= 1
    assert losses(model, x, y, found).mean() > losses(model, x, y, 0 * x).mean()


def test_fgsm_is_one_sign_step_from_the_image(model, batch):
    x, y = batch
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(point), y, reduction="sum"), point)
    expected = (x + EPS * gradient.sign()).clamp(0, 1) - x
    assert torch.allclose(FGSM(LinfBall(EPS))(model, x, y, seeded()), expected, atol=1e-6)


def test_fast_at_s_fgsm_starts_at_random_and_reaches_further(model, batch):
    x, y = batch
    found = FGSM(LinfBall(EPS), reach=1.25, start="uniform")(model, x, y, seeded())
    expected = PGD(LinfBall(EPS), 1, SignStep(1.25 * EPS))(model, x, y, seeded())
    assert torch.equal(found, expected)


def test_double_precision_goes_through(model, batch):
    x, y = batch
    found = PGD(LinfBall(EPS), 3, SignStep(SIZE))(copy.deepcopy(model).double(), x.double(), y, seeded())
    assert found.dtype is torch.float64
    assert torch.allclose(found.float(), PGD(LinfBall(EPS), 3, SignStep(SIZE))(model, x, y, seeded()), atol=1e-5)


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


@pytest.mark.parametrize("bad", [{"steps": -1}, {"restarts": 0}])
def test_bad_numbers_are_refused(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        PGD(**bad)


def test_bad_input_is_refused_with_the_fix(model, batch):
    x, y = batch
    with pytest.raises(UsageError, match="divide uint8"):
        PGD()(model, (255 * x).to(torch.uint8), y, seeded())
    with pytest.raises(UsageError, match="normalization"):
        PGD()(model, 2 * x, y, seeded())
    with pytest.raises(UsageError, match="classes"):
        PGD()(nn.Flatten(0), x, y, seeded())


@pytest.mark.parametrize("label", [-1, -100, 5, 1000])
def test_labels_that_the_model_does_not_know_are_refused_with_the_fix(model, batch, label):
    x, y = batch
    y = y.clone()
    y[3] = label
    with pytest.raises(UsageError, match="5 logits"):
        PGD()(model, x, y, seeded())


def test_a_step_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="barrier of a box"):
        PGD(L2Ball(), rule=BarrierStep())
    with pytest.raises(UsageError, match="must be positive"):
        PGD(rule=SignStep(-0.1))


def test_a_network_whose_gradient_is_broken_is_not_called_robust():
    class Broken(nn.Module):
        def forward(self, x):
            return torch.stack([x.sum((1, 2, 3)), (x - x).sqrt().sum((1, 2, 3))], 1)  # finite, but not its gradient

    with pytest.raises(NonFiniteError, match="gradient"):
        PGD()(Broken(), torch.rand(2, 1, 2, 2), torch.tensor([0, 1]), seeded())
