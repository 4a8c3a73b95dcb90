"""Which run the arguments of doubly train stand for. Nothing is trained here."""

from pathlib import Path

import pytest

from doubly.bilevel import AdamStep, BarrierStep, NormalizedStep, SignStep
from doubly.cli.train_options import parse_train_options
from doubly.config import AdamW
from doubly.config.serialize import to_json, with_changes
from doubly.config.threats import describe_threats
from doubly.config.user_code import UserModel
from doubly.data import StepImbalance
from doubly.errors import UsageError
from doubly.recipes import recipe
from doubly.rundir import write_json
from doubly.schedules import Constant, Cyclic, Piecewise
from doubly.threat import L2Ball, LinfBall


def parse(*words):
    return parse_train_options([str(word) for word in words])


def test_every_field_of_a_recipe_has_a_flag():
    options = parse(
        *("digits.at", "--seed", 3, "--batch-size", 256, "--method.attack.threat.radius", "8/255", "--ema-decay", 0.9),
        *("--validation.attack.threat.radius", "0.15"),  # both are said, so they may differ
        *("--optimizer.lr.peak", 0.05, "--data.source.fold", 2, "--optimizer.clip", 2, "--validation.choose", "ra_pgd"),
        *("--threads", 2, "--tensorboard", "--dry-run"),
    )
    changes = {"seed": 3, "batch_size": 256, "method.attack.threat.radius": 8 / 255, "ema_decay": 0.9}
    changes |= {"optimizer.lr.peak": 0.05, "data.source.fold": 2, "optimizer.clip": 2, "validation.choose": "ra_pgd"}
    assert options.run == with_changes(recipe("digits.at"), changes)
    assert (options.threads, options.tensorboard, options.dry_run, options.resume) == (2, True, True, False)


def test_parts_are_replaced_by_set_and_then_have_flags():
    run = parse(
        *("digits.at", "--set", "optimizer=optimizer.adamw", "--optimizer.lr.peak", "1e-3", "--set=validation.size=7"),
        *("--set", "method.attack.rule=step.adam", '--set=data.imbalance={"kind": "imbalance.step", "ratio": "1/5"}'),
    ).run
    assert type(run.optimizer) is AdamW and run.optimizer.lr.peak == 1e-3 and run.validation.size == 7
    assert type(run.method.attack.rule) is AdamStep and run.data.imbalance == StepImbalance(0.2)
    run = parse("digits.at", "--set", "optimizer.lr=schedule.constant", "--optimizer.lr.value", 0.02).run
    assert run.optimizer.lr == Constant(0.02)


def test_one_epsilon_sets_radii_and_steps_of_training_and_validation():
    for words, training, measured in [
        ("digits.at --epsilon 0.3", (LinfBall(0.3), SignStep(0.075)), (LinfBall(0.3), SignStep(0.075))),
        ("digits.at --epsilon=3/10", (LinfBall(0.3), SignStep(0.075)), (LinfBall(0.3), SignStep(0.075))),
        ("digits.awp --epsilon 0.3", (LinfBall(0.3), SignStep(0.075)), (LinfBall(0.3), SignStep(0.075))),
        ("digits.at --norm l2 --epsilon 2", (L2Ball(2), NormalizedStep(0.5)), (L2Ball(2), NormalizedStep(0.5))),
        ("digits.standard --epsilon 0.3", None, (LinfBall(0.3), SignStep(0.075))),
        ("digits.done_gd --epsilon 0.3", (LinfBall(0.3), BarrierStep(2.0)), (LinfBall(0.3), SignStep(0.075))),
        ("digits.n_fgsm --epsilon 0.3", (LinfBall(0.3), None), (LinfBall(0.3), SignStep(0.075))),
        ("digits.at --set method=method.trades --epsilon 0.15", (LinfBall(0.15), None), (LinfBall(0.15), None)),
        (
            "digits.at --epsilon 0.3 --validation.attack.threat.radius 0.2",  # both said
            (LinfBall(0.3), SignStep(0.075)),
            (LinfBall(0.2), SignStep(0.075)),
        ),
        (
            "cifar10.at_031 --seed 1",  # a recipe may have two radii
            (LinfBall(0.031), SignStep(0.007)),
            (LinfBall(8 / 255), SignStep(2 / 255)),
        ),
    ]:
        run = parse(*words.split()).run
        for attack, expected in ((run.method.attack, training), (run.validation.attack, measured)):
            assert (attack is None) == (expected is None), words
            if expected is not None:
                assert attack.threat == expected[0], words
            if expected is not None and expected[1] is not None:
                assert type(attack.rule) is type(expected[1]), words
                assert attack.rule.sizes == pytest.approx(expected[1].sizes), words
    barrier = parse("digits.done_pgd", "--set", "method.attack.threat.barrier=0.5", "--epsilon", "0.3").run
    assert barrier.method.attack.threat == LinfBall(0.3, 0.5)
    assert describe_threats(parse("digits.at").run) == "ℓ∞, ε = 0.15"
    assert "trained at ℓ∞, ε = 0.031, but measured at ℓ∞, ε = 8/255" in describe_threats(parse("cifar10.at_031").run)


