"""doubly search."""

import sys
from pathlib import Path

from doubly.checkpoints.load import load_run
from doubly.cli.search import trials_table
from doubly.cli.train_options import parse_train_options
from doubly.config.serialize import from_json, with_changes
from doubly.jobs.search import default_space
from doubly.recipes import recipe
from doubly.rundir import read_json, read_metrics, write_json

SPACE = {
    "epochs": [1],
    "batch_size": [512],
    "model.width": [2],
    "method.attack.steps": [1],
    "validation.attack.steps": [1],
    "optimizer.lr.peak": [0.05, 1e30],  # the second diverges
}
RESULT = {  # as search.json has it
    "space": {"epochs": [1, 2]},
    "trials": [
        {"changes": {"epochs": 1}, "score": 0.2, "holdouts": [{"n": 5, "sa": 0.7, "ra_pgd": 0.2}, None]},
        {"changes": {"epochs": 2}, "score": 0.3, "holdouts": [{"sa": 0.4, "ra_pgd": 0.2}, {"sa": 0.6, "ra_pgd": 0.4}]},
    ],
    "winner": {"epochs": 2},
}


def test_the_trials_are_printed_and_the_winner_can_be_trained(cli, tmp_path, inline):
    write_json(tmp_path / "space.json", SPACE)
    words = ["search", "digits.at", "--space", "space.json", "--trials", "2", "--splits", "1", "--jobs", "1"]
    code, out, err = cli(*words, "--output", "searched", "--tensorboard")
    assert (code, err) == (0, "") and "RA-Tail-30" in out and "digits.at: hold-out, best first" in out
    assert "NaN or infinite" in out and out.count("failed and scores 0") == 1
    assert out.rstrip().endswith("now: doubly train --config searched/winner.json")
    result = read_json(tmp_path / "searched" / "search.json")
    scores = {row["changes"]["optimizer.lr.peak"]: row["score"] for row in result["trials"]}
    assert scores[1e30] == 0 < scores[0.05] <= 1 and result["winner"]["optimizer.lr.peak"] == 0.05
    assert f"{scores[0.05]:.1%}" in out and "failed" in out.splitlines()[-3]
    assert len(list((tmp_path / "searched").glob("trial-*/tensorboard/*"))) == 1  # the other had no complete epoch
    winner = with_changes(recipe("digits.at"), result["winner"])
    assert from_json(read_json(tmp_path / "searched" / "winner.json")) == winner
    assert winner.data.holdout == 0  # retrained on all training images
    assert cli("train", "--config", "searched/winner.json", "--output", "trained")[0] == 0
    assert load_run(tmp_path / "trained") == winner and len(read_metrics(tmp_path / "trained" / "metrics.jsonl")) == 1


def test_what_does_not_fit_is_refused(cli, tmp_path, monkeypatch):
    for name, text in (("list", "[1, 2]"), ("number", '{"epochs": 3}'), ("empty", '{"epochs": []}')):
        (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for words, message in [
        ("digits.at --space list.json", "must map dotted fields to lists of values"),
        ("digits.at --space number.json", "must map dotted fields to lists of values"),
        ("digits.at --space empty.json", "must map dotted fields to lists of values"),
        ("digits.at --space nowhere.json", "nowhere.json does not exist"),
        ("digts.at", "did you mean 'digits.at'?"),
        ("digits.at --trials 0", "trials and splits must be at least 1"),
        ("digits.at --jobs 0", "at least 1 process"),
        ("digits.at --tensorboard", "pip install 'doubly[tensorboard]'"),
    ]:
        code, out, err = cli("search", *words.split())
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1, words
    assert not (tmp_path / "runs").exists()


def test_the_default_space_is_around_the_settings_of_the_recipe(cli, monkeypatch):
    searches = []
    monkeypatch.setattr(
        "doubly.jobs.search.run_searches", lambda plans, jobs, console: searches.extend(plans) or [RESULT]
    )
    assert cli("search", "digits.at", "--trials", 3, "--data-root", "data", "--output", ".")[0] == 0
    (search,) = searches
    assert search.space == default_space(recipe("digits.at")) and (search.trials, search.splits) == (3, 2)
    assert search.base.data.root == str(Path("data").resolve()) and search.callbacks == ()
    for words in [  # what train takes
        "digits.trades --method.beta 3 --epsilon 0.1",
        "digits.at --epochs 7 --lr 0.02 --batch-size 64 --seed 4 --optimizer.clip 2",
        "digits.at --set optimizer=optimizer.adamw --optimizer.lr.peak 1e-3 --method.attack.steps 3",
        "digits.done_pgd --variant literal --method.eta 0.5",
        "digits.at --model nets.mine:build --weights w.pt --mean 0.5 --std 0.5",
        "--data digits --method cfol --validation.every 3",
    ]:
        assert cli("search", *words.split(), "--trials", 1, "--output", ".").code == 0, words
        assert searches[-1].base == parse_train_options(words.split()).run, words
        assert searches[-1].space == default_space(searches[-1].base) and searches[-1].trials == 1, words


def test_metrics_of_several_holdouts_are_averaged():
    table = trials_table(RESULT, "title")
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns == {
        "score": ["30.0%", "20.0%"],
        "SA": ["50.0%", "70.0%"],
        "RA-PGD": ["30.0%", "20.0%"],
        "epochs": ["2", "1"],
    }
