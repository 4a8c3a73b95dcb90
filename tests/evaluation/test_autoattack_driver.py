"""AutoAttack on chunks: bit for bit the reference, closed forms, and resuming after a stop or a kill."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from pyautoattack import AutoAttack as Reference
from sklearn.datasets import load_digits
from torch import nn

from doubly.attacks import attack_context
from doubly.attacks.autoattack import STANDARD, AutoAttack
from doubly.callbacks import Callback
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.autoattack.driver import Driver, Network
from doubly.evaluation.autoattack.eta import Progress, RemainingTime
from doubly.evaluation.autoattack.forward import CountedForward
from doubly.evaluation.autoattack.state import ChunkFiles
from doubly.evaluation.memory import MicrobatchLimit
from doubly.threat import L2Ball, LinfBall


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
    """Briefly trained networks, by the frequency of their waves."""
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


class Recorder(Callback):
    def __init__(self):
        self.attacks, self.seconds_left = [], []

    def on_attack(self, chunk, chunks, part, robust, seconds_left):
        self.attacks.append((chunk, chunks, part, robust))
        self.seconds_left.append(seconds_left)


def drive(model, images, attack, folder=None, classes=10, forward=None, callback=None, **settings):
    with attack_context(model, "eval"):
        progress = Progress(RemainingTime(attack, classes, len(images)), callback or Callback())
        forward = forward or CountedForward(model, progress.count_pass)
        network = Network(model, forward, classes, MicrobatchLimit())
        driver = Driver(network, images, attack, ChunkFiles(folder, {}), progress, **settings)
        return driver.combine(driver.run_shard())


def run_reference(model, threat, x, y, iterations=100, queries=5000, targets=9):
    """Return (attacked images, predictions) of the reference's own driver."""
    theirs = Reference(model, norm=threat.norm, eps=threat.radius, seed=0)
    for attack in (theirs.apgd, theirs.apgd_targeted):
        attack.n_iter = iterations
        attack.n_iter_2, attack.n_iter_min, attack.size_decr = (
            max(int(share * iterations), 1) for share in (0.22, 0.06, 0.03)
        )
    theirs.fab.n_iter, theirs.square.n_queries = iterations, queries
    theirs.fab.n_target_classes = theirs.apgd_targeted.n_target_classes = targets
    tracing = sys.gettrace()  # which the reference drops
    with attack_context(model, "eval"), torch.random.fork_rng():
        result = theirs.run_standard_evaluation(x.clone(), y.clone(), batch_size=len(x))
    sys.settrace(tracing)
    return result


def assert_equal_to_reference(outcome, x, expected):
    attacked, predictions = expected
    assert outcome.predictions.tolist() == predictions.tolist()
    for row, (clean, example) in enumerate(zip(x, attacked, strict=True)):
        assert torch.equal(outcome.examples.get(row, clean), example)


@pytest.mark.parametrize("threat", [LinfBall(0.08), L2Ball(0.4)], ids=["linf", "l2"])
def test_one_chunk_is_the_reference_s_evaluation_bit_for_bit(threat, wavy, images):
    for waves in (20, 160):
        result = drive(wavy[waves], images, AutoAttack(threat, iterations=5, queries=100), max_examples=1000)
        assert_equal_to_reference(result, images.x, run_reference(wavy[waves], threat, images.x, images.y, 5, 100))
        robust = [int(result.robust_after[part].sum()) for part in STANDARD]
        assert 24 > robust[0] > 0 and (robust[0] > robust[-1] or threat == L2Ball(0.4))
        assert result.predictions.tolist() != images.y.tolist() and result.outside == 0


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
    result = drive(model, few, AutoAttack(LinfBall(0.09)), classes=4, max_examples=1000)
    assert_equal_to_reference(result, few.x, run_reference(model, LinfBall(0.09), few.x, few.y, targets=3))
    robust = result.robust_after
    assert robust["apgd-ce"].sum() > robust["apgd-t"].sum() > robust["square"].sum()


@pytest.mark.slow
@pytest.mark.parametrize("threat", [LinfBall(0.08), L2Ball(0.4)], ids=["linf", "l2"])
def test_the_standard_ensemble_is_the_reference_s_on_more_images(threat, wavy, images):
    for waves in (20, 160):
        result = drive(wavy[waves], images, AutoAttack(threat), max_examples=1000)
        assert_equal_to_reference(result, images.x, run_reference(wavy[waves], threat, images.x, images.y))


