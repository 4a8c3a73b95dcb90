"""From a trained run to a repaired one and its frontier, in process, on imbalanced digits."""

import pytest
import torch

from doubly.checkpoints import load_model
from doubly.evaluation.result import EvalResult
from doubly.rundir import read_json

TRAIN = (
    "--epochs 12 --model.width 8 --method.attack.steps 2 --data.holdout 0.5 --data.driver-share 0.9 "
    "--device cpu --threads 1 --validation.every 99 --method.attack.threat.radius 0.05 "
    "--validation.attack.threat.radius 0.05 "
    "--validation.attack.rule.size 0.02"
)
SMALL = "--epochs 1 --model.width 4 --method.attack.steps 1 --validation.attack.steps 1 --device cpu"
REPAIR = ("--device", "cpu", "--fit-share", "0.7", "--attack-steps", "3")


@pytest.fixture
def trained(cli, tmp_path):
    code, _, err = cli("train", "digits.imbalanced.at", *TRAIN.split(), "--output", "runs/at")
    assert code == 0, err
    return tmp_path / "runs" / "at"


def test_a_repaired_run_is_evaluated_compared_and_reported(cli, trained, tmp_path):
    code, out, err = cli("repair", trained, *REPAIR)
    assert code == 0, err
    repaired = tmp_path / "runs" / "at-repaired"
    assert f"doubly evaluate {repaired}" in out and "implicit term" in err and "after minus before" in out
    assert not list(repaired.rglob("*.p[kt]*")) and read_json(repaired / "config.json")["label"] == "AT repaired"
    saved = read_json(repaired / "repair.json")
    offsets = torch.tensor(list(saved["offsets"].values()))
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before, after = (load_model(path).eval() for path in (trained, repaired))
    assert torch.allclose(after(x), before(x) + offsets, atol=1e-4) and abs(offsets.sum()) < 1e-4
    for path, is_advised in ((trained, True), (repaired, False)):
        code, out, _ = cli("evaluate", path, "--no-trust", "--device", "cpu")
        assert code == 0 and (f"the first thing to try is `doubly repair {path}`" in out) == is_advised
    tails = [EvalResult.load(path).tail("margin")[0] for path in (trained, repaired)]
    assert tails[1] > tails[0] + 0.1, tails
    assert cli("compare", repaired, trained, "--resamples", 20)[0] == 0
    settings = ["--images", 60, "--scales", 0, 1, "--repair.rounds", 2, "--device", "cpu"]
    code, out, err = cli("frontier", trained, repaired, *settings)
    assert code == 0 and "tail at an average" in out and (tmp_path / "frontier" / "frontier.svg").is_file(), err
    again = cli("frontier", trained, repaired, *settings)
    assert again.out == out and again.err.count("is reused") == 2
    shown = (trained / "frontier.json").read_bytes()
    chosen = ["--split", "validation", "--attack", "strong", "--skip-images", 10]
    code, out, err = cli("frontier", trained, repaired, *settings, *chosen)
    assert code == 0 and "accuracy under strong, 60 validation images without the first 10" in " ".join(out.split())
    protocol = read_json(trained / "frontier-validation.json")["protocol"]
    assert protocol["attacks"]["strong"]["kind"] == "attack.strong" and protocol["skip_images"] == 10
    assert (trained / "frontier.json").read_bytes() == shown
    code, out, err = cli("report", "runs", "--output", "report")
    assert code == 0 and "AT repaired" in out, err
    assert "along class offsets" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    code, _, err = cli("repair", trained, *REPAIR)
    assert code == 2 and "is not empty" in err


def test_what_the_verbs_refuse(cli, tmp_path):
    assert cli("train", "digits.imbalanced.at", *SMALL.split(), "--output", "run")[0] == 0
    code, out, _ = cli("evaluate", "run", "--no-trust", "--device", "cpu")  # its weakest classes are at 0 %
    assert code == 0 and "images held out: train with --data.holdout 0.1" in out and "needs no training" not in out
    for words, message in [
        (["repair"], "give a run directory"),
        (["repair", "run"], "holds none out"),
        (["repair", "nowhere"], "no run directory"),
        (["repair", "run", "--data", "digits"], "leave out --data"),
        (["repair", "run", "--priority", "2"], "priority lies in [0, 1]"),
        (["repair", "run", "--temperature", "0"], "temperature (R) must be positive"),
        (["frontier"], "at least one run directory"),
        (["frontier", "run", "--scales", "1", "2"], "0 among them"),
        (["frontier", "run", "--attack", "autoattack"], "not AutoAttack"),
        (["frontier", "run", "--max-loss", "2"], "max_loss is a share"),
        (["frontier", "run", "--split", "validation"], "holds no images out"),
        (["frontier", "run", "--skip-images", "-1"], "skip_images must be at least 0"),
        (["frontier", "run", "--skip-images", "360"], "so that none are left"),
        (["frontier", "run", "--repair.priority", "2"], "priority lies in [0, 1]"),
    ]:
        code, _, err = cli(*words)
        assert code == 2 and message in err and "Traceback" not in err, (words, err)


def test_a_network_from_elsewhere_is_repaired(cli, tmp_path):
    network = "nn.Sequential(nn.Flatten(), nn.Linear(64, classes))"
    (tmp_path / "repaired_net.py").write_text(f"from torch import nn\n\ndef build(classes=10):\n    return {network}\n")
    words = "--model repaired_net:build --data digits --epsilon 0.05 --rounds 2 --images 100 --judge-images 100"
    code, _, err = cli("repair", *words.split(), "--device", "cpu", "--output", "fixed")
    assert code == 0 and "too small" in err, err
    assert sorted(path.name for path in (tmp_path / "fixed").iterdir()) == ["repair.json", "weights.safetensors"]
    weights = str(tmp_path / "fixed" / "weights.safetensors")
    code, _, err = cli("evaluate", *words.split()[:6], "--weights", weights, "--no-trust", "--images", 30)
    assert code == 0, err
