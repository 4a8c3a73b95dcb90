"""The recipes on the paper's datasets: its numbers, and small ones that fit two cores."""

import pytest

from doubly.attacks import PGD
from doubly.bilevel import AdamStep, BarrierStep, FirstThen, SignStep
from doubly.data import CIFAR10, GTSRB, STL10, SVHN, PadCropFlip, Unchanged
from doubly.methods import METHODS, Standard
from doubly.models import NarrowResNet, ResNet18
from doubly.recipes import RECIPES, recipe
from doubly.recipes.paper import SETTINGS
from doubly.schedules import Cyclic
from doubly.threat import LinfBall

PAPER = [name for name in RECIPES if not name.startswith("digits.") and ".small." not in name]
SMALL = [name for name in RECIPES if ".small." in name]
IN_THE_PAPER = ("at", "fat", "gairat", "wmmr", "mail", "done_gd", "done_pgd", "done_adam")
FAST = ("fast_at", "fast_at_ga", "fast_bat", "done_fast")


def attacked(run):
    """The method that attacks, inside a wrapper or not."""
    return getattr(run.method, "method", run.method)


@pytest.mark.parametrize("dataset", ["cifar10", "svhn", "stl10", "gtsrb"])
@pytest.mark.parametrize("middle", ["", "imbalanced.", "small.", "imbalanced.small."])
def test_every_method_of_the_paper_and_of_ours_has_a_recipe(dataset, middle):
    names = {name.rpartition(".")[2] for name in RECIPES if name.rpartition(".")[0] + "." == f"{dataset}.{middle}"}
    assert names >= {*IN_THE_PAPER, *FAST}
    kinds = {type(recipe(f"{dataset}.{middle}{name}").method) for name in names}
    assert kinds == set(METHODS.values())


@pytest.mark.parametrize("method", sorted({name.rpartition(".")[2] for name in PAPER}))
def test_the_papers_numbers(method):
    for name in PAPER:
        if name.rpartition(".")[2] == method:
            as_in_the_paper(name)


def as_in_the_paper(name):
    run, method = recipe(name), name.rpartition(".")[2]
    fast = method in (*FAST, "n_fgsm")
    assert run.model == ResNet18() and run.batch_size == 128 and run.epochs == (25 if fast else 60)
    epsilon, step = (0.031, 0.007) if method == "at_031" else (8 / 255, 2 / 255)
    assert run.validation.attack == PGD(LinfBall(8 / 255), 20, SignStep(2 / 255))  # all are measured alike
    if not isinstance(run.method, Standard):
        assert attacked(run).attack.threat == LinfBall(epsilon)
    if not fast and not isinstance(run.method, Standard):
        rules = {"done_gd": BarrierStep(1250 / 255), "done_adam": AdamStep(2 / 255)}
        assert attacked(run).attack.steps == 10
        assert attacked(run).attack.rule == rules.get(method, SignStep(step))
    if method == "done_fast":  # A11
        assert run.method.attack.rule == FirstThen(SignStep(1.25 * 8 / 255), BarrierStep(5000 / 255))
    # A25: SVHN alone has a lower peak and a warm-up.
    svhn = name.startswith("svhn.")
    assert run.optimizer.lr == Cyclic(0.05 if svhn else 0.2) and run.warm_up == (5 / 60 if svhn else 0)


@pytest.mark.parametrize("name", [name for name in PAPER if name.endswith((".done_pgd", ".done_gd", ".done_adam"))])
def test_done_weighs_as_in_the_paper_but_for_a_bound_on_the_mean_weight(name):
    method = recipe(name).method
    assert (method.cap, method.mean_weight_limit, method.eta, method.divergence) == (None, 10.0, 0.9, "kl")
    assert [method.temperature.at(epoch / 60) for epoch in (0, 39, 40, 49, 50, 59)] == [10, 10, 1, 1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("dataset", "source", "augment"),
    [
        ("cifar10", CIFAR10(), PadCropFlip()),
        ("svhn", SVHN(), Unchanged()),
        ("stl10", STL10(), PadCropFlip()),
        ("gtsrb", GTSRB(32), PadCropFlip(flip=False)),  # a mirrored sign is another sign
    ],
)
def test_each_dataset_is_augmented_as_it_bears(dataset, source, augment):
    for name in RECIPES:
        if name.startswith(f"{dataset}."):
            assert recipe(name).data.augment == augment
            assert recipe(name).data.source == (CIFAR10(2) if ".small." in name and dataset == "cifar10" else source)


@pytest.mark.parametrize("method", sorted({name.rpartition(".")[2] for name in SMALL}))
def test_a_small_recipe_is_its_sibling_with_less_of_everything(method):
    for name in SMALL:
        if name.rpartition(".")[2] == method:
            less_of_everything(name)


def less_of_everything(name):
    run, small = recipe(name), SETTINGS[name.partition(".")[0]].small
    assert run.model == NarrowResNet(small.width, 1) and (run.batch_size, run.warm_up) == (small.batch, small.warm_up)
    fast = name.rpartition(".")[2] in (*FAST, "n_fgsm")
    assert run.epochs == (round(small.epochs * 25 / 60) if fast else small.epochs)
    assert run.data.train_images == small.images
    assert run.validation.attack == PGD(LinfBall(small.epsilon), 20, SignStep(small.epsilon / 4))
    method = attacked(run)
    if not isinstance(method, Standard):
        assert method.attack.threat == LinfBall(small.epsilon)
        assert getattr(method.attack, "steps", 1) <= small.steps
    if isinstance(method, METHODS["done"]):
        assert method.cap is not None and method.mean_weight_limit is None


def test_the_literal_svhn_is_two_flags_away(monkeypatch, tmp_path):
    from doubly.cli import main

    seen = []
    monkeypatch.setattr("doubly.training.loop.train_run", lambda run, output, **options: seen.append(run))
    words = ["--optimizer.lr.peak", "0.2", "--warm-up", "0", "--output", str(tmp_path / "run")]
    assert main(["train", "svhn.done_pgd", *words]) == 0
    assert seen[0].optimizer.lr == Cyclic(0.2) and seen[0].warm_up == 0
