"""Evaluation of a run directory, and whether one has been evaluated."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.callbacks import Callback
from doubly.config import Validation
from doubly.errors import UsageError
from doubly.evaluation.api import evaluate, evaluate_run, is_evaluated
from doubly.evaluation.config import EvalConfig
from doubly.losses import LogitMargin
from doubly.methods import Standard
from doubly.models import SmallCNN
from doubly.recipes import recipe
from doubly.rundir import RunDir, read_json, write_json
from doubly.threat import THREATS, L2Ball, LinfBall
from doubly.training.loop import train_run

PGD_2 = PGD(LinfBall(0.1), 2, SignStep(0.1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run directory, network, run) of a run of a second."""
    path, base = tmp_path_factory.mktemp("run"), recipe("digits.standard")
    run = replace(
        base,
        data=replace(base.data, holdout=0.2, train_images=400),
        model=SmallCNN(4),
        method=Standard(),
        validation=Validation(every=1, size=40, attack=PGD_2),
        epochs=2,
        ema_decay=0.5,
        device="cpu",
        channels_last="no",
    )
    return path, train_run(run, path).model, run


def test_what_is_written_is_what_evaluating_the_network_returns(trained):
    path, network, run = trained
    evaluate_run(path, device="cpu")
    result = read_json(RunDir(path).evaluation)
    test = run.data.source.load(None).test
    assert result["protocol"].items() >= {"split": "test", "checkpoint": "last", "data_sha256": test.sha256()}.items()
    assert result["protocol"]["note"].startswith("trained on 400 of")
    attacks = {"pgd": PGD_2, "margin": replace(PGD_2, loss=LogitMargin())}
    expected = json.loads(json.dumps(evaluate(network, test, attacks=attacks).summary()))
    assert result.pop("epoch") == 2 and result.pop("test_images") == len(test) and result.pop("command")
    for attack in ("pgd", "margin"):
        assert result["tail"][attack].pop("validated")["n_validation"] == 80  # the images that the run held out
    result.pop("protocol"), expected.pop("protocol")
    assert result == expected
    with np.load(RunDir(path).predictions, allow_pickle=False) as arrays:
        assert np.array_equal(arrays["y"], test.y.numpy()) and np.array_equal(arrays["ids"], test.ids.numpy())
        assert (arrays["clean"] == arrays["y"]).mean() == result["sa"]
        assert (arrays["pgd"] == arrays["y"]).mean() == result["ra_pgd"] and arrays["pgd_losses"].dtype == np.float64


def test_a_directory_that_is_deleted_meanwhile_is_not_made_again(trained, tmp_path):
    path = shutil.copytree(trained[0], tmp_path / "copy")

    class Delete(Callback):
        def on_images(self, done, total):
            shutil.rmtree(path, ignore_errors=True)

    with pytest.raises(UsageError, match="copy was deleted or renamed during the evaluation"):
        evaluate_run(path, device="cpu", config=EvalConfig(trust=False, images=20), callbacks=[Delete()])
    assert not path.exists()


def test_checkpoint_threat_and_folder_can_be_chosen(trained, tmp_path):
    class Closed(Callback):
        count = 0

        def close(self):
            self.count += 1

    path, callback = trained[0], Closed()
    settings = {"config": EvalConfig(output=tmp_path, images=20, trust=False), "device": "cpu"}
    before = RunDir(path).evaluation.read_bytes() if RunDir(path).evaluation.exists() else None
    result = evaluate_run(
        path, checkpoint="best", threat=L2Ball(0.2), attacks=["pgd"], callbacks=[callback], **settings
    )
    assert result.protocol["checkpoint"] == "best" and result.protocol["attack"]["threat"]["kind"] == "threat.l2"
    assert result.n == read_json(tmp_path / "evaluation.json")["n"] == 20 and callback.count == 1
    assert before is None or RunDir(path).evaluation.read_bytes() == before
    for call, message in (
        (lambda: evaluate_run(tmp_path), "no run directory"),
        (lambda: evaluate_run(path, checkpoint="first"), r"no checkpoint 'first' \(there are: best, last\)"),
        (lambda: evaluate_run(path, device="nowhere"), "device 'nowhere' is not available"),
        (lambda: evaluate_run(path, attacks=["fab"]), "no attack 'fab'"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_the_commands_evaluate_any_listed_attack_and_compare(cli, trained, tmp_path):
    words = [trained[0], "--images", "30", "--no-trust", "--device", "cpu", "--attacks", "pgd", "margin", "fgsm"]
    for folder in ("one", "two"):
        code, out, _ = cli("evaluate", *words, "--output", folder)
        assert code == 0 and "RA-fgsm" in out
    summary = read_json(tmp_path / "one" / "evaluation.json")
    assert summary["ra_pgd"] <= summary["ra_fgsm"] and list(summary["protocol"]["attacks"]) == ["fgsm"]
    code, out, _ = cli("compare", "one", "two", "--resamples", "5")
    assert code == 0 and "+0.0 (+0.0, +0.0)" in out


def test_the_command_takes_any_threat_of_the_table(cli, trained, tmp_path):
    words = ["evaluate", trained[0], "--images", "20", "--no-trust", "--attacks", "pgd", "--output", tmp_path]
    for name, kind in THREATS.items():
        assert cli(*words, "--threat", name, "--epsilon", "0.2")[0] == 0
        attack = read_json(tmp_path / "evaluation.json")["protocol"]["attack"]
        assert attack["threat"]["kind"] == f"threat.{name}" and attack["threat"]["radius"] == kind(0.2).radius
    code, _, err = cli(*words, "--threat", "l7")
    assert code == 2 and "there is no norm 'l7'" in err


def test_an_evaluation_counts_if_it_has_what_is_asked_for(trained, tmp_path):
    path, _, run = trained
    done = EvalConfig(output=tmp_path, images=30, curve_images=10, trust=False)
    evaluate_run(path, device="cpu", config=done)
    saved = read_json(tmp_path / "evaluation.json")
    assert is_evaluated(tmp_path, run, ["pgd", "margin"], done)
    assert is_evaluated(tmp_path, run, ["pgd"], replace(done, curve_images=None))
    for attacks, changes in (
        (["pgd", "autoattack"], {}),
        (["quick"], {}),
        (["fgsm"], {}),
        (["pgd"], {"trust": True}),
        (["pgd"], {"seed": 1}),
        (["pgd"], {"chunk_size": 100}),
        (["pgd"], {"tail_share": 0.5}),
        (["pgd"], {"tail_rounding": "floor"}),
        (["pgd"], {"curve_images": 20}),
        (["pgd"], {"images": 40}),
        (["pgd"], {"images": None}),
        (["pgd"], {"skip_images": 5}),
    ):
        assert not is_evaluated(tmp_path, run, attacks, replace(done, **changes)), changes
    assert not is_evaluated(tmp_path, replace(run, epochs=3), ["pgd"], done)
    other = replace(run.validation, attack=replace(PGD_2, steps=3))
    assert not is_evaluated(tmp_path, replace(run, validation=other), ["pgd"], done)
    for content in (3, {}, {**saved, "protocol": {}}, {**saved, "tail": None}, {**saved, "epoch": 1}):
        write_json(tmp_path / "evaluation.json", content)
        assert not is_evaluated(tmp_path, run, ["pgd"], done)
    older = {name: value for name, value in saved.items() if name != "test_images"}
    write_json(tmp_path / "evaluation.json", older)
    assert is_evaluated(tmp_path, run, ["pgd"], done) and not is_evaluated(tmp_path / "none", run, ["pgd"], done)