def test_each_chunk_is_an_evaluation_of_its_own(wavy, images):
    attack = AutoAttack(LinfBall(0.08), iterations=2, targets=2, queries=20)
    result = drive(wavy[20], images, attack, chunk_size=10)
    parts = [drive(wavy[20], images.subset(range(a, b)), attack) for a, b in ((0, 10), (10, 20), (20, 24))]
    assert (result.chunks_done, result.chunks) == (3, 3)
    assert result.predictions.tolist() == np.concatenate([part.predictions for part in parts]).tolist()
    for name in STANDARD:
        expected = np.concatenate([part.robust_after[name] for part in parts])
        assert result.robust_after[name].tolist() == expected.tolist()


def test_a_linear_network_is_robust_where_its_closed_form_says():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
        x, y = 0.3 + 0.4 * torch.rand(30, 1, 6, 6), torch.arange(30) % 4
    weight, logits = model[1].weight.detach(), model(x).detach()
    lead = logits.gather(1, y[:, None]) - logits
    for threat, dual_norm in ((LinfBall, 1), (L2Ball, 2)):
        distances = lead / (weight[None] - weight[y][:, None]).norm(dual_norm, dim=2)
        distance = distances.scatter(1, y[:, None], torch.inf).amin(1)
        radius = float(distance[distance > 0].median()) * 1.001
        result = drive(model, Images.of(x, y), AutoAttack(threat(radius), iterations=25, queries=20), classes=4)
        decided = ((distance / radius - 1).abs() > 0.01).numpy()
        assert 3 < (distance > 0).sum() < 20 and decided.sum() > 25
        assert result.robust_after["square"][decided].tolist() == (distance > radius).numpy()[decided].tolist()
        assert (result.predictions == y.numpy()).tolist() == result.robust_after["square"].tolist()
        assert result.largest <= 1 + 1e-5 and result.outside == 0


def test_a_constant_and_a_robust_network_keep_their_predictions():
    class Gray(nn.Module):
        """Predicts 0 for dark and 1 for light images; without steepness always 0."""

        def __init__(self, steepness):
            super().__init__()
            self.steepness = steepness

        def forward(self, x):
            light = self.steepness * (x.mean((1, 2, 3)) - 0.5) - (0.0 if self.steepness else 1.0)
            return torch.stack([-light, light], 1)

    x = torch.tensor([0.1, 0.9, 0.2, 0.8]).view(4, 1, 1, 1).expand(4, 1, 6, 6).contiguous()
    y = torch.tensor([0, 1, 0, 0])
    for steepness, expected in ((0.0, [0, 0, 0, 0]), (100.0, [0, 1, 0, 1])):
        attack = AutoAttack(LinfBall(0.1), iterations=3, queries=10)
        result = drive(Gray(steepness), Images.of(x, y), attack, classes=2)
        assert result.predictions.tolist() == expected
        robust = (np.array(expected) == y.numpy()).tolist()
        assert all(result.robust_after[part].tolist() == robust for part in STANDARD)
        assert any("zero gradient" in text for text in result.warnings) == (steepness == 0)


class Threshold(nn.Module):
    """Predicts 1 where the mean pixel exceeds a half."""

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
    """Attacks by a script: which image each of them changes to which gray level."""

    changes: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    stop: int = -1

    def check(self, size): ...

    def perturb(self, part, predict, x, y, classes, warn):
        if len(self.calls) == self.stop:
            raise Stopped
        names = [round(100 * float(image.mean())) - 40 for image in x]
        self.calls.append((part, names))
        attacked = x.clone()
        for row, name in enumerate(names):
            if name in self.changes.get(part, {}):
                attacked[row] = self.changes[part][name]
        warn(f"{part} was here")
        return attacked


CHANGES = {"apgd-ce": {1: 0.51, 4: 0.52}, "apgd-t": {0: 0.51}, "square": {6: 0.52, 7: 0.53}}


def scripted(stop=-1, changes=CHANGES, threat=LinfBall(0.15)):  # noqa: B008
    return Scripted(threat=threat, changes=changes, stop=stop, calls=[])


