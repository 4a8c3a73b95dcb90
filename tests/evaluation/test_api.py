"""Evaluation from Python: results that are known by hand, what is written, and what is refused."""

import json
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import doubly
from doubly.attacks import ATTACKS, FGSM, PGD
from doubly.attacks.autoattack import AutoAttack
from doubly.bilevel import SignStep
from doubly.callbacks import Callback
from doubly.data import Images
from doubly.errors import NonFiniteError, UsageError
from doubly.evaluation import result as result_module
from doubly.evaluation.api import evaluate
from doubly.evaluation.comparison import compare
from doubly.evaluation.intervals import weakest_interval
from doubly.evaluation.result import EvalResult
from doubly.losses import LogitMargin
from doubly.rundir import read_json
from doubly.seeding import generator
from doubly.threat import L2Ball, LinfBall


@pytest.fixture(autouse=True, scope="module")
def few_resamples():
    """Intervals have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_module, "weakest_interval", lambda *arguments: weakest_interval(*arguments[:4], 40))
        yield


class Threshold(nn.Module):
    """Predicts 1 where the mean pixel exceeds a half: an attack of radius e breaks exactly those nearer than e."""

    def __init__(self, further_classes=0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))
        self.further_classes = further_classes  # that are never predicted

    def forward(self, x):
        margin = self.scale * (x.mean((1, 2, 3)) - 0.5)
        return torch.stack([-margin, margin, *[0 * margin - 9] * self.further_classes], 1)


class Constant(nn.Module):
    """Predicts 1 for every image."""

    def forward(self, x):
        return torch.tensor([0.0, 2.0, 0.0, -1.0]).expand(len(x), 4) + 0 * x.mean((1, 2, 3))[:, None]


GRAY = torch.tensor([0.1, 0.45, 0.48, 0.52, 0.55, 0.9, 0.3])
X = GRAY.view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
Y = torch.tensor([0, 0, 0, 1, 1, 1, 1])  # the last one is wrong without an attack
IMAGES = Images.of(X, Y, ["dark", "light"])
BALL = LinfBall(0.1)
ATTACK = PGD(BALL, 5, SignStep(0.05))
ENSEMBLE = AutoAttack(BALL, ("apgd-ce", "square"), iterations=5, queries=20)
FAST = {"trust": False}


def many_images(n=40, seed=0):
    """Gray images around a half, half of them light."""
    y = torch.arange(n) % 2
    x = 0.5 + (y - 0.5) * torch.rand(n, generator=torch.Generator().manual_seed(seed))
    return x.view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous(), y


def as_json(summary):
    return json.loads(json.dumps(summary, allow_nan=False))


class Recorder(Callback):
    def __init__(self):
        self.messages, self.images, self.attacks, self.closed = [], [], [], 0

    def on_message(self, message):
        self.messages.append(message)

    def on_images(self, done, total):
        self.images.append((done, total))

    def on_attack(self, chunk, chunks, part, robust, seconds_left):
        self.attacks.append((chunk, chunks, part, robust))

    def close(self):
        self.closed += 1


def test_results_that_are_known_by_hand_on_any_kind_of_data():
    for data in (IMAGES, (X, Y), (X.numpy(), Y.numpy()), TensorDataset(X, Y)):
        result = doubly.evaluate(Threshold(), data, threat=doubly.LinfBall(0.1), attacks=["pgd", "margin"])
        assert isinstance(result, EvalResult) and result.trust["verdict"] == "unclear"  # of 7 images
        assert (result.sa, result.ra_pgd, result.accuracy("margin")) == (6 / 7, 2 / 7, 2 / 7)
        assert result.correct["pgd"].tolist() == [True, False, False, False, False, True, False]
    summary = evaluate(Threshold(), IMAGES, attacks=[ATTACK], seed=3, chunk_size=4, about={"note": "x"}).summary()
    assert summary["per_class"]["dark"].items() >= {"n": 3, "sa": 1.0, "ra_pgd": 1 / 3}.items()
    assert summary["per_class"]["light"].items() >= {"n": 4, "sa": 0.75, "ra_pgd": 0.25}.items()
    assert summary["confusion"] == {"clean": [[3, 0], [1, 3]], "pgd": [[1, 2], [3, 1]]}
    protocol = summary["protocol"]
    assert protocol["attack"]["threat"]["radius"] == 0.1 and protocol["attack"]["steps"] == 5
    assert (protocol["seed"], protocol["chunk"], protocol["note"]) == (3, 4, "x")
    assert protocol["data_sha256"] == IMAGES.sha256()


def test_an_l2_threat_moves_the_mean_of_four_pixels_by_half_its_radius():
    for radius, correct in ((0.03, 6), (0.05, 4), (0.11, 2), (0.9, 0)):
        attacks = ["pgd", AutoAttack(L2Ball(radius), ("apgd-ce",), 20)]
        result = evaluate(Threshold(), IMAGES, L2Ball(radius), attacks, **FAST)
        assert result.correct["pgd"].sum() == result.correct["autoattack_in_part"].sum() == correct
        assert result.protocol["attack"]["threat"]["kind"] == "threat.l2" and result.autoattack["norm"] == "L2"
        assert result.examples["outside"] == 0 and result.examples["largest"] <= 1 + 1e-5


def test_without_a_threat_it_is_that_of_the_attacks():
    result = evaluate(Threshold(), IMAGES, attacks=["pgd"], **FAST)
    assert result.protocol["attack"]["threat"]["radius"] == 8 / 255
    result = evaluate(Threshold(), IMAGES, attacks=[PGD(L2Ball(0.2), 3), "quick"], **FAST)
    assert (result.autoattack["epsilon"], result.autoattack["norm"], result.label) == (0.2, "L2", "RA-APGD")
    seeded = replace(ENSEMBLE, seed=5)
    assert evaluate(Threshold(), IMAGES, attacks=[seeded], **FAST).autoattack["seed"] == 5


def test_a_constant_and_a_robust_classifier():
    y = torch.tensor([0, 1, 1, 2] * 3)
    constant = evaluate(Constant(), (torch.rand(12, 1, 2, 2), y), BALL, ["pgd", "margin", ENSEMBLE]).summary()
    assert {constant[key] for key in ("sa", "ra_pgd", "ra_margin", "ra_autoattack_in_part")} == {0.5}
    assert [row["ra_pgd"] for row in constant["per_class"].values()] == [0, 1, 0]
    assert constant["ra_tail_30_classes"] == ["0"] and constant["intervals"]["ra_tail_30"][0] == 0
    x, y = torch.tensor([0.1, 0.9] * 5).view(-1, 1, 1, 1).expand(-1, 1, 2, 2), torch.tensor([0, 1] * 5)
    robust = evaluate(Threshold(), (x, y), BALL, ["pgd", "margin", ENSEMBLE])
    assert all(correct.all() for correct in robust.correct.values()) and robust.trust["verdict"] == "unclear"


@pytest.mark.filterwarnings("ignore:PGD with 0 steps")  # so that the start is all that the seed decides
def test_the_seed_decides_every_random_number():
    one, again, other = (
        evaluate(Threshold(), many_images(), attacks=[PGD(BALL, 0)], seed=seed, **FAST) for seed in (7, 7, 8)
    )
    assert np.array_equal(one.losses["pgd"], again.losses["pgd"])
    assert not np.array_equal(one.losses["pgd"], other.losses["pgd"])


def test_a_part_of_the_images_is_always_the_same_and_in_proportion():
    x, y = many_images()
    data = Images.of(x[y.argsort()], y.sort()[0])
    one, again = (evaluate(Threshold(), data, attacks=[ATTACK], images=10, **FAST) for _ in range(2))
    np.testing.assert_array_equal(one.ids, again.ids)
    assert one.n == 10 and np.bincount(one.y).tolist() == [5, 5] and len(set(one.ids)) == 10
    np.testing.assert_array_equal(one.y, data.y.numpy()[one.ids])
    assert evaluate(Threshold(), data, attacks=[ATTACK], images=1000, **FAST).n == 40


def test_images_at_the_beginning_can_be_skipped_and_the_protocol_says_so(tmp_path):
    data = Images.of(*many_images())
    all_later, later = (
        evaluate(Threshold(), data, attacks=[ATTACK], skip_images=30, images=count, **FAST) for count in (None, 4)
    )
    assert all_later.ids.tolist() == list(range(30, 40)) and all_later.protocol["skip_images"] == 30
    assert np.bincount(later.y).tolist() == [2, 2] and later.ids.min() >= 30
    first = evaluate(Threshold(), data, attacks=[ATTACK], images=4, **FAST)
    assert "skip_images" not in first.protocol
    with pytest.raises(UsageError, match="differ"):
        compare(first, later)
    with pytest.raises(UsageError, match="leaves out 40 of 40 images"):
        evaluate(Threshold(), data, attacks=[ATTACK], skip_images=40, **FAST)


def test_autoattack_on_a_part_of_the_images_is_compared_on_those(tmp_path):
    result = evaluate(Threshold(), many_images(), BALL, ["pgd", ENSEMBLE], autoattack_images=8, output=tmp_path)
    run = result.predictions["autoattack_in_part"] >= 0
    assert run.sum() == 8 and np.bincount(result.y[run]).tolist() == [4, 4]
    gap = result.correct["pgd"][run].mean() - result.correct["autoattack_in_part"][run].mean()
    check = next(line for line in result.trust["lines"] if line["name"] == "PGD minus AutoAttack")
    assert check["value"] == pytest.approx(gap) and "the same 8 images" in check["text"]
    assert read_json(tmp_path / "evaluation.json")["autoattack"]["n"] == 8
    np.testing.assert_array_equal(result.robust_after["square"], result.correct["autoattack_in_part"])


def test_the_tail_is_also_selected_on_validation_images():
    """Dark images are weak here, light ones in the validation set; further classes there do not count."""
    x = torch.tensor([0.45, 0.45, 0.3, 0.9, 0.9, 0.9]).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    y = torch.tensor([0, 0, 0, 1, 1, 1])
    result = evaluate(Threshold(), (x, y), BALL, ["pgd"], validation=(1 - x, 1 - y), **FAST)
    tail = result.summary()["tail"]["pgd"]
    assert (tail["value"], tail["classes"]) == (pytest.approx(1 / 3), ["0"])
    assert tail["validated"] == {"value": 1.0, "classes": ["1"], "n_validation": 6}
    assert result.validation.n == 6 and result.validation.ra_pgd == result.ra_pgd
    others = X, torch.tensor([0, 0, 1, 2, 2, 2, 2])
    result = evaluate(Constant(), (X, Y), attacks=[ATTACK], validation=others, tail_share=1.0, **FAST)
    assert set(result.summary()["tail"]["pgd"]["validated"]["classes"]) <= {"0", "1"}


def test_networks_and_data_need_not_have_the_same_classes(tmp_path):
    silent = evaluate(Threshold(further_classes=3), IMAGES, attacks=[ATTACK], **FAST)
    assert silent.classes == ("dark", "light") and silent.ra_pgd == 2 / 7
    result = evaluate(Constant(), Images.of(X, 0 * Y, ["dark"]), attacks=[ATTACK], **FAST)
    assert result.classes == ("dark", "1") and result.confusion("pgd") == [[0, 7], [0, 0]]
    assert result.summary()["ra_tail_30_classes"] == ["dark"]

    class Corner(Threshold):
        """Predicts 2 where two pixels differ as those of no clean image do."""

        def forward(self, x):
            return torch.cat([super().forward(x), (30 * x[:, 0, 0, 0] - 21 * x[:, 0, 1, 1] - 10)[:, None]], 1)

    attack = AutoAttack(LinfBall(0.3), ("apgd-ce",), iterations=5)
    result = evaluate(Corner(), IMAGES, LinfBall(0.3), [attack], **FAST)
    assert result.predictions["clean"].max() < result.predictions["autoattack_in_part"].max() == 2
    assert np.sum(result.summary()["confusion"]["autoattack_in_part"]) == 7

    class Three(Threshold):
        def forward(self, x):
            dark, light = super().forward(x).unbind(1)
            return torch.stack([dark, torch.full_like(dark, -9), light], 1)

    data = Images.of(X, 2 * Y, ["dark", "none", "light"])
    result = evaluate(Three(), data, BALL, ["pgd", ENSEMBLE], output=tmp_path, tail_share=1.0, **FAST).summary()
    assert result["tail"]["pgd"]["classes"] == ["light", "dark"] and result["worst_class"]["name"] == "light"
    empty = result["per_class"]["none"]
    assert empty["n"] == 0 and {value for key, value in empty.items() if key != "n"} == {None}
    assert EvalResult.load(tmp_path).summary() == as_json(result)


def test_one_class_or_one_image_is_enough(tmp_path):
    for x, y in ((X, 0 * Y), (X[:1], Y[:1])):
        attacks = ["pgd", "margin", ENSEMBLE]
        result = evaluate(Threshold(), (x, y), BALL, attacks, output=tmp_path, save_examples="npz")
        summary = as_json(result.summary())
        assert summary["ra_tail_30"] == summary["ra_pgd"] == summary["worst_class"]["ra_pgd"]
        assert summary["weights"][0]["correlation_with_class_accuracy"] == {"pearson": None, "spearman": None}
        assert EvalResult.load(tmp_path).summary() == summary
    one = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    result = evaluate(one, (X, 0 * Y), BALL, ["pgd"], output=tmp_path, **FAST)
    assert result.ra_pgd == 1 and (EvalResult.load(tmp_path).margins["pgd"] == np.inf).all()


def darken(model, x, y, generator):
    return -torch.full_like(x, 0.04).minimum(x)


class Darken:
    def __call__(self, model, x, y, generator):
        return darken(model, x, y, generator)


@dataclass(frozen=True)
class DarkenValue(Darken):
    size: float = 0.04


def test_every_attack_in_the_table_can_be_evaluated_by_name(tmp_path):
    names = [name for name, kind in ATTACKS.items() if kind.stays_inside]
    result = evaluate(Threshold(), IMAGES, BALL, names, output=tmp_path, **FAST)
    assert result.attacks == names and result.accuracy("fgsm") == 2 / 7
    assert set(EvalResult.load(tmp_path).predictions) == {"clean", *names}


def test_any_callable_is_an_attack_and_can_be_saved(tmp_path):
    def loss(logits, y):
        return LogitMargin()(logits, y)

    for attacks, name in (
        ([Darken()], "darken"),
        ({"own": Darken()}, "own"),
        ([darken], "function"),
        ([DarkenValue()], "darkenvalue"),
        ([PGD(BALL, 2, loss=loss)], "pgd"),
    ):
        result = evaluate(Threshold(), IMAGES, attacks=attacks, output=tmp_path, **FAST)
        assert result.attacks == [name] and EvalResult.load(tmp_path).summary() == as_json(result.summary())
        if name != "pgd":
            assert result.correct[name].tolist() == [True, True, True, False, True, True, False]


def test_a_custom_attack_is_held_to_the_threat():
    result = evaluate(Threshold(), IMAGES, BALL, [lambda model, x, y, generator: 1 - 2 * x])
    assert result.examples["outside"] > 0 and result.trust["verdict"] == "suspicious"


def test_evaluations_within_different_balls_are_not_compared():
    wide, narrow = (evaluate(Threshold(), IMAGES, LinfBall(radius), ["margin"], **FAST) for radius in (0.3, 0.01))
    with pytest.raises(UsageError, match="differ in"):
        compare(wide, narrow, resamples=1)


def test_what_is_written_is_what_is_returned(tmp_path):
    folder = tmp_path / "deep" / "folder"
    for settings in (
        {},
        {"attacks": []},
        {"attacks": {"weak": FGSM(BALL), "pgd": ATTACK}, "trust": False},
        {"attacks": ["margin", ENSEMBLE], "tail_share": 0.6, "tail_rounding": "ceil"},
        {"images": 4, "chunk_size": 3, "seed": 5, "about": {"note": "ß"}},
        {"attacks": [ATTACK], "weights_r": (2.0, 0.5), "weights_normalize": "mean_one"},
        {"attacks": [ATTACK], "weights_r": ()},
    ):
        result = evaluate(Threshold(), IMAGES, output=str(folder), **settings)
        loaded = EvalResult.load(folder)
        assert loaded.summary() == as_json(result.summary()) == read_json(folder / "evaluation.json")
        assert loaded.attacks == result.attacks and loaded.classes == result.classes
        shutil.rmtree(folder)


def test_margins_are_kept_beside_the_losses(tmp_path):
    result = evaluate(Threshold(), IMAGES, BALL, ["pgd", "margin"], output=tmp_path, **FAST)
    loaded = EvalResult.load(tmp_path)
    assert list(loaded.margins) == list(result.margins) == ["clean", "pgd", "margin"] == list(loaded.predictions)
    sign = np.where(result.y == 1, 1, -1)
    np.testing.assert_allclose(result.margins["clean"], 20 * sign * (GRAY.numpy() - 0.5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.margins["pgd"], result.margins["clean"] - 20 * 0.1, rtol=1e-4, atol=1e-4)


def test_the_gallery_shows_what_was_evaluated(tmp_path):
    """The same attack with the same random numbers gives the stored images and predictions."""
    x, y = torch.rand(40, 1, 2, 3, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 2
    attack, network = PGD(BALL, 2, SignStep(0.1)), Threshold()
    for chunk_size, pixels in ((7, x), (40, x), (500, (x * 255).round().to(torch.uint8))):
        data = Images.of(pixels, y).subset(torch.arange(39, 2, -1))
        settings = {"output": tmp_path, "seed": 3, "chunk_size": chunk_size}
        result = evaluate(network, data, attacks=["margin", attack], **settings, **FAST)
        attacked = []
        for index, start in enumerate(range(0, 37, chunk_size)):
            part, labels = data.pixels(slice(start, start + chunk_size)), data.y[start : start + chunk_size]
            attacked.append(part + attack(network, part, labels, generator(3, 0, index, "evaluation")))
        with np.load(tmp_path / "gallery.npz", allow_pickle=False) as arrays:
            rows = 39 - arrays["ids"]
            order = np.argsort(-result.losses["pgd"], kind="stable")
            np.testing.assert_array_equal(rows, [*order[:12], *order[::-1][:12]])
            for name, points in (("clean", data.pixels(slice(None))), ("attacked", torch.cat(attacked))):
                levels = (255 * points[rows]).round().permute(0, 2, 3, 1).numpy()
                np.testing.assert_array_equal(arrays[name], levels)
                np.testing.assert_array_equal(arrays[f"answers_{name}"], network(points[rows]).argmax(1).numpy())
    evaluate(network, IMAGES, BALL, ["margin"], output=tmp_path, **FAST)
    assert not (tmp_path / "gallery.npz").exists()  # that of the earlier evaluation does not stay


def test_pictures_are_scored_as_saved_and_stay_inside_the_ball(tmp_path):
    y = torch.arange(12) % 2
    x = (127.5 + (2 * y - 1) * torch.arange(12)).round().to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 5, 5)
    data = Images.of(x.contiguous(), y, ["<script>", "a/../b\n\x00"])
    for threat, levels in ((LinfBall(8 / 255), 8), (LinfBall(3 / 255), 3), (L2Ball(0.05), None)):
        settings = {"output": tmp_path, "save_examples": "png", "max_examples": 9}
        result = evaluate(Threshold(), data, threat, ["pgd", "margin"], **settings, **FAST)
        saved = read_json(tmp_path / "evaluation.json")["examples"]["saved"]
        assert list(saved) == ["pgd", "margin"] and result.examples["saved"] == saved
        for name, info in saved.items():
            files = sorted((tmp_path / "examples" / name).iterdir())
            assert len(files) == info["n"] == 9
            correct = 0
            for file in files:
                row = int(file.name[:6])
                assert file.name.endswith(f"class{int(y[row]):03d}.png")
                with Image.open(file) as picture:
                    pixels = np.asarray(picture).astype(int)
                if levels is not None:
                    assert np.abs(pixels - data.x[row, 0].numpy().astype(int)).max() <= levels
                correct += int((pixels.mean() / 255 > 0.5) == bool(y[row]))
            assert info["accuracy"] == pytest.approx(correct / 9)


def test_arrays_hold_what_autoattack_has_broken(tmp_path):
    data = IMAGES.subset([6, 5, 4, 3, 2, 1, 0])
    settings = {"autoattack_images": 5, "save_examples": "npz", "max_examples": 2, "output": tmp_path}
    result = evaluate(Threshold(), data, BALL, [ATTACK, ENSEMBLE], **settings, **FAST)
    scores = {"outside": 0, "accuracy": 0.0, "accuracy_before": 0.0}
    assert result.examples["saved"]["autoattack_in_part"] == {"format": "npz", "n": 2, **scores}
    with np.load(tmp_path / "examples" / "autoattack_in_part" / "examples.npz") as arrays:
        rows = np.flatnonzero(np.isin(result.ids, arrays["ids"]))
        assert result.correct["clean"][rows].all() and not result.correct["autoattack_in_part"][rows].any()
        assert (result.predictions["autoattack_in_part"][rows] >= 0).all()
        difference = np.abs(arrays["x"] - X.numpy()[arrays["ids"]])
        assert 0 < difference.max() <= 0.1 + 1e-6
        np.testing.assert_array_equal(arrays["y"], Y.numpy()[arrays["ids"]])
    assert EvalResult.load(tmp_path).examples == as_json(result.examples)


def test_images_that_autoattack_broke_before_they_were_asked_for_are_said_to_be_missing(tmp_path):
    callback = Recorder()
    evaluate(Threshold(), IMAGES, BALL, [ENSEMBLE], output=tmp_path, **FAST)
    settings = {"output": tmp_path, "save_examples": "npz", "callbacks": [callback]}
    result = evaluate(Threshold(), IMAGES, BALL, [ENSEMBLE], **settings, **FAST)
    assert "saved" not in result.examples and "were not kept: to have them, delete" in callback.messages[0]


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """All of AutoAttack, in so large a ball that its first attack breaks everything, which takes seconds."""
    folder = tmp_path_factory.mktemp("complete")
    return evaluate(Threshold(), IMAGES, LinfBall(0.45), ["pgd", "autoattack"], output=folder), folder


def test_all_of_autoattack_is_ra_aa_and_is_loaded(complete):
    result, folder = complete
    summary = read_json(folder / "evaluation.json")
    assert result.ra_aa == summary["ra_aa"] == 0 and result.label == "RA-AA"
    assert summary["ra_aa_tail_30"] == 0 and summary["worst_class_ra_aa"] == {
        "name": "dark",
        "ra_aa": 0,
        "tied": ["light"],
    }
    assert list(summary["autoattack"]["accuracy_after"].values()) == [0] * 4
    assert summary["autoattack"]["substitutions"] and summary["trust"]["verdict"] == "unclear"
    assert result.predictions["autoattack"].tolist() == [1, 1, 1, 0, 0, 0, 0]
    loaded = EvalResult.load(folder)
    assert loaded.summary() == as_json(result.summary()) and loaded.ra_aa == result.ra_aa


def test_a_later_evaluation_reuses_autoattack_only_of_the_same_network_images_and_ball(complete, tmp_path):
    result, folder = complete
    other = Threshold()
    other.scale.data += 1
    dropped = "RA-AA of the earlier evaluation is dropped"
    for number, (change, model, radius, settings, message) in enumerate(
        (
            (None, Threshold(), 0.45, {"seed": 1}, "RA-AA is reused: it was computed for this network"),
            (None, other, 0.45, {}, dropped),
            (None, Threshold(), 0.45, {"images": 4}, dropped),
            (lambda chunk: chunk.unlink(), Threshold(), 0.45, {}, dropped),
            (lambda chunk: chunk.write_text("{}"), Threshold(), 0.45, {}, dropped),
            (None, Threshold(), 0.1, {}, None),
        )
    ):
        copy, callback = tmp_path / str(number), Recorder()
        shutil.copytree(folder, copy)
        if change is not None:
            change(next((copy / "autoattack").rglob("chunk-00000.json")))
        settings = {"output": copy, "callbacks": [callback], "trust": False, **settings}
        again = evaluate(model, IMAGES, LinfBall(radius), ["pgd"], **settings)
        reused = number == 0
        assert ("ra_aa" in read_json(copy / "evaluation.json")) == (again.ensemble is not None) == reused
        assert not callback.messages if message is None else callback.messages[0].startswith(message)
        if reused:
            assert again.predictions["autoattack"].tolist() == result.predictions["autoattack"].tolist()
            assert again.protocol["seed"] == 1


def test_shards_are_incomplete_until_a_call_combines_them(tmp_path):
    def run(**settings):
        data = X[:, :, [0] * 6][..., [0] * 6].contiguous(), Y
        return evaluate(Threshold(), data, BALL, [ENSEMBLE], autoattack_chunk_size=3, **FAST, **settings)

    whole, first = run(), run(shard=(0, 2), state=tmp_path)
    assert first.label == "AutoAttack, incomplete" and first.ensemble is None
    assert first.autoattack["chunks"] == "2 of 3" and first.summary()["autoattack"]["complete"] is False
    assert "ra_aa" not in first.summary()
    run(shard=(1, 2), state=tmp_path)
    combined = run(state=tmp_path)
    assert combined.label == whole.label == ENSEMBLE.label
    for name in ("predictions", "robust_after"):
        ours, theirs = getattr(combined, name), getattr(whole, name)
        assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_callbacks_are_told_the_progress_and_closed():
    callback = Recorder()
    settings = {"chunk_size": 4, "autoattack_chunk_size": 4, "callbacks": [callback]}
    evaluate(Threshold(), IMAGES, BALL, ["pgd", ENSEMBLE], **settings, **FAST)
    assert callback.images == [(4, 7), (7, 7)] and callback.closed == 1
    parts = [call[:3] for call in callback.attacks]
    assert parts == [(chunk, 2, part) for chunk in (0, 1) for part in ("apgd-ce", "square")]
    assert callback.attacks[-1][3] == 1


def test_the_network_and_the_generators_are_left_as_they_were(tmp_path):
    for attacks in (["pgd"], [ENSEMBLE]):
        network = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), Threshold()).train()
        network[1].eval()
        network[2].scale.grad = torch.tensor(1.0)
        before = {name: value.clone() for name, value in network.state_dict().items()}
        state = torch.get_rng_state()
        first = evaluate(network, IMAGES, BALL, attacks, output=tmp_path, save_examples="png", curve_images=3)
        assert [module.training for module in network.modules()] == [True, True, False, True]
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
        assert all(p.requires_grad for p in network.parameters()) and network[2].scale.grad == 1
        assert network[0].weight.grad is None and torch.equal(state, torch.get_rng_state())
        network.eval()
        second = evaluate(network, IMAGES, BALL, attacks)
        assert all(np.array_equal(classes, second.predictions[name]) for name, classes in first.predictions.items())


def test_refusals(tmp_path):
    bad_pixels, bad_labels = (GRAY.view(-1, 1, 1, 1) * 3, Y), (GRAY.view(-1, 1, 1, 1), Y - 1)
    four_channels = torch.rand(4, 4, 5, 5), torch.arange(4) % 2
    png = {"output": tmp_path, "save_examples": "png"}
    nan = nn.Sequential(Threshold(), nn.Threshold(1e9, float("nan")))
    (tmp_path / "file").write_text("")
    for call, message in (
        (lambda: evaluate(Threshold(), IMAGES, PGD()), "third argument is the threat, got PGD: pass attacks"),
        (lambda: evaluate(Threshold(), IMAGES, ["pgd"]), "third argument is the threat, got list"),
        (lambda: evaluate(Threshold(), IMAGES, 8 / 255), "third argument is the threat, got float"),
        (lambda: evaluate(lambda x: Threshold()(x), IMAGES), "first argument is the network"),
        (lambda: evaluate(IMAGES, Threshold()), "first argument is the network"),
        (lambda: evaluate(Threshold(), iter([(X, Y)])), "pass one of these, or a DataLoader"),
        (lambda: evaluate(Threshold(), bad_pixels), "in \\[0,1\\]"),
        (lambda: evaluate(Threshold(), bad_labels), "labels reach from -1"),
        (lambda: evaluate(Threshold(), IMAGES, attacks=["fab"]), "no attack 'fab'"),
        (lambda: evaluate(Threshold(), IMAGES, LinfBall(0.01), [ATTACK]), "an evaluation has one threat"),
        (lambda: evaluate(Threshold(), IMAGES, step=20), "no setting 'step': it has output, seed"),
        (lambda: evaluate(Threshold(), IMAGES, images=0), "images must be at least 1, got 0"),
        (lambda: evaluate(Threshold(), IMAGES, save_examples="png"), "give an output"),
        (lambda: evaluate(Threshold(), four_channels, **png), "1 or 3 channels"),
        (lambda: evaluate(Threshold(), IMAGES, output=tmp_path / "file" / "x"), "not a folder that may be written"),
        (lambda: evaluate(Threshold(), IMAGES, shard=(0, 2)), "ask for autoattack or quick as well"),
        (lambda: evaluate(nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), IMAGES), "returns 1 logits"),
        (lambda: evaluate(nn.Conv2d(1, 2, 1), IMAGES), r"logits of shape \(7, classes\)"),
        (lambda: evaluate(nan, IMAGES), "the model's logits"),
    ):
        with pytest.raises((UsageError, NonFiniteError), match=message) as error:
            call()
        assert "\n" not in str(error.value)
    evaluate(Threshold(), IMAGES, BALL, [ENSEMBLE], state=tmp_path / "state", **FAST)
    with pytest.raises(UsageError, match="belongs to another evaluation: its epsilon"):  # before any attack
        evaluate(Threshold(), IMAGES, LinfBall(0.2), ["autoattack"], state=tmp_path / "state", **FAST)
