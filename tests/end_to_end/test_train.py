"""train -> stop -> resume -> evaluate -> report -> export, with the files that are promised."""

import json
import re
import signal
import sys

import pytest
import safetensors.torch
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from doubly.checkpoints.load import load_model, load_run
from doubly.config.serialize import to_json
from doubly.rundir import read_json, read_metrics
from doubly.version import __version__

EPOCHS = ["--epochs", 12, "--save-seconds", 0.1]
TINY = [
    *("digits.imbalanced.done_pgd", "--model.width", 2, "--method.attack.steps", 1, "--validation.attack.steps", 1),
    *("--validation.size", 20, "--threads", 1, "--device", "cpu"),
]
NETWORK = """
from torch import nn

def build(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))
"""


def accuracies(value):
    """Yield every accuracy in a part of evaluation.json."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("sa", "ra_pgd", "ra_tail_30", "ra_margin", "ra_margin_tail_30"):
                yield from item if isinstance(item, list) else [item]
            else:
                yield from accuracies(item)


def check_evaluation(path, out):
    evaluation = read_json(path / "evaluation.json")
    promised = {"sa", "ra_pgd", "ra_tail_30", "ra_tail_30_classes", "worst_class", "per_class", "confusion", "n"}
    margin = {"ra_margin", "ra_margin_tail_30", "ra_margin_tail_30_classes", "worst_class_ra_margin"}
    further = {"ra_worst_case", "tail", "intervals", "weights", "examples", "trust", "protocol", "schema", "epoch"}
    assert set(evaluation) == promised | margin | further | {"test_images", "command"} and evaluation["schema"] == 2
    parts = {key: value for key, value in evaluation.items() if key in promised | margin | {"intervals"}}
    values = list(accuracies(parts))
    assert len(values) > 40 and all(0 <= value <= 1 for value in values)
    assert (
        set(evaluation["worst_class"]) - {"tied"} == {"name", "ra_pgd"} and len(evaluation["ra_tail_30_classes"]) == 3
    )
    per_class = evaluation["per_class"]
    assert list(per_class) == [str(k) for k in range(10)]
    assert all(set(row) >= {"n", "sa", "ra_pgd", "ra_pgd_interval"} for row in per_class.values())
    assert sum(row["n"] for row in per_class.values()) == evaluation["n"] == 360
    assert set(evaluation["confusion"]) == {"clean", "pgd", "margin"}
    assert sum(map(sum, evaluation["confusion"]["pgd"])) == 360
    assert evaluation["trust"]["verdict"] in ("fine", "suspicious") and len(evaluation["trust"]["lines"]) == 11
    protocol = evaluation["protocol"]
    assert protocol["attack"]["threat"]["radius"] == 0.15 and protocol["split"] == "test"
    assert protocol.keys() >= {"attack", "seed", "chunk", "checkpoint", "data_sha256"}
    assert f"{100 * evaluation['ra_pgd']:.1f} (" in out and "RA-Tail-30" in out


def check_run_directory(path):
    files = ["config.json", "environment.json", "evaluation.json", "evaluation.npz", "gallery.npz", "metrics.jsonl"]
    assert sorted(file.name for file in path.iterdir() if file.name != ".lock") == ["checkpoints", *files]
    environment = read_json(path / "environment.json")
    assert environment["doubly"] == __version__ and environment["threads"] == 1
    assert environment["packages"]["torch"] == torch.__version__ and "command" in environment
    assert json.loads((path / "config.json").read_text()) == to_json(load_run(path))


def check_refusals(cli, doubly, path):
    """A changed setting is refused by its name, and nothing changes."""
    before = doubly.tensors("whole"), doubly.rows("whole")
    for words, message in [
        (["--epochs", 13], "epochs: 12 -> 13"),
        (["--seed", 1], "seed: 0 -> 1"),
        (["--method.attack.threat.radius", "8/255"], "method.attack.threat.radius: 0.15 -> 0.03137"),
        (["--set", "method.attack.rule=step.adam"], "method.attack.rule.kind: 'step.sign' -> 'step.adam'"),
    ]:
        code, _, err = cli("train", "--output", path, "--resume", *words)
        assert code == 2 and "another configuration" in err and message in err
    code, _, err = cli("export", path, "--output", "net.pt")
    assert code == 2 and "net.pt must end in .safetensors" in err
    assert before == (doubly.tensors("whole"), doubly.rows("whole"))


def test_a_run_that_is_stopped_and_resumed_is_the_same_and_is_evaluated_reported_and_exported(doubly, cli):
    train, path = ["train", doubly.recipe, *doubly.small, *EPOCHS], doubly.folder / "whole"
    code, out, err = cli(*train, "--output", "whole")
    lines = [line for line in out.splitlines() if "radii" not in line]  # of short steps, once for each weak attack
    assert (code, err) == (0, "") and "\x1b" not in out and 1 <= len(out.splitlines()) - len(lines) <= 2
    assert lines[0] == "digits.imbalanced.done_pgd, seed 0, 12 epochs -> whole"
    assert re.fullmatch(r"training on \d+ images; validating on 40 test images, which choose nothing", lines.pop(1))
    assert lines[1].startswith("epoch 10: training loss ") and "RA-Tail-30" in lines[1]
    assert lines[-1] == "trained; now: doubly evaluate whole"
    for number, code, again in [
        (signal.SIGTERM, 143, ["train"]),  # the run directory has the configuration
        (signal.SIGINT, 130, train),
    ]:
        output = number.name
        child = doubly.start(*train, "--output", output)
        doubly.wait_for_step(output, 4, 0, child.is_running)
        assert child.send(number) == code, child.err
        assert "stopped at epoch" in child.out and "add --resume" in child.out and child.err == ""
        assert len(doubly.rows(output)) < 12
        resumed = doubly.run(*again, "--output", output, "--resume")
        assert "continuing at epoch" in resumed.out
        assert doubly.tensors(output) == doubly.tensors("whole") and doubly.rows(output) == doubly.rows("whole")

    code, out, err = cli("evaluate", "whole")
    assert code == 0, err
    check_evaluation(path, out)
    check_run_directory(path)
    check_refusals(cli, doubly, path)
    # What changes no bit may change.
    assert cli("train", "--output", "whole", "--resume", "--save-seconds", 5, "--device", "auto")[0] == 0

    code, out, err = cli("report", "whole", "--output", "page")
    assert code == 0 and "wrote page/report.html" in out
    assert "DONE-PGD" in (doubly.folder / "page" / "report.html").read_text()
    code, out, err = cli("export", "whole", "--output", "plain/net.safetensors")
    assert (code, err) == (0, "") and "wrote plain/net.safetensors" in out
    tensors, expected = safetensors.torch.load_file("plain/net.safetensors"), load_model(path).state_dict()
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_a_saved_configuration_trains_the_same_network(cli, tmp_path):
    for words in (["--seed", 4, "--output", "a"], []):
        assert cli("train", *TINY, "--epochs", 1, *words)[0] == 0
    assert (tmp_path / "runs" / "digits.imbalanced.done_pgd-s0" / "config.json").exists()  # if no output is given
    assert cli("train", "--config", "a/config.json", "--output", "b", "--threads", 1)[0] == 0
    assert read_json(tmp_path / "a" / "config.json") == read_json(tmp_path / "b" / "config.json")
    a, b = (safetensors.torch.load_file(f"{run}/checkpoints/last/model.safetensors") for run in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_network_of_the_user_is_fine_tuned_from_its_weights(cli, tmp_path):
    package = f"nets_{abs(hash(tmp_path))}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "mine.py").write_text(NETWORK)
    initial = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).state_dict()
    torch.save(initial, "initial.pt")
    words = ["train", "digits.at", "--method.attack.steps", 1, "--epochs", 1, "--threads", 1]
    words += ["--model", f"{package}.mine:build", "--weights", "initial.pt"]
    assert cli(*words, "--output", "unchanged", "--optimizer.lr.peak", 0)[0] == 0
    assert cli(*words, "--output", "tuned")[0] == 0
    unchanged, tuned = (
        safetensors.torch.load_file(f"{run}/checkpoints/last/model.safetensors") for run in ("unchanged", "tuned")
    )
    for name, value in initial.items():
        assert torch.equal(unchanged[name], value) and not torch.equal(tuned[name], value)
    (tmp_path / "initial.pt").unlink()
    code, _, err = cli("evaluate", "tuned")
    assert (code, err) == (0, "") and read_json(tmp_path / "tuned" / "evaluation.json")["n"] == 360


def test_tensorboard_gets_the_rows_of_the_metrics(cli, tmp_path, monkeypatch):
    words = ["train", *TINY, "--epochs", 2, "--output", "run", "--tensorboard"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        code, _, err = cli(*words)
        assert code == 2 and "pip install 'doubly[tensorboard]'" in err and not (tmp_path / "run").exists()
    code, out, err = cli(*words)
    assert (code, err) == (0, "") and "epoch 2: training loss" in out
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [row["epoch"] for row in rows] == [0, 1]
    assert [event.value for event in board.Scalars("train/r")] == pytest.approx([row["r"] for row in rows])
    assert [event.step for event in board.Images("per_class")] == [1]