def test_only_images_that_are_still_correct_are_attacked():
    attack = scripted()
    result = drive(Threshold(), DARK, attack, classes=2)
    assert attack.calls == [
        ("apgd-ce", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("apgd-t", [0, 2, 3, 5, 6, 7, 8]),
        ("fab-t", [2, 3, 5, 6, 7, 8]),
        ("square", [2, 3, 5, 6, 7, 8]),
    ]
    assert result.predictions.tolist() == [1, 1, 0, 0, 1, 0, 1, 1, 0, 0]
    assert [np.flatnonzero(result.robust_after[part]).tolist() for part in STANDARD] == [
        [0, 2, 3, 5, 6, 7, 8],
        [2, 3, 5, 6, 7, 8],
        [2, 3, 5, 6, 7, 8],
        [2, 3, 5, 8],
    ]
    assert (result.attacked, result.outside, result.chunks_done, result.chunks, result.complete) == (28, 0, 1, 1, True)
    assert result.largest == pytest.approx(0.11 / 0.15, abs=1e-5)
    assert {f"{part} was here" for part in STANDARD} < set(result.warnings)
    assert "Square Attack has decreased" in " ".join(result.warnings)
    assert list(result.seconds) == list(STANDARD) and all(value > 0 for value in result.seconds.values())
    attack = scripted()
    result = drive(Threshold(), replace(DARK, y=1 - DARK.y).subset(range(9)), attack, classes=2)  # nothing is correct
    assert attack.calls == [] and result.attacked == 0 and result.complete
    assert not any(result.robust_after[part].any() for part in STANDARD)


def test_chunks_change_which_images_are_attacked_together_and_nothing_else():
    attack, callback = scripted(), Recorder()
    result = drive(Threshold(), DARK, attack, classes=2, chunk_size=4, callback=callback)
    whole = drive(Threshold(), DARK, scripted(), classes=2)
    assert result.predictions.tolist() == whole.predictions.tolist() and result.attacked == whole.attacked
    assert attack.calls[0] == ("apgd-ce", [0, 1, 2, 3]) and attack.calls[-1] == ("square", [8])
    expected = [(0, 3, "apgd-ce", 3), (0, 3, "apgd-t", 2), (0, 3, "fab-t", 2), (0, 3, "square", 2)]
    assert callback.attacks[:4] == expected and callback.attacks[-1] == (2, 3, "square", 1)
    assert len(callback.attacks) == 12


def test_an_image_outside_the_ball_or_the_range_does_not_count():
    below_black = torch.full((1, 2, 2), 0.9)
    below_black[0, 0, 0] = -1e-5
    for threat, gray, counts in (
        (LinfBall(0.15), 0.51, True),
        (LinfBall(0.11), 0.51 + 5e-7, True),
        (LinfBall(0.11), 0.51 + 5e-6, False),
        (LinfBall(0.1), 0.51, False),
        (L2Ball(0.25), 0.51, True),
        (L2Ball(0.2), 0.51, False),
        (LinfBall(0.7), 0.99, True),
        (LinfBall(0.7), 1.0, True),
        (LinfBall(0.7), 1.00001, False),
        (LinfBall(0.9), below_black, False),
        (LinfBall(0.9), torch.nan, False),
    ):
        attack = scripted(changes={"apgd-ce": {0: gray}}, threat=threat)
        result = drive(Threshold(), DARK, attack, classes=2, chunk_size=5, max_examples=1000)
        assert (
            (result.predictions[0] == 1) == counts == (0 in result.examples) == (not result.robust_after["apgd-ce"][0])
        )
        assert result.outside == (not counts) and result.robust_after["square"][1:9].all()
    unbroken = drive(Threshold(), DARK, scripted(changes={"apgd-ce": {0: 0.0}}), classes=2)
    assert unbroken.outside == 0 and unbroken.robust_after["apgd-ce"][0] and unbroken.largest > 1


def test_the_network_itself_predicts_and_not_what_the_attacks_called():
    class Misleading(nn.Module):
        def __init__(self, sign):
            super().__init__()
            self.sign = sign

        def forward(self, x):
            return self.sign * Threshold()(x - 0.05 * self.sign)

    big = Images.of(GRAY.view(10, 1, 1, 1).expand(10, 1, 6, 6), DARK.y.tolist(), ["dark", "light"])
    attack = AutoAttack(LinfBall(0.06), iterations=3, queries=5)
    for sign in (1, -1):
        forward = CountedForward(Misleading(sign))
        result = drive(Threshold(), big, attack, classes=2, forward=forward, max_examples=1000)
        for row, example in result.examples.items():
            assert Threshold()(example[None]).argmax() == 1 == result.predictions[row] != big.y[row]
        broken = [row for row in range(9) if result.predictions[row] == 1]
        assert sorted(result.examples) == broken and all(row >= 4 for row in broken)
        assert result.predictions[9] == 0


def assert_same_outcome(result, expected):
    assert result.predictions.tolist() == expected.predictions.tolist()
    for part, robust in expected.robust_after.items():
        assert result.robust_after[part].tolist() == robust.tolist()
    for name in ("warnings", "largest", "attacked", "outside", "chunks_done", "chunks"):
        assert getattr(result, name) == getattr(expected, name)
    assert result.examples.keys() == expected.examples.keys()
    assert all(torch.equal(result.examples[row], expected.examples[row]) for row in expected.examples)


def test_a_stopped_run_resumes_after_the_last_attack_that_ended(tmp_path):
    for max_examples in (0, 1):
        settings = {"classes": 2, "chunk_size": 5, "max_examples": max_examples}
        whole = drive(Threshold(), DARK, scripted(), **settings)
        for stop in range(8):
            folder = tmp_path / f"{max_examples}-{stop}"
            first, second, third = scripted(stop=stop), scripted(), scripted()
            with pytest.raises(Stopped):
                drive(Threshold(), DARK, first, folder, **settings)
            assert_same_outcome(drive(Threshold(), DARK, second, folder, **settings), whole)
            assert_same_outcome(drive(Threshold(), DARK, third, folder, **settings), whole)
            assert (len(first.calls), len(second.calls), len(third.calls)) == (stop, 8 - stop, 0)


def test_examples_that_were_not_kept_are_missing_later(tmp_path):
    drive(Threshold(), DARK, scripted(), tmp_path, classes=2)
    result = drive(Threshold(), DARK, scripted(), tmp_path, classes=2, max_examples=1000)
    assert result.examples == {} and result.broken == 5


def test_shards_in_one_folder_make_the_whole(tmp_path, wavy, images):
    attack = AutoAttack(LinfBall(0.08), iterations=2, targets=2, queries=10)
    whole = drive(wavy[160], images, attack, chunk_size=5)
    first, second, third = (
        drive(wavy[160], images, attack, tmp_path, chunk_size=5, shard=(k, 3)) for k in (2, 0, 1)
    )  # chunk 2, then 0 and 3, then 1 and 4
    done = [(part.chunks_done, part.complete) for part in (first, second, third)]
    assert done == [(1, False), (3, False), (5, True)]
    assert np.flatnonzero(first.predictions >= 0).tolist() == [10, 11, 12, 13, 14]
    assert first.predictions[10:15].tolist() == whole.predictions[10:15].tolist()
    assert not first.robust_after["square"][:10].any()
    assert_same_outcome(third, whole)
    callback = Recorder()
    combined = drive(wavy[160], images, attack, tmp_path, chunk_size=5, callback=callback)
    assert_same_outcome(combined, whole)
    assert callback.attacks == [] and combined.seconds == third.seconds


def test_a_chunk_that_another_process_has_started_does_not_count_yet(tmp_path):
    with pytest.raises(Stopped):
        drive(Threshold(), DARK, scripted(stop=2), tmp_path, classes=2, chunk_size=5)
    result = drive(Threshold(), DARK, scripted(), tmp_path, classes=2, chunk_size=5, shard=(1, 2))
    assert (result.chunks_done, result.complete) == (1, False) and result.predictions[:5].tolist() == [-1] * 5


def test_the_remaining_time_is_zero_after_the_last_attack(images, wavy):
    attack, callback = AutoAttack(LinfBall(0.08), iterations=2, targets=2, queries=10), Recorder()
    drive(wavy[20], images, attack, chunk_size=10, callback=callback)
    left = callback.seconds_left
    assert len(left) == 12 and all(value > 0 for value in left[:-1]) and left[-1] == 0


def test_refusals(tmp_path):
    for settings, message in (
        ({"shard": (1, 1)}, "0 <= k < n, got 1 of 1"),
        ({"shard": (-1, 2)}, "0 <= k < n"),
        ({"shard": (0, 0)}, "0 <= k < n"),
        ({"chunk_size": 0}, "at least 1 image"),
    ):
        with pytest.raises(UsageError, match=message):
            drive(Threshold(), DARK, scripted(), **settings)
    with pytest.raises(Stopped):
        drive(Threshold(), DARK, scripted(stop=2), tmp_path, classes=2)
    file = tmp_path / "chunk-00000.json"
    before = file.read_bytes()
    other = Threshold()
    other.scale.data.neg_()
    with pytest.raises(UsageError, match=r"predicts the clean images of chunk 0 otherwise.*delete"):
        drive(other, DARK, scripted(), tmp_path, classes=2)
    assert file.read_bytes() == before
    state = json.loads(before)
    for attacks in ([{**state["attacks"][0], "name": "square"}], [*state["attacks"], state["attacks"][0]]):
        file.write_text(json.dumps({**{key: state[key] for key in state if key != "sha256"}, "attacks": attacks}))
        with pytest.raises(UsageError, match=r"chunk-00000\.json holds attacks in another order"):
            drive(Threshold(), DARK, scripted(), tmp_path, classes=2)


def test_files_that_a_killed_write_left_are_ignored(tmp_path):
    whole = drive(Threshold(), DARK, scripted(), tmp_path, classes=2)
    (tmp_path / ".chunk-00000.json.12345").write_text('{"schema": 1, "chu')
    (tmp_path / ".images-00000-fab-t.npz").write_bytes(b"PK")
    assert_same_outcome(drive(Threshold(), DARK, scripted(), tmp_path, classes=2), whole)


def test_deleting_a_damaged_chunk_repairs_the_folder(tmp_path):
    whole = drive(Threshold(), DARK, scripted(), tmp_path, classes=2, chunk_size=5)
    file = tmp_path / "chunk-00001.json"
    file.write_bytes(file.read_bytes()[:30])
    with pytest.raises(UsageError, match=r"chunk-00001\.json.*delete"):
        drive(Threshold(), DARK, scripted(), tmp_path, classes=2, chunk_size=5)
    file.unlink()
    attack = scripted()
    assert_same_outcome(drive(Threshold(), DARK, attack, tmp_path, classes=2, chunk_size=5), whole)
    assert attack.calls[0] == ("apgd-ce", [5, 6, 7, 8])


SCRIPT = """
import sys, time, torch
from pathlib import Path
from torch import nn
from doubly.attacks import attack_context
from doubly.attacks.autoattack import AutoAttack
from doubly.evaluation.autoattack.forward import CountedForward
from doubly.callbacks import Callback
from doubly.data import Images
from doubly.evaluation.autoattack.driver import Driver, Network
from doubly.evaluation.autoattack.eta import Progress, RemainingTime
from doubly.evaluation.autoattack.state import ChunkFiles
from doubly.evaluation.memory import MicrobatchLimit
from doubly.threat import LinfBall

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 5))
x = torch.rand(12, 1, 6, 6)
images = Images.of(x, model(x).argmax(1), list("abcde"))
attack = AutoAttack(LinfBall(0.03), iterations=3, queries=20)
attacks, passes_left = [], None  # passes before it waits to be killed


def forward(x):
    global passes_left
    if passes_left is not None:
        passes_left -= 1
        if passes_left == 0:
            print("in the middle of an attack", flush=True)
            time.sleep(600)
    return model(x)


class Recorder(Callback):
    def on_attack(self, chunk, chunks, part, robust, seconds_left):
        global passes_left
        attacks.append((chunk, part))
        print(chunk, part, flush=True)
        passes_left = 3 if __name__ == "__main__" else None


def run(folder):
    with attack_context(model, "eval"):
        progress = Progress(RemainingTime(attack, 5, 12), Recorder())
        network = Network(model, CountedForward(forward), 5, MicrobatchLimit())
        driver = Driver(network, images, attack, ChunkFiles(folder, {}), progress, 6, max_examples=1000)
        return driver.combine(driver.run_shard())


if __name__ == "__main__":
    run(Path(sys.argv[1]))
"""


def test_killed_in_the_middle_of_an_attack_and_resumed_is_as_if_nothing_had_happened(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "state"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE, text=True, env=environment)
    with process:
        first = process.stdout.readline().split()
        assert process.stdout.readline() == "in the middle of an attack\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and first == ["0", "apgd-ce"]
    records = json.loads((folder / "chunk-00000.json").read_text())["attacks"]
    assert [record["name"] for record in records] == ["apgd-ce"]

    module = {"__name__": "imported"}
    with torch.random.fork_rng():
        exec(SCRIPT, module)
    whole = module["run"](None)
    assert len(module["attacks"]) == 8
    module["attacks"].clear()
    resumed = module["run"](folder)
    assert module["attacks"] == [(chunk, part) for chunk in (0, 1) for part in STANDARD][1:]
    assert_same_outcome(resumed, whole)
    assert resumed.seconds["apgd-ce"] >= records[0]["seconds"] and 0 < resumed.robust_after["square"].sum() < 12
