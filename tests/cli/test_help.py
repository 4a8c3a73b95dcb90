"""The help of the verbs: what fits on a screen, and all of it."""

from doubly.cli.evaluate import EvaluateOptions
from doubly.cli.frontier import FrontierOptions
from doubly.cli.help import flags_of
from doubly.cli.repair import RepairOptions
from doubly.cli.search_options import SearchOptions
from doubly.cli.train_options import HELP, TrainOptions
from doubly.recipes import RECIPES, recipe

RUN_GROUPS = ("what to train", "perturbations", "training", "the method", "network, data and validation", "the run")
OF_A_RUN = "--data --method --model --mean --std --epsilon 0.15 --norm linf --epochs 60 --lr 0.1 --seed --output"


def test_help_is_short_and_in_groups_and_help_all_has_every_flag(cli):
    done = recipe("digits.done_gd")
    for words, options, groups, shown in [
        ("train digits.done_gd", TrainOptions(done), RUN_GROUPS, f"{OF_A_RUN} --resume --config --set --method.cap"),
        ("search digits.done_gd", SearchOptions(done), RUN_GROUPS, f"{OF_A_RUN} --trials --space --method.cap"),
        ("evaluate", EvaluateOptions(), ("what to evaluate", "which images"), "--model --mean --std --epsilon --quick"),
        ("repair", RepairOptions(), ("what to repair", "the fit"), "--model --mean --std --priority --attacks margin"),
        ("frontier", FrontierOptions(), ("networks", "the frontier"), "--epsilon --repair.priority --max-loss 0.005"),
    ]:
        code, out, err = cli(*words.split(), "--help")
        assert (code, err) == (0, "") and len(out.splitlines()) < 80, words
        assert all(f"\n{group}:\n" in out for group in groups), words
        assert all(word in out for word in shown.split()), words
        assert out.endswith("--help-all lists every flag, with its whole text.\n"), words
        code, everything, _ = cli(*words.split(), "--help-all")
        assert code == 0 and "show this help message and exit" in everything, words
        missing = [flag.name for flag in flags_of(options) if f"{flag.name} " not in everything]
        assert not missing and len(flags_of(options)) >= 15, words
    assert "--method.attack.threat.barrier" not in cli("train", "digits.done_gd", "--help").out  # left to --help-all


def test_every_recipe_has_a_short_help_with_the_fields_of_its_method():
    for name, make in RECIPES.items():
        if name.startswith(("digits.", "gtsrb.small.")) and "imbalanced" not in name:
            options = TrainOptions(make())
            text = HELP.text(options)
            own = [flag.name for flag in flags_of(options.run.method, "method") if "attack." not in flag.name]
            assert len(text.splitlines()) < 80 and max(map(len, text.splitlines())) <= 100, name
            assert all(f"{flag} " in text for flag in own), name
