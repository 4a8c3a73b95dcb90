import pytest
import torch

from doubly.attacks import PGD
from doubly.methods import AT, AWP, DONE, FAT, TRADES, FastBAT, Standard
from doubly.models import NarrowResNet
from doubly.recipes.digits import unsearched
from doubly.rundir import read_json, read_metrics
from doubly.schedules import Constant
from doubly.studies.digits_comparison import cost
from doubly.training.passes import attack_passes, predicted, prediction
from doubly.types import Batch


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("standard", 1, 1),
        ("at", 11, 11),  # ten steps and the update
        ("trades", 13, 12),  # and the clean images, once for the attack and once for the update
        ("awp", 12, 12),  # one attack, and the ascent of the weights
        ("done_pgd", 12, 12),  # the difference quotient
        ("fast_at", 2, 2),
        ("fast_bat", 4, 6),  # two steps, z and delta*; the implicit term is a double backward
    ],
)
def test_the_passes_of_a_step(method, forward, backward):
    with torch.random.fork_rng():
        found = cost(unsearched(method, True))
    assert (found["forward"], found["backward"]) == (forward, backward)


def test_a_run_records_what_was_foreseen_and_it_is_what_is_counted(tiny, tmp_path, adversarial):
    with torch.random.fork_rng():
        before = torch.random.get_rng_state()
        tiny.train(tiny.run(adversarial, epochs=1), tmp_path)
        assert torch.equal(torch.random.get_rng_state(), before)
    foreseen = read_json(tmp_path / "environment.json")["predicted"]
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert foreseen == {key: row[key] for key in ("passes_forward", "passes_backward")} == dict.fromkeys(foreseen, 3.0)


def test_of_attacks_that_end_early_the_most_is_foreseen(tiny):
    assert predicted(FAT(tiny.attack), 1, 3) == predicted(AT(tiny.attack), 1, 3)


class Particular:
    """Somebody's own method, which knows its network and counts its calls."""


def test_somebodys_own_method_is_not_called_for_a_prediction(splits, adversarial):
    assert prediction(Particular(), splits.train) == prediction(AWP(Particular()), splits.train) == {}
    assert prediction(AWP(adversarial), splits.train)["predicted"] == {"passes_forward": 4.0, "passes_backward": 4.0}


@pytest.mark.parametrize(
    ("method", "found"),
    [
        (Standard(), (0, 0)),
        (AT(PGD(steps=4)), (4, 0)),
        (AT(PGD(steps=4, restarts=2, attack_mode="train")), (0, 8)),
        (TRADES(PGD(steps=4, start="gaussian")), (4, 0)),
        (FastBAT(), (2, 0)),
        (DONE(PGD(steps=4)), (4, 0)),
        (AWP(AT(PGD(steps=4))), (4, 0)),
        (FAT(PGD(steps=4), tau=Constant(4.0)), (4, 0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_passes_of_the_attack_alone_by_mode(method, found):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NarrowResNet(2, 1).build(1, 3, [0.5], [0.25]).train()
        x = torch.rand(20, 1, 8, 8)
    before, y, draws = [b.clone() for b in model.buffers()], torch.arange(20) % 3, torch.get_rng_state()
    assert attack_passes(method, model, Batch(x, y, torch.arange(20)), torch.bincount(y)) == dict(
        zip(("eval", "train"), found, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert model.training and all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), draws)


def test_samples_that_stop_early_are_a_fraction_of_a_pass():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NarrowResNet(2, 1).build(1, 3, [0.5], [0.25]).train()
        x = torch.rand(20, 1, 8, 8)
    y = torch.arange(20) % 3
    found = attack_passes(FAT(PGD(steps=4), tau=Constant(0.0)), model, Batch(x, y, torch.arange(20)), torch.bincount(y))
    assert 1 <= found["eval"] < 4 and found["eval"] % 1 > 0
