import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from pyautoattack import AutoAttack as Reference
from sklearn.datasets import load_digits
from torch import nn

from doubly.attacks import attacked
from doubly.attacks.autoattack import STANDARD, AutoAttack
from doubly.attacks.forward import Plain
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.autoattack.driver import Driver
from doubly.evaluation.autoattack.eta import Remaining
from doubly.evaluation.autoattack.state import Chunks
from doubly.threat import L2Ball, LinfBall

BALLS = pytest.mark.parametrize("threat", [LinfBall(0.08), L2Ball(0.4)], ids=["linf", "l2"])


class Wavy(nn.Module):
    """Gradients point the wrong way now and then, so that one attack finds what another does not."""

    def __init__(self, waves):
        super().__init__()
        self.waves = waves
        self.inner = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10))

    def forward(self, x):
        return self.inner(x + 1.5 * torch.sin(self.waves * x) / self.waves)


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    return torch.tensor(data.images / 16, dtype=torch.float32)[:, None], torch.tensor(data.target)


@pytest.fixture(scope="module")
def wavy(digits):
    """Trained for a moment, by the frequency of its waves."""
    x, y = digits

    def train(waves):
        with torch.random.fork_rng():
            torch.manual_seed(2)
            model = Wavy(waves)
            optimizer = torch.optim.Adam(model.parameters(), 0.02)
            for _ in range(60):
                rows = torch.randperm(1000)[:128]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        return model.eval()

    return {waves: train(waves) for waves in (20, 160)}


@pytest.fixture(scope="module")
def images(digits):
    return Images.of(digits[0][1000:1024], digits[1][1000:1024])


def drive(model, images, attack, folder=None, classes=10, key=None, forward=None, **settings):
    with attacked(model, "eval"):
        driver = Driver(model, forward or Plain(model), images, attack, classes, Chunks(folder, key or {}), **settings)
        return driver.run()


def reference(model, threat, x, y, iterations=100, queries=5000, targets=9):
    """(examples, answers) of the reference's own driver."""
    norm = "Linf" if isinstance(threat, LinfBall) else "L2"
    theirs = Reference(model, norm=norm, eps=threat.radius, seed=0)
    for attack in (theirs.apgd, theirs.apgd_targeted):
        attack.n_iter = iterations
        attack.n_iter_2, attack.n_iter_min, attack.size_decr = (
            max(int(share * iterations), 1) for share in (0.22, 0.06, 0.03)
        )
    theirs.fab.n_iter, theirs.square.n_queries = iterations, queries
    theirs.fab.n_target_classes = theirs.apgd_targeted.n_target_classes = targets
    with attacked(model, "eval"), torch.random.fork_rng():
        return theirs.run_standard_evaluation(x.clone(), y.clone(), batch_size=len(x))


def agrees(found, x, expected):
    attacked_images, answers = expected
    assert found.answers.tolist() == answers.tolist()
    for row, (clean, example) in enumerate(zip(x, attacked_images, strict=True)):
        assert torch.equal(found.examples.get(row, clean), example)


@pytest.mark.parametrize("waves", [20, 160])
@BALLS
def test_one_chunk_is_the_reference_s_evaluation_bit_for_bit(threat, waves, wavy, images):
    found = drive(wavy[waves], images, AutoAttack(threat, iterations=5, queries=100), keep=1000)
    agrees(found, images.x, reference(wavy[waves], threat, images.x, images.y, 5, 100))
    standing = [int(found.after[part].sum()) for part in STANDARD]
    assert 24 > standing[0] > 0 and (standing[0] > standing[-1] or threat == L2Ball(0.4))
    assert found.answers.tolist() != images.y.tolist() and found.outside == 0


class FirstClasses(nn.Module):
    def __init__(self, inner, classes):
        super().__init__()
        self.inner, self.classes = inner, classes

    def forward(self, x):
        return self.inner(x)[:, : self.classes]


