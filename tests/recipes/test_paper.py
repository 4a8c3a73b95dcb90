"""The recipes on the paper's datasets: its settings, and small ones for two cores."""

from doubly.attacks import PGD
from doubly.bilevel import AdamStep, BarrierStep, FirstThen, GradientStep, SignStep
from doubly.data import CIFAR10, GTSRB, STL10, SVHN, PadCropFlip, Unchanged
from doubly.methods import DONE, METHODS
from doubly.models import NarrowResNet, ResNet18
from doubly.recipes import RECIPES, recipe
from doubly.recipes.paper import SETTINGS
from doubly.schedules import Cyclic
from doubly.threat import LinfBall

PAPER = [name for name in RECIPES if not name.startswith("digits.") and ".small." not in name]
SMALL = [name for name in RECIPES if ".small." in name]
IN_THE_PAPER = ("at", "fat", "gairat", "wmmr", "mail", "done_gd", "done_pgd", "done_adam")
FAST = ("fast_at", "fast_at_ga", "fast_bat", "n_fgsm", "done_fast")
DATASETS = {
    "cifar10": (CIFAR10(), PadCropFlip()),
    "svhn": (SVHN(), Unchanged()),
    "stl10": (STL10(), PadCropFlip()),
    "gtsrb": (GTSRB(32), PadCropFlip(flip=False)),  # a mirrored sign is another sign
}


def split(name):
    """Return the run, the method inside a wrapper if there is one, and the name of the method."""
    run = recipe(name)
    return run, run.method.wrapped or run.method, name.rpartition(".")[2]


def test_every_method_has_a_recipe_on_every_dataset():
    for dataset in DATASETS:
        for middle in ("", "imbalanced.", "small.", "imbalanced.small."):
            prefix = f"{dataset}.{middle}"
            names = {name.removeprefix(prefix) for name in RECIPES if name.rpartition(".")[0] + "." == prefix}
            assert names >= {*IN_THE_PAPER, *FAST}, prefix
            assert {type(recipe(f"{prefix}{name}").method) for name in names} == set(METHODS.values()), prefix


def test_large_recipes_have_the_papers_settings():
    rules = {"done_gd": BarrierStep(1250 / 255), "done_adam": AdamStep(2 / 255)}
    for name in PAPER:
        run, method, label = split(name)
        assert run.model == ResNet18() and run.batch_size == 128 and run.epochs == (25 if label in FAST else 60), name
        assert run.validation.attack == PGD(LinfBall(8 / 255), 20, SignStep(2 / 255)), name  # the same for all
        svhn = name.startswith("svhn.")  # which alone has a lower peak and a warm-up
        assert run.optimizer.lr == Cyclic(0.05 if svhn else 0.2) and run.warm_up == (5 / 60 if svhn else 0), name
        if method.attack is None:
            continue
        epsilon, step = (0.031, 0.007) if label == "at_031" else (8 / 255, 2 / 255)
        assert method.attack.threat == LinfBall(epsilon), name
        if label not in FAST:
            assert method.attack.steps == 10 and method.attack.rule == rules.get(label, SignStep(step)), name
        if label == "done_fast":
            assert method.attack.rule == FirstThen(SignStep(1.25 * 8 / 255), GradientStep(5000 / 255)), name


def test_done_has_the_papers_weights_with_a_bound_on_their_mean():
    for name in PAPER:
        _, method, label = split(name)
        if label in ("done_pgd", "done_gd", "done_adam"):
            assert (method.cap, method.mean_weight_limit, method.eta, method.divergence) == (None, 10.0, 0.9, "kl"), (
                name
            )
            values = [method.temperature.at(epoch / 60) for epoch in (0, 39, 40, 49, 50, 59)]
            assert values == [10, 10, 1, 1, 0.1, 0.1], name


def test_each_dataset_has_its_source_and_augmentation():
    for name in (*PAPER, *SMALL):
        data, dataset = recipe(name).data, name.partition(".")[0]
        source, augment = DATASETS[dataset]
        assert data.augment == augment, name
        assert data.source == (CIFAR10(2) if ".small." in name and dataset == "cifar10" else source), name


def test_small_recipes_have_less_of_everything():
    for name in SMALL:
        run, method, label = split(name)
        small = SETTINGS[name.partition(".")[0]].small
        assert run.model == NarrowResNet(small.width, 1) and run.data.train_images == small.images, name
        assert (run.batch_size, run.warm_up) == (small.batch, small.warm_up), name
        assert run.epochs == (round(small.epochs * 25 / 60) if label in FAST else small.epochs), name
        assert run.validation.attack == PGD(LinfBall(small.epsilon), 20, SignStep(small.epsilon / 4)), name
        if method.attack is not None:
            assert method.attack.threat == LinfBall(small.epsilon), name
        if isinstance(method.attack, PGD):
            assert method.attack.steps <= small.steps, name
        if isinstance(method, DONE):
            assert method.cap is not None and method.mean_weight_limit is None, name