def test_one_learning_rate_sets_the_peak_of_any_schedule():
    for words, expected in [
        ("digits.at --lr 0.02", Cyclic(0.02)),
        ("digits.at --set optimizer.lr=schedule.constant --lr 1/50", Constant(0.02)),
        ("digits.at --set optimizer.lr=schedule.piecewise --lr 0.2", Piecewise((0.2, 0.02, 0.002))),
        ("digits.at --set optimizer=optimizer.adam --lr 0.02", Cyclic(0.02)),
    ]:
        assert parse(*words.split()).run.optimizer.lr == expected, words


def test_a_run_comes_from_a_recipe_a_file_or_the_directory_that_is_resumed(tmp_path):
    run = with_changes(recipe("digits.done_pgd"), {"seed": 4, "method.cap": 2.0})
    write_json(tmp_path / "config.json", to_json(run))
    assert parse("--config", tmp_path / "config.json").run == run
    assert parse("--config", tmp_path / "config.json", "--seed", 5).run == with_changes(run, {"seed": 5})
    resumed = parse("--resume", "--output", tmp_path)
    assert (resumed.run, resumed.output_dir, resumed.resume) == (run, tmp_path, True)
    assert parse("digits.at", "--seed", 3).output_dir == Path("runs/digits.at-s3")


def test_data_root_and_a_network_of_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = parse("cifar10.at", "--data-root", "data", "--model", "nets.mine:build", "--weights", "w.pt")
    assert options.run.data.root == str(tmp_path / "data")  # absolute, so that a resumed run finds it
    assert options.run.model == UserModel("nets.mine:build", "w.pt")


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "part.json", to_json(AdamW()))
    write_json(tmp_path / "misspelled.json", {**to_json(recipe("digits.at")), "epoch": 3})
    for words, message in [
        ("", "name a recipe"),
        ("--output x", "name a recipe"),
        ("digits.imbalanced.don_pgd", "did you mean 'digits.imbalanced.done_pgd'"),
        ("imagenet", "there is no recipe 'imagenet': there are"),
        ("digits.at --config x.json", "not several of them"),
        ("--config x.json", "x.json does not exist"),
        ("--config part.json", "does not describe a run"),
        ("--config misspelled.json", "has no field 'epoch': did you mean 'epochs'"),
        ("--resume --output x", "x is no run directory"),
        ("digits.at --config", "--config needs a value"),
        ("digits.at --set methd=method.at", "did you mean 'method'"),
        ("digits.at --set method.atack=attack.pgd", "did you mean 'attack'"),
        ("digits.at --set method.attack.rule=step.adm", "did you mean 'step.adam'"),
        ("digits.at --set method.attack.rule", "PATH=KIND or PATH=JSON"),
        ("digits.at --set method=attack.pgd", "must be a Method"),
        ("digits.at --weights w.pt", "--weights, --mean and --std go with --model"),
        ("digits.at --method.attack.threat.radius 8", "8 gray levels are 8/255"),
        ("digits.at --method.attack.threat.radius 0.3", "ε = 0.3 and validation and evaluation at ℓ∞, ε = 0.15: give"),
        ("digits.awp --method.method.attack.threat.radius 0.3", "give one --epsilon for both"),
        ("digits.at --validation.attack.threat.radius 0.3", "training would attack at ℓ∞, ε = 0.15 and"),
        ("digits.at --set method=method.trades", "training would attack at ℓ∞, ε = 8/255 and"),
        ("digits.at --epsilon 8", "8 gray levels are 8/255"),
        ("digits.at --epsilon eight", "'eight' is not a number"),
        ("digits.at --norm l7", "there is no norm 'l7'"),
        ("digits.done_pgd --norm l2", "use LinfBall, or implicit none"),
        ("digits.done_adam --norm l2", "AdamStep was chosen for LinfBall"),
        ("digits.n_fgsm --norm l2", "N-FGSM is made for LinfBall"),
        ("digits.at --lr fast", "'fast' is not a number"),
        ("digits.at --lr -1", "a learning rate must not be negative"),
        ("digits.at --method.attack.steps -1", "steps >= 0"),
        ("digits.at --epochs 0", "at least 1"),
        ("digits.at --data.source.fold 5", "fold=5 of folds=5"),
        ("digits.done_pgd --method.divergence cvar --method.cap 0.5", "divergence cvar needs a cap"),
    ]:
        with pytest.raises(UsageError, match=message) as error:
            parse(*words.split())
        assert "\n" not in str(error.value)
