"""All recipes: names, JSON, and the settings on digits."""

import dataclasses
import json
import re
from collections import defaultdict

import pytest

from doubly.bilevel import AdamStep, BarrierStep, FirstThen, GradientStep, SignStep, WithBarrier
from doubly.cli import main
from doubly.config import SGD, Run
from doubly.config.serialize import from_json, to_json, with_change
from doubly.data import DATASETS, Balanced, Digits, StepImbalance
from doubly.errors import UsageError
from doubly.methods import AT, DONE, METHODS
from doubly.recipes import RECIPES, digits, recipe
from doubly.recipes.methods import FAST
from doubly.recipes.paper import SETTINGS
from doubly.schedules import Cyclic
from doubly.threat import LinfBall

DIGITS = [name for name in RECIPES if name.startswith("digits.")]


def method_name(name):
    return name.rpartition(".")[2]


def test_every_recipe_has_its_name_round_trips_through_json_and_differs_from_all_others():
    names = defaultdict(list)
    for name in RECIPES:
        run = recipe(name)
        tree = to_json(run)
        assert run.name == name and recipe(name) == run == from_json(json.loads(json.dumps(tree))), name
        holdout = 0.0 if run.method.validation_interval is None else 0.1
        assert (run.data.holdout, run.seed, run.data.root) == (holdout, 0, None), name  # nothing of this machine
        names[json.dumps({**tree, "name": "", "label": "", "table": ""})].append(name)
    assert [same for same in names.values() if len(same) > 1] == []


def test_the_name_says_dataset_imbalance_and_method():
    kinds = {**{name: kind for name, kind in METHODS.items() if name != "done"}, "n_fgsm": AT, "fast_at": AT}
    for name in RECIPES:
        run, method, dataset = recipe(name), method_name(name), name.partition(".")[0]
        beginnings = [beginning for beginning in kinds if method.startswith(beginning)]
        exact = {method} & kinds.keys() or {max(beginnings, key=len, default="")}
        assert type(run.method) is kinds.get(exact.pop(), DONE), name
        assert type(run.data.source) is DATASETS[dataset], name
        ratio = SETTINGS[dataset].small.ratio if ".small." in name else 0.2
        assert run.data.imbalance == (StepImbalance(ratio) if ".imbalanced." in name else Balanced()), name


def test_fast_methods_have_a_table_and_some_methods_a_label_of_their_own():
    labels = {"standard": "Standard", "fast_at": "Fast-AT", "fast_at_ga": "Fast-AT-GA", "fast_bat": "Fast-BAT"}
    labels |= {"robust_lt": "RobustLT", "group_dro": "Group-DRO"}
    for name in RECIPES:
        run, method = recipe(name), method_name(name)
        assert run.table == ("fast" if method in FAST else "") and run.label == labels.get(method, ""), name


def test_an_unknown_recipe_is_refused_with_a_similar_name():
    with pytest.raises(UsageError, match=r"no recipe 'digits\.donepgd': did you mean 'digits\.done_pgd'"):
        recipe("digits.donepgd")


def test_digits_are_attacked_within_015_in_steps_of_a_quarter():
    rules = {"done_gd": BarrierStep(1.0), "done_adam": AdamStep(0.15 / 4)}
    for name in DIGITS:
        run, method = recipe(name), recipe(name).method.wrapped or recipe(name).method
        pgd = run.validation.attack
        assert run.data.source == Digits(0, 5) and pgd.threat == LinfBall(0.15) and pgd.rule == SignStep(0.15 / 4), name
        assert (pgd.steps, pgd.restarts, pgd.attack_mode) == (20, 1, "eval"), name
        if method.attack is None:
            assert method_name(name) == "standard"
            continue
        assert method.attack.threat == LinfBall(0.15), name
        if run.epochs == 60:
            assert method.attack.steps == 10, name
            assert method.attack.rule == rules.get(method_name(name), SignStep(0.15 / 4)), name


def test_digits_have_the_papers_budget_and_the_settings_that_the_search_chose():
    for name in DIGITS:
        run = recipe(name)
        assert run.epochs == (25 if method_name(name) in digits.FAST else 60) and run.batch_size == 128, name
        chosen = digits.CHOSEN.get(name, {"optimizer.lr.peak": 0.1, "optimizer.weight_decay": 5e-4})
        peak, weight_decay = chosen["optimizer.lr.peak"], chosen["optimizer.weight_decay"]
        assert run.optimizer == SGD(Cyclic(peak, turn=0.4), momentum=0.9, weight_decay=weight_decay), name


def test_the_fast_done_is_one_sign_step_and_one_gradient_step():
    for name in ("digits.done_fast", "digits.imbalanced.done_fast"):
        attack = recipe(name).method.attack
        assert (attack.start, attack.steps) == ("uniform", 2)
        assert attack.rule == FirstThen(SignStep(1.25 * 0.15), GradientStep(4.0))