def test_the_standard_ensemble_is_the_reference_s(wavy, digits):
    """On four classes, which takes a third of the time; the reference has to be told that these are three targets."""
    rows = torch.tensor([1008, 1309, 1592, 1688, 1737])
    few, model = Images.of(digits[0][rows], digits[1][rows], list("0123")), FirstClasses(wavy[160], 4)
    found = drive(model, few, AutoAttack(LinfBall(0.09)), classes=4, keep=1000)
    agrees(found, few.x, reference(model, LinfBall(0.09), few.x, few.y, targets=3))
    assert found.after["apgd-ce"].sum() > found.after["apgd-t"].sum() > found.after["square"].sum()


@pytest.mark.slow
@pytest.mark.parametrize("waves", [20, 160])
@BALLS
def test_the_standard_ensemble_is_the_reference_s_on_more_images(threat, waves, wavy, images):
    found = drive(wavy[waves], images, AutoAttack(threat), keep=1000)
    agrees(found, images.x, reference(wavy[waves], threat, images.x, images.y))


def test_each_chunk_is_an_evaluation_of_its_own(wavy, images):
    attack = AutoAttack(LinfBall(0.08), iterations=2, targets=2, queries=20)
    found = drive(wavy[20], images, attack, size=10)
    parts = [drive(wavy[20], images.subset(range(a, b)), attack) for a, b in ((0, 10), (10, 20), (20, 24))]
    assert (found.done, found.chunks) == (3, 3)
    assert found.answers.tolist() == np.concatenate([part.answers for part in parts]).tolist()
    for name in STANDARD:
        assert found.after[name].tolist() == np.concatenate([part.after[name] for part in parts]).tolist()


@pytest.mark.parametrize("ball", [LinfBall, L2Ball])
def test_a_linear_network_at_its_initial_weights_stands_where_its_closed_form_says(ball):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
        x, y = 0.3 + 0.4 * torch.rand(30, 1, 6, 6), torch.arange(30) % 4
    weight, logits = model[1].weight.detach(), model(x).detach()
    lead = logits.gather(1, y[:, None]) - logits
    each = lead / (weight[None] - weight[y][:, None]).norm(1 if ball is LinfBall else 2, dim=2)
    far = each.scatter(1, y[:, None], torch.inf).amin(1)
    right = (far > 0).numpy()
    radius = float(far[far > 0].median()) * 1.001
    found = drive(model, Images.of(x, y), AutoAttack(ball(radius), iterations=25, queries=20), classes=4)
    sure = ((far / radius - 1).abs() > 0.01).numpy()
    assert 3 < right.sum() < 20 and sure.sum() > 25
    assert found.after["square"][sure].tolist() == (far > radius).numpy()[sure].tolist()
    assert (found.answers == y.numpy()).tolist() == found.after["square"].tolist()
    assert found.largest <= 1 + 1e-5 and found.outside == 0


@pytest.mark.parametrize("steepness", [0.0, 100.0], ids=["constant", "robust"])
def test_a_constant_and_a_robust_network_stand_wherever_they_are_right(steepness):
    class Gray(nn.Module):
        """Dark is 0 and light is 1; without steepness everything is 0."""

        def forward(self, x):
            light = steepness * (x.mean((1, 2, 3)) - 0.5) - (0.0 if steepness else 1.0)
            return torch.stack([-light, light], 1)

    x = torch.tensor([0.1, 0.9, 0.2, 0.8]).view(4, 1, 1, 1).expand(4, 1, 6, 6).contiguous()
    y = torch.tensor([0, 1, 0, 0])
    found = drive(Gray(), Images.of(x, y), AutoAttack(LinfBall(0.1), iterations=3, queries=10), classes=2)
    expected = [0, 0, 0, 0] if steepness == 0 else [0, 1, 0, 1]
    assert found.answers.tolist() == expected
    assert all(found.after[part].tolist() == (np.array(expected) == y.numpy()).tolist() for part in STANDARD)
    assert any("zero gradient" in text for text in found.warnings) == (steepness == 0)


