import pytest
import torch

from doubly.methods import AT, AWP, FAT
from doubly.recipes.digits import unsearched
from doubly.recipes.digits_comparison import cost
from doubly.rundir import read_json, read_metrics
from doubly.runs.passes import predicted, prediction


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