def test_r_is_10_then_1_from_two_thirds_and_01_from_five_sixths():
    for name in DIGITS:
        run = recipe(name)
        if isinstance(run.method, DONE) and run.epochs == 60:
            steps = -(-1437 // run.batch_size)
            places = [(0, 0), (39, steps - 1), (40, 0), (49, steps - 1), (50, 0), (59, steps - 1)]
            values = [run.method.temperature.at((epoch + step / steps) / 60) for epoch, step in places]
            assert values == [10, 10, 1, 1, 0.1, 0.1] and run.method.eta == 0.9, name


def test_the_papers_literal_rules_are_one_flag_away(monkeypatch, tmp_path):
    runs = []
    monkeypatch.setattr("doubly.training.loop.train_run", lambda run, output, **options: runs.append(run))

    def trained(*words) -> Run:
        assert main(["train", *words, "--output", str(tmp_path / "run")]) == 0
        return runs.pop()

    for name in ("digits.imbalanced.done_pgd", "digits.done_fast"):
        run = trained(name, "--method.cap", "None")
        assert run.method.cap is None and with_change(run, "method.cap", recipe(name).method.cap) == recipe(name)
    literal = trained(name, "--method.cap", "None", "--method.damping", "0", "--method.implicit", "exact").method
    assert (literal.cap, literal.damping, literal.implicit) == (None, 0.0, "exact")
    rule = trained("digits.done_gd", "--method.attack.rule.no-preconditioned").method.attack.rule
    assert rule == BarrierStep(1.0, preconditioned=False)
    svhn = trained("svhn.done_pgd", "--optimizer.lr.peak", "0.2", "--warm-up", "0")
    assert svhn.optimizer.lr == Cyclic(0.2) and svhn.warm_up == 0
    assert trained("cifar10.done_pgd", "--method.eta", "1").method.eta == 1
    for words, expected in [
        (["--set", "method.attack.rule=step.with_barrier"], SignStep()),
        (["--set", "method.attack.rule=step.with_barrier", "--set", "method.attack.rule.rule=step.adam"], AdamStep()),
        (["--set", "method.attack.rule=step.with_barrier", "--method.attack.rule.rule.size", "0.5"], SignStep(0.5)),
    ]:
        assert trained("digits.done_pgd", *words).method.attack.rule == WithBarrier(expected)


def test_the_literal_variant_has_all_of_the_papers_values_at_once(monkeypatch, tmp_path, capsys):
    runs = []
    monkeypatch.setattr("doubly.training.loop.train_run", lambda run, output, **options: runs.append(run))
    monkeypatch.chdir(tmp_path)
    step, spanning = 2 / 255, 5000 / 255
    rules = {
        "done_pgd": WithBarrier(SignStep(step)),
        "done_adam": WithBarrier(AdamStep(step)),
        "done_gd": BarrierStep(1250 / 255, preconditioned=False),
        "done_fast": FirstThen(SignStep(1.25 * 8 / 255), WithBarrier(GradientStep(spanning))),
    }
    for dataset in ("cifar10", "svhn.imbalanced", "digits", "svhn.small"):
        for name, rule in rules.items():
            base = recipe(f"{dataset}.{name}")
            assert main(["train", base.name, "--variant", "literal", "--seed", "3"]) == 0
            run = runs.pop()
            assert (run.name, run.seed) == (
                f"{base.name}_literal",
                3,
            ) and f"runs/{run.name}-s3" in capsys.readouterr().out
            expected = DONE(run.method.attack)  # the defaults are the paper's, but for the damping
            assert run.method == dataclasses.replace(expected, damping=0.0, temperature=base.method.temperature), name
            assert run.method.temperature.values == (10.0, 1.0, 0.1), name
            scale = dataset in ("cifar10", "svhn.imbalanced")
            if scale:
                assert run.method.attack == dataclasses.replace(base.method.attack, rule=rule), run.name
                assert run.optimizer == SGD(Cyclic(0.2)) and run.warm_up == 0, run.name
            changed = {"name": base.name, "method": base.method}
            changed |= {"optimizer": base.optimizer, "warm_up": base.warm_up} if scale else {}
            assert dataclasses.replace(run, **changed, seed=0, label=base.label) == base, run.name
    assert main(["train", "--help"]) == 0 and "--variant literal" in capsys.readouterr().out
    for words, message in [
        (["digits.at", "--variant", "literal"], "digits.at has no literal variant.*done_pgd, done_gd"),
        (["digits.done_chi2", "--variant", "literal"], "digits.done_chi2 has no literal variant"),
        (["digits.done_pgd", "--variant", "litteral"], "no variant 'litteral'.*literal"),
        (["--config", "x.json", "--variant", "literal"], "--variant is of a recipe"),
        (["digits.done_pgd", "--variant"], "--variant needs a value"),
    ]:
        assert main(["train", *words]) == 2
        assert re.search(message, capsys.readouterr().err.replace("\n", " ")), words
