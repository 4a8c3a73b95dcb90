"""doubly search."""

from rich.console import Console

from doubly.checkpoints.load import load_run
from doubly.cli import main
from doubly.config.serialize import from_json, with_changes
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


def test_the_trials_are_printed_and_the_winner_can_be_trained(tmp_path, monkeypatch, capfd, inline):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("doubly.cli.OUT", Console(width=200))  # room for one line per trial
    write_json(tmp_path / "space.json", SPACE)
    words = ["search", "digits.at", "--space", "space.json", "--trials", "2", "--splits", "1", "--jobs", "1"]
    assert main([*words, "--output", "searched"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and "RA-Tail-30" in out and "digits.at: hold-out, best first" in out
    assert "NaN or infinite" in out and out.count("failed and scores 0") == 1
    assert out.rstrip().endswith("now: doubly train --config searched/winner.json")
    result = read_json(tmp_path / "searched" / "search.json")
    scores = {row["changes"]["optimizer.lr.peak"]: row["score"] for row in result["trials"]}
    assert scores[1e30] == 0 < scores[0.05] <= 1 and result["winner"]["optimizer.lr.peak"] == 0.05
    assert f"{100 * scores[0.05]:.1f} %" in out
    winner = with_changes(recipe("digits.at"), result["winner"])
    assert from_json(read_json(tmp_path / "searched" / "winner.json")) == winner
    assert winner.data.holdout == 0  # retrained on all training images
    assert main(["train", "--config", "searched/winner.json", "--output", "trained"]) == 0
    assert load_run(tmp_path / "trained") == winner and len(read_metrics(tmp_path / "trained" / "metrics.jsonl")) == 1


def test_a_space_of_another_form_is_refused(tmp_path, capfd):
    for text in ("[1, 2]", '{"epochs": 3}', '{"epochs": []}'):
        (tmp_path / "space.json").write_text(text)
        assert main(["search", "digits.at", "--space", str(tmp_path / "space.json"), "--output", str(tmp_path)]) == 2
        assert "must map dotted fields to lists of values" in capfd.readouterr().err
