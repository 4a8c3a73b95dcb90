import json

import pytest

from doubly.bilevel import AdamStep, BarrierStep, SignStep
from doubly.cli import main
from doubly.data import Balanced, Digits, StepImbalance
from doubly.errors import UsageError
from doubly.methods import AT, DONE, Standard
from doubly.recipes import RECIPES, digits, recipe
from doubly.runs import Run
from doubly.runs.saved_config import from_json, to_json
from doubly.schedules import Cyclic
from doubly.threat import LinfBall

each = pytest.mark.parametrize("name", RECIPES)
DIGITS = [name for name in RECIPES if name.startswith("digits.")]
each_digits = pytest.mark.parametrize("name", DIGITS)
each_done = pytest.mark.parametrize("name", [name for name in DIGITS if isinstance(recipe(name).method, DONE)])


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The run that `doubly train …` would train, without the training."""
    seen = []
    monkeypatch.setattr("doubly.runs.loop.train_run", lambda run, output, **options: seen.append(run))

    def call(*words) -> Run:
        assert main(["train", *words, "--output", str(tmp_path / "run")]) == 0
        return seen.pop()

    return call


@each
def test_every_recipe_builds_under_its_own_name(name):
    run = recipe(name)
    assert isinstance(run, Run) and run.name == name
    assert recipe(name) == run  # and always the same
    assert (run.data.holdout, run.seed, run.data.root) == (0.0, 0, None)  # all images, and nothing of this machine


@each
def test_every_recipe_round_trips_through_json(name):
    run = recipe(name)
    assert from_json(json.loads(json.dumps(to_json(run)))) == run


def test_no_two_recipes_are_the_same_run():
    configs = {json.dumps({**to_json(recipe(name)), "name": ""}) for name in RECIPES}
    assert len(configs) == len(RECIPES)


@each
def test_the_name_says_what_it_is(name):
    run = recipe(name)
    method = name.rpartition(".")[2]
    assert type(run.method) is {"standard": Standard, "at": AT}.get(method, DONE)
    assert run.data.imbalance == (StepImbalance(0.2) if ".imbalanced." in name else Balanced())


def test_a_recipe_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"no recipe 'digits\.donepgd': did you mean 'digits\.done_pgd'"):
        recipe("digits.donepgd")


# --- the numbers -----------------------------------------------------------------------------------------------------


@each_digits
def test_digits_are_attacked_within_015_in_steps_of_a_quarter(name):
    run = recipe(name)
    assert run.data.source == Digits(0, 5)
    assert run.probe.attack.threat == LinfBall(0.15) and run.probe.attack.threat.radius == 0.15
    assert (run.probe.attack.steps, run.probe.attack.restarts, run.probe.attack.attack_mode) == (20, 1, "eval")
    assert run.probe.attack.rule == SignStep(0.15 / 4)
    if not isinstance(run.method, Standard):
        assert run.method.attack.threat == LinfBall(0.15) and run.method.attack.steps == 10
        rules = {"done_gd": BarrierStep(1.0), "done_adam": AdamStep(0.15 / 4)}
        assert run.method.attack.rule == rules.get(name.rpartition(".")[2], SignStep(0.15 / 4))


@each_digits
def test_the_budget_is_the_papers_and_the_rest_what_the_search_chose(name):
    run = recipe(name)
    assert (run.epochs, run.batch) == (60, 128)
    assert (run.optimiser.momentum, run.optimiser.clip) == (0.9, None)
    assert isinstance(run.optimiser.lr, Cyclic) and run.optimiser.lr.turn == 0.4
    chosen = digits.CHOSEN.get(name, {"optimiser.lr.peak": 0.1, "optimiser.weight_decay": 5e-4})
    assert run.optimiser.lr.peak == chosen["optimiser.lr.peak"]
    assert run.optimiser.weight_decay == chosen["optimiser.weight_decay"]


@each_done
def test_r_is_10_then_1_from_two_thirds_and_01_from_five_sixths(name):
    run = recipe(name)
    steps = -(-1437 // run.batch)

    def r(epoch, step=0):
        return run.method.temperature.at((epoch + step / steps) / run.epochs)

    assert [r(0), r(39, steps - 1), r(40), r(49, steps - 1), r(50), r(59, steps - 1)] == [10, 10, 1, 1, 0.1, 0.1]
    assert run.method.eta == 0.9


@each_done
def test_the_literal_rule_is_one_flag_away(name, trained):
    cap = recipe(name).method.cap
    assert cap == digits.CHOSEN[name]["method.cap"]
    run = trained(name, "--method.cap", "None")
    assert run.method.cap is None
    assert from_json({**to_json(run), "method": {**to_json(run.method), "cap": cap}}) == recipe(name)  # and only that
    literal = trained(name, "--method.cap", "None", "--method.damping", "0", "--method.implicit", "exact")
    assert (literal.method.cap, literal.method.damping, literal.method.implicit) == (None, 0.0, "exact")


def test_the_explicit_barrier_step_is_one_flag_away(trained):
    rule = trained("digits.done_gd", "--method.attack.rule.no-preconditioned").method.attack.rule
    assert rule == BarrierStep(1.0, preconditioned=False)