class Threshold(nn.Module):
    """1 where the mean pixel exceeds a half."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, x):
        light = self.scale * (x.mean((1, 2, 3)) - 0.5)
        return torch.stack([-light, light], 1)


GRAY = 0.40 + 0.01 * torch.arange(10)
DARK = Images.of(GRAY.view(10, 1, 1, 1).expand(10, 1, 2, 2), [0] * 9 + [1], ["dark", "light"])  # the last is wrong


class Stopped(Exception):  # noqa: N818
    pass


@dataclass(frozen=True)
class Scripted(AutoAttack):
    """Attacks that do as they are told: which samples each of them lifts to which gray level."""

    lifts: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    stop: int = -1

    def check(self, size): ...

    def perturb(self, part, predict, x, y, classes, warn):
        if len(self.calls) == self.stop:
            raise Stopped
        names = [round(100 * float(image.mean())) - 40 for image in x]
        self.calls.append((part, names))
        found = x.clone()
        for row, name in enumerate(names):
            if name in self.lifts.get(part, {}):
                found[row] = self.lifts[part][name]
        warn(f"{part} was here")
        return found


LIFTS = {"apgd-ce": {1: 0.51, 4: 0.52}, "apgd-t": {0: 0.51}, "square": {6: 0.52, 7: 0.53}}


def scripted(stop=-1, lifts=LIFTS, **changes):
    return Scripted(**{"threat": LinfBall(0.15), **changes}, lifts=lifts, stop=stop, calls=[])


def test_only_what_still_stands_is_attacked():
    attack = scripted()
    found = drive(Threshold(), DARK, attack, classes=2)
    assert attack.calls == [
        ("apgd-ce", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("apgd-t", [0, 2, 3, 5, 6, 7, 8]),
        ("fab-t", [2, 3, 5, 6, 7, 8]),
        ("square", [2, 3, 5, 6, 7, 8]),
    ]
    assert found.answers.tolist() == [1, 1, 0, 0, 1, 0, 1, 1, 0, 0]
    assert [np.flatnonzero(found.after[part]).tolist() for part in STANDARD] == [
        [0, 2, 3, 5, 6, 7, 8],
        [2, 3, 5, 6, 7, 8],
        [2, 3, 5, 6, 7, 8],
        [2, 3, 5, 8],
    ]
    assert (found.made, found.outside, found.done, found.chunks, found.complete) == (28, 0, 1, 1, True)
    assert found.largest == pytest.approx(0.11 / 0.15, abs=1e-5)
    assert {f"{part} was here" for part in STANDARD} < set(found.warnings)
    assert "Square Attack has decreased" in " ".join(found.warnings)
    assert list(found.seconds) == list(STANDARD) and all(value > 0 for value in found.seconds.values())


def test_chunks_change_who_is_attacked_together_and_nothing_else():
    attack, told = scripted(), []
    found = drive(Threshold(), DARK, attack, classes=2, size=4, tell=lambda *what: told.append(what))
    whole = drive(Threshold(), DARK, scripted(), classes=2)
    assert found.answers.tolist() == whole.answers.tolist() and found.made == whole.made
    assert attack.calls[0] == ("apgd-ce", [0, 1, 2, 3]) and attack.calls[-1] == ("square", [8])
    assert told[:4] == [(0, 3, "apgd-ce", 3), (0, 3, "apgd-t", 2), (0, 3, "fab-t", 2), (0, 3, "square", 2)]
    assert told[-1] == (2, 3, "square", 1) and len(told) == 12


def test_where_nothing_stands_no_attack_is_called():
    attack, told = scripted(), []
    found = drive(Threshold(), replace(DARK, y=1 - DARK.y).subset(range(9)), attack, classes=2)
    assert attack.calls == [] and found.made == 0 and found.complete
    assert not any(found.after[part].any() for part in STANDARD) and told == []


@pytest.mark.parametrize(
    ("threat", "gray", "counts"),
    [
        (LinfBall(0.15), 0.51, True),
        (LinfBall(0.11), 0.51 + 5e-7, True),
        (LinfBall(0.11), 0.51 + 5e-6, False),
        (LinfBall(0.1), 0.51, False),
        (L2Ball(0.25), 0.51, True),
        (L2Ball(0.2), 0.51, False),
        (LinfBall(0.7), 0.99, True),
        (LinfBall(0.7), 1.0, True),
        (LinfBall(0.7), 1.00001, False),
    ],
)
def test_an_image_that_left_the_ball_or_the_range_does_not_count(threat, gray, counts):
    found = drive(
        Threshold(), DARK, scripted(lifts={"apgd-ce": {0: gray}}, threat=threat), classes=2, size=5, keep=1000
    )
    assert (found.answers[0] == 1) == counts == (0 in found.examples) == (not found.after["apgd-ce"][0])
    assert found.outside == (not counts) and found.after["square"][1:9].all()


def test_one_pixel_below_black_does_not_count():
    gray = torch.full((1, 2, 2), 0.9)
    gray[0, 0, 0] = -1e-5
    found = drive(Threshold(), DARK, scripted(lifts={"fab-t": {2: gray}}, threat=LinfBall(0.9)), classes=2)
    assert found.outside == 1 and found.after["square"][2]


def test_an_image_of_nan_does_not_count_and_ends_nothing():
    found = drive(Threshold(), DARK, scripted(lifts={"fab-t": {2: torch.nan}}), classes=2)
    assert found.outside == 1 and found.after["square"][2]


def test_an_image_that_was_not_turned_is_not_outside():
    found = drive(Threshold(), DARK, scripted(lifts={"apgd-ce": {0: 0.0}}), classes=2)
    assert found.outside == 0 and found.after["apgd-ce"][0] and found.largest > 1


@pytest.mark.parametrize("sign", [1, -1])
def test_the_network_itself_judges_and_not_what_the_attacks_called(sign):
    class Liar(nn.Module):
        def forward(self, x):
            return sign * Threshold()(x - 0.05 * sign)

    liar = Liar()
    attack = AutoAttack(LinfBall(0.06), iterations=3, queries=5)
    big = Images.of(GRAY.view(10, 1, 1, 1).expand(10, 1, 6, 6), DARK.y.tolist(), ["dark", "light"])
    found = drive(Threshold(), big, attack, classes=2, forward=Plain(liar), keep=1000)
    for row, example in found.examples.items():
        assert Threshold()(example[None]).argmax() == 1 == found.answers[row] and found.answers[row] != big.y[row]
    broken = [row for row in range(9) if found.answers[row] == 1]
    assert sorted(found.examples) == broken and all(row >= 4 for row in broken)
    assert found.answers[9] == 0


@pytest.mark.parametrize("stop", range(8))
@pytest.mark.parametrize("keep", [False, True])
def test_a_stopped_evaluation_goes_on_after_the_last_attack_that_ended(stop, keep, tmp_path):
    whole = drive(Threshold(), DARK, scripted(), classes=2, size=5, keep=keep)
    first = scripted(stop=stop)
    with pytest.raises(Stopped):
        drive(Threshold(), DARK, first, tmp_path, classes=2, size=5, keep=keep)
    second = scripted()
    found = drive(Threshold(), DARK, second, tmp_path, classes=2, size=5, keep=keep)
    assert len(first.calls) == stop and len(second.calls) == 8 - stop
    same_outcome(found, whole)
    third = scripted()
    same_outcome(drive(Threshold(), DARK, third, tmp_path, classes=2, size=5, keep=keep), whole)
    assert third.calls == []


def same_outcome(found, expected):
    assert found.answers.tolist() == expected.answers.tolist()
    assert all(found.after[part].tolist() == expected.after[part].tolist() for part in expected.after)
    names = ("warnings", "largest", "made", "outside", "done", "chunks")
    assert all(getattr(found, name) == getattr(expected, name) for name in names)
    assert found.examples.keys() == expected.examples.keys()
    assert all(torch.equal(found.examples[row], expected.examples[row]) for row in expected.examples)


def test_images_that_are_asked_for_later_are_known_to_be_missing(tmp_path):
    drive(Threshold(), DARK, scripted(), tmp_path, classes=2)
    found = drive(Threshold(), DARK, scripted(), tmp_path, classes=2, keep=1000)
    assert found.examples == {} and found.broken == 5


def test_shards_in_one_folder_make_the_whole(tmp_path, wavy, images):
    attack = AutoAttack(LinfBall(0.08), iterations=2, targets=2, queries=10)
    whole = drive(wavy[160], images, attack, size=5)
    first, second, third = (
        drive(wavy[160], images, attack, tmp_path, size=5, shard=(k, 3)) for k in (2, 0, 1)
    )  # chunk 2, then 0 and 3, then 1 and 4
    assert [(part.done, part.complete) for part in (first, second, third)] == [(1, False), (3, False), (5, True)]
    assert np.flatnonzero(first.answers >= 0).tolist() == [10, 11, 12, 13, 14]
    assert first.answers[10:15].tolist() == whole.answers[10:15].tolist()
    assert not first.after["square"][:10].any()
    same_outcome(third, whole)
    told = []
    merged = drive(wavy[160], images, attack, tmp_path, size=5, tell=lambda *what: told.append(what))
    same_outcome(merged, whole)
    assert told == [] and merged.seconds == third.seconds


def test_a_chunk_that_another_process_has_begun_does_not_count_yet(tmp_path):
    with pytest.raises(Stopped):
        drive(Threshold(), DARK, scripted(stop=2), tmp_path, classes=2, size=5)
    found = drive(Threshold(), DARK, scripted(), tmp_path, classes=2, size=5, shard=(1, 2))
    assert (found.done, found.complete) == (1, False) and found.answers[:5].tolist() == [-1] * 5


@pytest.mark.parametrize("settings", [{"shard": (1, 1)}, {"shard": (-1, 2)}, {"shard": (0, 0)}, {"size": 0}])
def test_wrong_settings_are_refused(settings):
    with pytest.raises(UsageError):
        drive(Threshold(), DARK, scripted(), **settings)


def test_another_network_is_noticed_by_its_answers(tmp_path):
    with pytest.raises(Stopped):
        drive(Threshold(), DARK, scripted(stop=2), tmp_path, classes=2)
    before = (tmp_path / "chunk-00000.json").read_bytes()
    other = Threshold()
    other.scale.data.neg_()
    with pytest.raises(UsageError, match=r"answers the clean images of chunk 0 otherwise.*delete"):
        drive(other, DARK, scripted(), tmp_path, classes=2)
    assert (tmp_path / "chunk-00000.json").read_bytes() == before


def garbled(change):
    def write(folder):
        file = folder / "chunk-00000.json"
        state = json.loads(file.read_text())
        change(state)
        file.write_text(json.dumps(state))

    return write


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("clean"),
        lambda state: state.pop("attacks"),
        lambda state: state.update(attacks=None),
        lambda state: state["attacks"][0].pop("broken"),
        lambda state: state["attacks"][0].update(broken=[99]),
        lambda state: state["attacks"][0].update(answers=[]),
        lambda state: state["attacks"][0].update(name="square"),
        lambda state: state["attacks"].append(state["attacks"][0]),
    ],
    ids=["no clean", "no attacks", "null", "no rows", "row 99", "no answers", "another attack", "twice"],
)
def test_a_garbled_chunk_is_a_sentence(change, tmp_path):
    with pytest.raises(Stopped):
        drive(Threshold(), DARK, scripted(stop=2), tmp_path, classes=2)
    garbled(change)(tmp_path)
    with pytest.raises(UsageError, match=r"chunk-00000\.json"):
        drive(Threshold(), DARK, scripted(), tmp_path, classes=2)


@pytest.mark.parametrize("length", [0, 30, -4])
def test_a_truncated_chunk_is_a_sentence_and_deleting_it_is_the_remedy(length, tmp_path):
    whole = drive(Threshold(), DARK, scripted(), tmp_path, classes=2, size=5)
    file = tmp_path / "chunk-00001.json"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(UsageError, match=r"chunk-00001\.json.*delete"):
        drive(Threshold(), DARK, scripted(), tmp_path, classes=2, size=5)
    file.unlink()
    attack = scripted()
    same_outcome(drive(Threshold(), DARK, attack, tmp_path, classes=2, size=5), whole)
    assert attack.calls[0] == ("apgd-ce", [5, 6, 7, 8])


def test_what_a_killed_write_left_is_passed_over(tmp_path):
    whole = drive(Threshold(), DARK, scripted(), tmp_path, classes=2)
    (tmp_path / ".chunk-00000.json.12345").write_text('{"schema": 1, "chu')
    (tmp_path / ".images-00000-fab-t.npz").write_bytes(b"PK")
    same_outcome(drive(Threshold(), DARK, scripted(), tmp_path, classes=2), whole)


def test_the_clock_runs_out_with_the_last_attack(images, wavy):
    attack, model = AutoAttack(LinfBall(0.08), iterations=2, targets=2, queries=10), wavy[20]
    clock, left = Remaining(attack, 10, len(images)), []
    forward = Plain(model, clock.add)
    drive(model, images, attack, forward=forward, size=10, clock=clock, tell=lambda *_: left.append(clock.seconds()))
    assert len(left) == 12 and all(value > 0 for value in left[:-1]) and left[-1] == 0


SCRIPT = """
import sys, time, torch
from pathlib import Path
from torch import nn
from doubly.attacks import attacked
from doubly.attacks.autoattack import AutoAttack
from doubly.attacks.forward import Plain
from doubly.data import Images
from doubly.evaluation.autoattack.state import Chunks
from doubly.evaluation.autoattack.driver import Driver
from doubly.threat import LinfBall

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 5))
x = torch.rand(12, 1, 6, 6)
images = Images.of(x, model(x).argmax(1), list("abcde"))
attack = AutoAttack(LinfBall(0.03), iterations=3, queries=20)


