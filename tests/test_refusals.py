"""What Python users write by mistake: it works, or one sentence says what to do."""

import numpy as np
import pytest
import torch
from torch import nn

import doubly
import malformed_calls
import malformed_targets
from doubly import AT, DONE, FGSM, PGD, TRADES, Batch, L2Ball, LinfBall, Strong, TrainStep
from doubly.errors import UsageError
from doubly.methods import METHODS

X, Y = torch.rand(6, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))


def objective(batch):
    return AT(PGD(LinfBall(0.1))).objective(MODEL, batch, {}, TrainStep())


def test_mistakes_are_answered_by_one_sentence():
    attack, generator = PGD(LinfBall(8 / 255)), torch.Generator()
    for call, message in (
        (lambda: LinfBall("eight"), "'eight' is not a number: write 0.03 or 8/255"),
        (lambda: LinfBall(None), r"a number, got NoneType: write LinfBall\(8 / 255\)"),
        (lambda: L2Ball([0.5]), r"a number, got list: write L2Ball\(0.5\)"),
        (
            lambda: PGD(8 / 255),
            r"argument of PGD is the threat, got float: write PGD\(LinfBall\(0.0313725\)\)",
        ),
        (lambda: PGD(MODEL), r"the threat, got Sequential: .* attack\(model, x, y\)"),
        (lambda: FGSM(0.1), "first argument of FGSM is the threat"),
        (lambda: Strong(0.1), "first argument of Strong is the threat"),
        (lambda: PGD(MODEL, LinfBall(0.1)), r"first argument of PGD is the threat, got \w+: write PGD\(LinfBall"),
        (lambda: PGD(LinfBall(0.1), 10, 0.01), r"rule is a step rule such as SignStep\(2 / 255\), got 0.01"),
        (lambda: DONE(LinfBall(0.1)), r"DONE takes an attack, got the threat .*: write DONE\(PGD\(LinfBall"),
        (lambda: AT(PGD), r"AT got the class PGD: write PGD\(\)"),
        (lambda: attack(X, Y, MODEL), r"attack\(model, x, y\), the network first, got \(Tensor, Tensor, Sequential\)"),
        (lambda: attack.perturb(MODEL, X.numpy(), Y), r"images must be a tensor, got ndarray: .* torch.as_tensor"),
        (lambda: attack(MODEL, X, Y.tolist()), "labels must be a tensor, got list"),
        (lambda: attack(MODEL, X[0], Y[0]), r"a single one of shape \(1, 2, 2\): pass x\[None\] and y\[None\]"),
        (lambda: attack(MODEL, X / 0 * 0, Y), "have NaN pixels"),
        (lambda: attack(MODEL, X, Y + 1), "labels run from 1 to 2, .* subtract 1 from the labels"),
        (lambda: attack(MODEL, X, Y, "seed"), "a seed or a torch.Generator, got str"),
        (lambda: objective((X.numpy(), Y.numpy())), "images must be a tensor, got ndarray"),
        (lambda: objective(X), r"a batch is Batch\(x, y\) or a pair \(x, y\), got Tensor"),
        (lambda: doubly.load("nowhere"), "nowhere is no run directory"),
        (lambda: doubly.train(nn.Linear(4, 2, device="meta"), (X, Y), AT()), "parameters are on the device meta"),
        (lambda: doubly.evaluate(MODEL, (X, Y), attacks=[lambda *_: None]), "returns the perturbation, .* NoneType"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
    with pytest.warns(UserWarning, match="leave rule out"):
        PGD(LinfBall(0.3), rule=doubly.SignStep(2 / 255)).perturb(MODEL, X, Y, generator)


def test_what_works_instead():
    attack = PGD(LinfBall("8/255"))
    assert attack == PGD() and LinfBall(np.float32(0.5)).radius == 0.5
    delta = attack(MODEL, X, Y)
    assert torch.equal(delta, attack(MODEL, X, Y, 0))
    assert torch.equal(delta, attack(MODEL, X, Y, torch.Generator().manual_seed(0)))
    for other in (attack, FGSM(LinfBall(0.1)), Strong(LinfBall(0.1))):
        attacked = other.perturb(MODEL, X, Y, 3)
        assert torch.equal(attacked, (X + other(MODEL, X, Y, 3)).clamp(0, 1))
    assert torch.equal(objective((X, Y)).loss, objective(Batch(X, Y)).loss)
    assert TRADES is METHODS["trades"] and all(kind.__name__ in doubly.__all__ for kind in METHODS.values())
    assert repr(doubly.Images.of(X, Y)) == "Images(6 of 1x2x2, torch.float32, 2 classes)"


def test_malformed_calls_of_every_public_function_end_in_a_result_or_a_sentence():
    results = malformed_calls.outcomes(250, seed=1)
    assert not [result for result in results if result.kind == "obscure"]
    assert malformed_calls.count_kinds(results)["refused"] > 100
    reached = {name.partition(".")[0] for name in malformed_targets.targets()}
    assert {"doubly", "minimize 0", "cid", "evaluate", "train", "repair", "load", "attack pgd"} <= reached
