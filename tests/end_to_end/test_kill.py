"""kill -9 at ten moments spread over a run: what is resumed ends with the bits of a run that was not killed."""

import random
import signal
import time

EPOCHS, STEPS = 20, 6
KILLS = 10
SETTINGS = ["--epochs", "20", "--save-seconds", "0.1", "--data.holdout", "0.2"]


def moments():
    """Yield (epoch, step, further seconds): somewhere in each tenth of the first four fifths of the run."""
    draw = random.Random(0)
    last = 0.8 * EPOCHS * STEPS
    for tenth in range(KILLS):
        place = int(last * (tenth + draw.random()) / KILLS)
        yield *divmod(place, STEPS), 0.08 * draw.random()


def test_kill_nine_at_ten_moments_changes_no_bit(doubly):
    train = ["train", doubly.recipe, *doubly.small, *SETTINGS]
    doubly.run(*train, "--output", "whole")
    places = []
    for epoch, step, delay in moments():
        child = doubly.start(*train, "--output", "killed", "--resume")  # the first has nothing yet to resume
        doubly.wait_for_step("killed", epoch, step, child.is_running)
        time.sleep(delay)  # so that any place between two checkpoints may be hit
        assert child.send(signal.SIGKILL) == -signal.SIGKILL
        places.append((epoch, step))
    assert len(set(places)) == KILLS
    done = doubly.run("train", "--output", "killed", "--resume")
    assert "continuing at epoch" in done.out
    for name in ("last", "best"):
        assert doubly.tensors("killed", name) == doubly.tensors("whole", name)
    assert {"model.safetensors", "state.safetensors"} == set(doubly.tensors("whole"))
    assert [row["epoch"] for row in doubly.rows("killed")] == list(range(EPOCHS))
    assert doubly.rows("killed") == doubly.rows("whole")
