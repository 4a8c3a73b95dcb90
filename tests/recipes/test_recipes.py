import json

import pytest

from doubly.bilevel import AdamStep, BarrierStep, FirstThen, SignStep
from doubly.cli import main
from doubly.config import Run
from doubly.config.serialize import from_json, to_json
from doubly.data import DATASETS, Balanced, Digits, StepImbalance
from doubly.errors import UsageError
from doubly.methods import AT, DONE, METHODS, Standard
from doubly.recipes import RECIPES, digits, recipe
from doubly.recipes.methods import FAST as FAST_NAMES
from doubly.recipes.paper import SETTINGS
from doubly.schedules import Cyclic
from doubly.threat import LinfBall

FAMILIES = sorted({name.rpartition(".")[0] for name in RECIPES})  # a test per recipe would be two thousand
each_family = pytest.mark.parametrize("family", FAMILIES)
DIGITS = [name for name in RECIPES if name.startswith("digits.")]
each_digits = pytest.mark.parametrize("name", DIGITS)
DONES = [name for name in DIGITS if isinstance(recipe(name).method, DONE)]
SLOW_DONES = [name for name in DONES if recipe(name).epochs == 60]
CAPPED = [name for name in DONES if recipe(name).method.divergence == "kl"]
KINDS = {
    "at": AT,
    "standard": Standard,
    "n_fgsm": AT,
    **{name: kind for name, kind in METHODS.items() if name != "done"},
}


def members(family):
    return [name for name in RECIPES if name.rpartition(".")[0] == family]


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The run that `doubly train …` would train, without the training."""
    seen = []
    monkeypatch.setattr("doubly.training.loop.train_run", lambda run, output, **options: seen.append(run))

    def call(*words) -> Run:
        assert main(["train", *words, "--output", str(tmp_path / "run")]) == 0
        return seen.pop()

    return call


@each_family
def test_every_recipe_builds_under_its_own_name(family):
    for name in members(family):
        run = recipe(name)
        assert isinstance(run, Run) and run.name == name
        assert recipe(name) == run  # and always the same
        assert (run.data.holdout, run.seed, run.data.root) == (0.0, 0, None)  # all images, nothing of this machine


@each_family
def test_every_recipe_round_trips_through_json(family):
    for name in members(family):
        run = recipe(name)
        assert from_json(json.loads(json.dumps(to_json(run)))) == run


def test_no_two_recipes_are_the_same_run():
    configs = {json.dumps({**to_json(recipe(name)), "name": "", "label": "", "table": ""}) for name in RECIPES}
    assert len(configs) == len(RECIPES)


@each_family
def test_the_name_says_what_it_is(family):
    for name in members(family):
        _named(name)


def _named(name):
    run = recipe(name)
    method = name.rpartition(".")[2]
    kind = next((KINDS[known] for known in sorted(KINDS, key=len, reverse=True) if method.startswith(known)), DONE)
    kind = AT if method == "fast_at" else kind
    assert type(run.method) is kind
    dataset = name.partition(".")[0]
    assert type(run.data.source) is DATASETS[dataset]
    ratio = SETTINGS[dataset].small.ratio if ".small." in name else 0.2
    assert run.data.imbalance == (StepImbalance(ratio) if ".imbalanced." in name else Balanced())


def test_a_recipe_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"no recipe 'digits\.donepgd': did you mean 'digits\.done_pgd'"):
        recipe("digits.donepgd")


# --- the numbers -----------------------------------------------------------------------------------------------------


@each_digits
def test_digits_are_attacked_within_015_in_steps_of_a_quarter(name):
    run = recipe(name)
    assert run.data.source == Digits(0, 5)
    assert run.validation.attack.threat == LinfBall(0.15) and run.validation.attack.threat.radius == 0.15
    assert (run.validation.attack.steps, run.validation.attack.restarts, run.validation.attack.attack_mode) == (
        20,
        1,
        "eval",
    )
    assert run.validation.attack.rule == SignStep(0.15 / 4)
    method = getattr(run.method, "method", run.method)
    if not isinstance(method, Standard):
        assert method.attack.threat == LinfBall(0.15)
    if hasattr(method, "attack") and run.epochs == 60:
        rules = {"done_gd": BarrierStep(1.0), "done_adam": AdamStep(0.15 / 4)}
        assert method.attack.steps == 10
        assert method.attack.rule == rules.get(name.rpartition(".")[2], SignStep(0.15 / 4))


@pytest.mark.parametrize("name", [name for name in DIGITS if recipe(name).epochs == 25])
def test_the_fast_setting_is_25_epochs_of_one_or_two_steps(name):
    attack = recipe(name).method.attack
    assert getattr(attack, "steps", 1) <= 2
    if name.endswith("done_fast"):  # A11: uniform start, one sign step of 1.25 epsilon, one gradient step
        assert (attack.start, attack.steps) == ("uniform", 2)
        assert attack.rule == FirstThen(SignStep(1.25 * 0.15), BarrierStep(4.0))


@each_digits
def test_the_budget_is_the_papers_and_the_rest_what_the_search_chose(name):
    run = recipe(name)
    assert run.epochs == (25 if name.rpartition(".")[2] in digits.FAST else 60) and run.batch_size == 128
    assert (run.optimizer.momentum, run.optimizer.clip) == (0.9, None)
    assert isinstance(run.optimizer.lr, Cyclic) and run.optimizer.lr.turn == 0.4
    chosen = digits.CHOSEN.get(name, {"optimizer.lr.peak": 0.1, "optimizer.weight_decay": 5e-4})
    assert run.optimizer.lr.peak == chosen["optimizer.lr.peak"]
    assert run.optimizer.weight_decay == chosen["optimizer.weight_decay"]


@pytest.mark.parametrize("name", SLOW_DONES)
def test_r_is_10_then_1_from_two_thirds_and_01_from_five_sixths(name):
    run = recipe(name)
    steps = -(-1437 // run.batch_size)

    def r(epoch, step=0):
        return run.method.temperature.at((epoch + step / steps) / run.epochs)

    assert [r(0), r(39, steps - 1), r(40), r(49, steps - 1), r(50), r(59, steps - 1)] == [10, 10, 1, 1, 0.1, 0.1]
    assert run.method.eta == 0.9


@pytest.mark.parametrize("name", CAPPED)
def test_the_literal_rule_is_one_flag_away(name, trained):
    cap = recipe(name).method.cap
    assert cap == digits.CHOSEN.get(name, {}).get("method.cap", 5.0)
    run = trained(name, "--method.cap", "None")
    assert run.method.cap is None
    assert from_json({**to_json(run), "method": {**to_json(run.method), "cap": cap}}) == recipe(name)  # and only that
    literal = trained(name, "--method.cap", "None", "--method.damping", "0", "--method.implicit", "exact")
    assert (literal.method.cap, literal.method.damping, literal.method.implicit) == (None, 0.0, "exact")


def test_the_explicit_barrier_step_is_one_flag_away(trained):
    rule = trained("digits.done_gd", "--method.attack.rule.no-preconditioned").method.attack.rule
    assert rule == BarrierStep(1.0, preconditioned=False)


def test_fast_methods_have_a_table_and_some_methods_a_label_of_their_own():
    for family in FAMILIES:
        runs = {name.rpartition(".")[2]: recipe(name) for name in members(family)}
        assert {method for method, run in runs.items() if run.table == "fast"} == set(FAST_NAMES)
        assert {method: run.label for method, run in runs.items() if run.label} == {
            "standard": "Standard",
            "fast_at": "Fast-AT",
            "fast_at_ga": "Fast-AT-GA",
            "fast_bat": "Fast-BAT",
        }