class Slow(Plain):
    def __call__(self, x):
        time.sleep(pause)
        return super().__call__(x)


def tell(chunk, of, part, standing):
    global pause
    pause = later
    told.append((chunk, part))
    print(chunk, part, flush=True)


def run(folder):
    with attacked(model, "eval"):
        return Driver(model, Slow(model), images, attack, 5, Chunks(folder, {}), size=6, keep=1000, tell=tell).run()


told, pause, later = [], 0, 0
if __name__ == "__main__":
    later = 0.2
    run(Path(sys.argv[1]))
"""


def test_killed_in_the_middle_and_resumed_is_as_if_nothing_had_been(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "state"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True, env=environment)
    with process:
        first = process.stdout.readline().split()
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and first == ["0", "apgd-ce"]
    left = json.loads((folder / "chunk-00000.json").read_text())["attacks"]
    assert [each["name"] for each in left] == ["apgd-ce"]

    here = {"__name__": "here"}
    with torch.random.fork_rng():
        exec(SCRIPT, here)
    whole = here["run"](None)
    assert len(here["told"]) == 8
    here["told"].clear()
    resumed = here["run"](folder)
    assert here["told"] == [(k, part) for k in (0, 1) for part in STANDARD][1:]
    same_outcome(resumed, whole)
    assert resumed.seconds["apgd-ce"] >= left[0]["seconds"] and 0 < resumed.after["square"].sum() < 12
