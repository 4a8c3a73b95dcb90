import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import doubly
from doubly.attacks import FGSM, NFGSM, PGD
from doubly.attacks.autoattack import AutoAttack
from doubly.bilevel import SignStep
from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation import result
from doubly.evaluation.api import evaluate
from doubly.evaluation.autoattack.runner import Callback
from doubly.evaluation.comparison import compare
from doubly.evaluation.intervals import bootstrap
from doubly.evaluation.result import EvalResult
from doubly.losses import LogitMargin
from doubly.rundir import read_json
from doubly.seeding import generator
from doubly.threat import L2Ball, LinfBall


@pytest.fixture(autouse=True, scope="module")
def few_resamples():
    """Intervals have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result, "bootstrap", lambda correct, y, statistic, n: bootstrap(correct, y, statistic, 40))
        yield


class Threshold(nn.Module):
    """Class 1 where the mean pixel exceeds a half: an attack of radius e turns exactly those nearer than e to it."""

    def __init__(self, others=0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))
        self.others = others  # classes that are never answered

    def forward(self, x):
        margin = self.scale * (x.mean((1, 2, 3)) - 0.5)
        return torch.stack([-margin, margin, *[0 * margin - 9] * self.others], 1)


class Constant(nn.Module):
    """Class 1, always."""

    def forward(self, x):
        return torch.tensor([0.0, 2.0, 0.0, -1.0]).expand(len(x), 4) + 0 * x.mean((1, 2, 3))[:, None]


class Corner(Threshold):
    """Answers 2 where two pixels differ as those of no clean image do."""

    def forward(self, x):
        logits = super().forward(x)
        return torch.cat([logits, (30 * x[:, 0, 0, 0] - 21 * x[:, 0, 1, 1] - 10)[:, None]], 1)


GRAY = torch.tensor([0.1, 0.45, 0.48, 0.52, 0.55, 0.9, 0.3])
X = GRAY.view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
Y = torch.tensor([0, 0, 0, 1, 1, 1, 1])  # the last one is wrong from the start
IMAGES = Images.of(X, Y, ["dark", "light"])
EPSILON = LinfBall(0.1)
ATTACK = PGD(EPSILON, 5, SignStep(0.05))
SOME = AutoAttack(EPSILON, ("apgd-ce", "square"), iterations=5, queries=20)


def many(n=40, seed=0):
    """Gray images around a half, half of them light."""
    y = torch.arange(n) % 2
    x = 0.5 + (y - 0.5) * torch.rand(n, generator=torch.Generator().manual_seed(seed))
    return x.view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous(), y


def line(found, name):
    return next(each for each in found.trust["lines"] if each["name"] == name)


def plain(summary):
    return json.loads(json.dumps(summary, allow_nan=False))


@pytest.mark.parametrize("data", [IMAGES, (X, Y), (X.numpy(), Y.numpy()), TensorDataset(X, Y)], ids=lambda d: type(d))
def test_three_lines_on_any_data(data):
    found = doubly.evaluate(Threshold(), data, threat=doubly.LinfBall(0.1), attacks=["pgd", "margin"])
    assert isinstance(found, EvalResult) and (found.sa, found.ra_pgd, found.accuracy("margin")) == (6 / 7, 2 / 7, 2 / 7)
    assert found.correct["pgd"].tolist() == [True, False, False, False, False, True, False]
    assert found.protocol["attack"]["steps"] == 20 and found.trust["verdict"] == "fine"


@pytest.mark.parametrize(("radius", "right"), [(0.03, 6), (0.05, 4), (0.11, 2), (0.9, 0)])
def test_an_l2_threat_moves_the_mean_of_four_pixels_by_half_its_radius(radius, right):
    found = evaluate(Threshold(), IMAGES, L2Ball(radius), ["pgd", AutoAttack(L2Ball(radius), ("apgd-ce",), 20)])
    assert found.correct["pgd"].sum() == found.correct["autoattack_in_part"].sum() == right
    assert found.protocol["attack"]["threat"]["kind"] == "threat.l2" and found.autoattack["norm"] == "L2"
    assert found.examples["outside"] == 0 and found.examples["largest"] <= 1 + 1e-5


def test_without_a_threat_it_is_that_of_the_attacks():
    assert evaluate(Threshold(), IMAGES, attacks=["pgd"]).protocol["attack"]["threat"]["radius"] == 8 / 255
    found = evaluate(Threshold(), IMAGES, attacks=[PGD(L2Ball(0.2), 3), "quick"])
    assert (found.autoattack["epsilon"], found.autoattack["norm"], found.label) == (0.2, "L2", "RA-APGD")


def test_a_constant_classifier_is_right_about_its_class_alone():
    y = torch.tensor([0, 1, 1, 2] * 3)
    found = evaluate(Constant(), (torch.rand(12, 1, 2, 2), y), EPSILON, ["pgd", "margin", SOME]).summary()
    assert found["sa"] == found["ra_pgd"] == found["ra_margin"] == found["ra_autoattack_in_part"] == 0.5
    assert found["ra_tail_30"] == 0 and found["ra_tail_30_classes"] == ["0"]
    assert [row["ra_pgd"] for row in found["per_class"].values()] == [0, 1, 0]
    assert found["confusion"]["pgd"] == [[0, 3, 0], [0, 6, 0], [0, 3, 0]]
    assert found["intervals"]["ra_tail_30"][0] == 0 < found["intervals"]["ra_tail_30"][1] < 0.7
    plain(found)


def test_a_perfectly_robust_classifier_stays_right():
    x, y = torch.tensor([0.1, 0.9] * 5).view(-1, 1, 1, 1).expand(-1, 1, 2, 2), torch.tensor([0, 1] * 5)
    found = evaluate(Threshold(), (x, y), EPSILON, ["pgd", "margin", SOME])
    assert all(given.all() for given in found.correct.values())
    assert found.ra_tail_30 == 1 and found.interval("pgd", "worst")[2] == 1 > found.interval("pgd", "worst")[1] > 0.5
    assert found.trust["verdict"] == "fine"


def test_a_random_network_is_right_by_chance():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(200, 1, 4, 4, generator=generator), torch.randint(5, (200,), generator=generator)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    with torch.no_grad():
        network[1].weight.copy_(torch.randn(5, 16, generator=generator))
        network[1].bias.copy_(-0.5 * network[1].weight.sum(1))
        direct = float((network(x).argmax(1) == y).float().mean())
    found = evaluate(network, (x, y), EPSILON, ["pgd", "margin"])
    assert found.sa == pytest.approx(direct) and 0.1 < found.sa < 0.3
    assert found.accuracy("margin") <= found.ra_pgd < found.sa and found.worst("pgd")[1] <= found.ra_tail_30


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        ((PGD(),), {}, "third argument is the threat, got PGD: pass attacks"),
        ((["pgd"],), {}, "third argument is the threat, got list"),
        ((8 / 255,), {}, "third argument is the threat, got float"),
        ((), {"attacks": ["fab"]}, "no attack 'fab'"),
        ((), {"attacks": ["pgd", "pgd"]}, "'pgd' cannot name"),
        ((), {"attacks": ["autoattack", "quick"]}, "autoattack or quick, not both"),
        ((), {"attacks": [NFGSM()]}, "nfgsm leaves the ball"),
        ((), {"step": 20}, "no setting 'step': it has output, seed"),
        ((), {"images": 0}, "images must be at least 1, got 0"),
        ((), {"autoattack_images": -1}, "autoattack_images must be at least 1"),
        ((), {"curve_images": 0}, "curve_images must be at least 1, got 0"),
        ((), {"trust_images": 0}, "trust_images must be at least 1"),
        ((), {"chunk": 0}, "chunk must be at least 1"),
        ((), {"tail_share": 0.0}, "tail_share is a share"),
        ((), {"tail_share": 30}, "tail_share is a share"),
        ((), {"weights_r": (1.0, 0.0)}, "weights_r are positive"),
        ((), {"shard": (2, 2)}, "0 <= k < n, got 2 of 2"),
        ((), {"save_examples": "png"}, "give an output"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, settings, said):
    with pytest.raises(UsageError, match=said) as problem:
        evaluate(Threshold(), IMAGES, *arguments, **settings)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"tail_rounding": "up"},
        {"save_examples": "jpg", "output": Path("x")},
        {"compile": "maybe"},
        {"weights_normalize": "none"},
    ],
)
def test_an_unknown_choice_is_refused_before_anything_is_attacked(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        evaluate(Threshold(), IMAGES, attacks=[ATTACK], **settings)


@pytest.mark.parametrize(
    "call",
    [
        lambda: evaluate(lambda x: Threshold()(x), IMAGES),
        lambda: evaluate(IMAGES, Threshold()),
        lambda: evaluate(Threshold(), DataLoader(TensorDataset(X, Y))),
    ],
    ids=["a function", "the wrong way round", "a loader"],
)
def test_arguments_of_the_wrong_kind_are_one_sentence(call):
    with pytest.raises(UsageError):
        call()


def test_an_output_may_be_a_string(tmp_path):
    evaluate(Threshold(), IMAGES, attacks=[ATTACK], output=str(tmp_path / "new"))
    assert (tmp_path / "new" / "evaluation.json").is_file()


def test_some_of_the_images_are_always_the_same_ones_in_proportion():
    x, y = many()
    data = Images.of(x[y.argsort()], y.sort()[0])
    first, again = (evaluate(Threshold(), data, attacks=[ATTACK], images=10) for _ in range(2))
    np.testing.assert_array_equal(first.ids, again.ids)
    assert first.n == 10 and np.bincount(first.y).tolist() == [5, 5] and len(set(first.ids)) == 10
    np.testing.assert_array_equal(first.y, data.y.numpy()[first.ids])
    assert evaluate(Threshold(), data, attacks=[ATTACK], images=1000).n == 40


def test_autoattack_on_some_of_the_images_is_compared_on_those(tmp_path):
    found = evaluate(Threshold(), many(), EPSILON, ["pgd", SOME], autoattack_images=8, output=tmp_path)
    run = found.answers["autoattack_in_part"] >= 0
    assert run.sum() == 8 and np.bincount(found.y[run]).tolist() == [4, 4]
    gap = found.correct["pgd"][run].mean() - found.correct["autoattack_in_part"][run].mean()
    said = line(found, "PGD minus AutoAttack")
    assert said["value"] == pytest.approx(gap) and "the same 8 images" in said["text"]
    assert found.accuracy("autoattack_in_part") == pytest.approx(found.correct["autoattack_in_part"][run].mean())
    assert read_json(tmp_path / "evaluation.json")["autoattack"]["n"] == 8
    np.testing.assert_array_equal(found.after["square"], found.correct["autoattack_in_part"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """So wide a ball that the first attack breaks everything: what stands takes seconds."""
    folder = tmp_path_factory.mktemp("whole")
    return evaluate(Threshold(), IMAGES, LinfBall(0.45), ["pgd", "autoattack"], output=folder), folder


def test_the_whole_of_autoattack_is_ra_aa(whole):
    found, folder = whole
    summary = read_json(folder / "evaluation.json")
    assert found.ra_aa == summary["ra_aa"] == 0 and found.label == "RA-AA"
    assert summary["ra_aa_tail_30"] == 0 and summary["worst_class_ra_aa"] == {"name": "dark", "ra_aa": 0}
    assert list(summary["autoattack"]["accuracy_after"].values()) == [0] * 4
    assert summary["autoattack"]["substitutions"] and summary["trust"]["verdict"] == "fine"
    assert found.answers["autoattack"].tolist() == [1, 1, 1, 0, 0, 0, 0]


def test_an_evaluation_with_autoattack_comes_back(whole):
    found, folder = whole
    again = EvalResult.load(folder)
    assert again.summary() == plain(found.summary()) and again.ra_aa == found.ra_aa
    assert [d.test.p for d in compare(found, again, resamples=2)] == [1.0] * 3


class Said(Callback):
    def __init__(self):
        self.said = []

    def say(self, sentence):
        self.said.append(sentence)


def without_autoattack(folder, model=None, radius=0.45, **settings):
    watch, model = Said(), model or Threshold()
    return evaluate(model, IMAGES, LinfBall(radius), ["pgd"], output=folder, watch=watch, **settings), watch.said


def test_a_later_evaluation_without_autoattack_keeps_its_outcome(whole, tmp_path):
    found, folder = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    again, said = without_autoattack(tmp_path, seed=1)
    assert said == ["RA-AA is kept: it was measured on this network and these images"]
    assert (
        again.ra_aa == read_json(tmp_path / "evaluation.json")["ra_aa"] == found.ra_aa and again.protocol["seed"] == 1
    )
    assert again.answers["autoattack"].tolist() == found.answers["autoattack"].tolist()


@pytest.mark.parametrize("change", ["network", "images", "state", "damage", "ball"])
def test_the_outcome_of_another_evaluation_is_not_kept(whole, tmp_path, change):
    shutil.copytree(whole[1], tmp_path, dirs_exist_ok=True)
    model, chunk = Threshold(), next((tmp_path / "autoattack").rglob("chunk-00000.json"))
    if change == "network":
        model.scale.data += 1
    elif change == "state":
        chunk.unlink()
    elif change == "damage":
        chunk.write_text("{}")
    radius, images = 0.1 if change == "ball" else 0.45, 4 if change == "images" else None
    again, said = without_autoattack(tmp_path, model, radius, images=images)
    assert again.ensemble is None and "ra_aa" not in read_json(tmp_path / "evaluation.json")
    assert [each[:31] for each in said] == ([] if change == "ball" else ["RA-AA of the earlier evaluation"])


@pytest.fixture(scope="module")
def incomplete(tmp_path_factory):
    """Half of the chunks."""
    state = tmp_path_factory.mktemp("state")
    return evaluate(
        Threshold(), IMAGES, LinfBall(0.9), ["autoattack"], shard=(0, 2), autoattack_chunk=3, state=state, compile="no"
    )


def test_a_part_of_autoattack_is_no_ra_aa(incomplete):
    assert incomplete.label == "AutoAttack, incomplete" and incomplete.autoattack["chunks"] == "2 of 3"
    with pytest.raises(UsageError, match="no RA-AA"):
        incomplete.ra_aa  # noqa: B018


def test_a_part_of_autoattack_has_a_summary_without_ra_aa(incomplete):
    found = incomplete.summary()
    assert "ra_aa" not in found and found["autoattack"]["complete"] is False


def test_other_images_pick_the_tail(tmp_path):
    """Dark images are weak here, light ones in the validation set."""
    x = torch.tensor([0.45, 0.45, 0.3, 0.9, 0.9, 0.9]).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    y = torch.tensor([0, 0, 0, 1, 1, 1])
    found = evaluate(Threshold(), (x, y), EPSILON, ["pgd"], validation=(1 - x, 1 - y), output=tmp_path)
    tail = read_json(tmp_path / "evaluation.json")["tail"]["pgd"]
    assert (tail["value"], tail["classes"]) == (pytest.approx(1 / 3), ["0"])
    assert tail["validated"] == {"value": 1.0, "classes": ["1"], "n_validation": 6}
    assert found.validation.n == 6 and found.validation.ra_pgd == found.ra_pgd


def test_validation_images_of_a_class_that_is_not_tested_do_no_harm():
    y = torch.tensor([0, 0, 1, 2, 2, 2, 2])
    found = evaluate(Constant(), (X, Y), attacks=[ATTACK], validation=(X, y), tail_share=1.0)
    assert set(found.summary()["tail"]["pgd"]["validated"]["classes"]) <= {"0", "1"}


@pytest.mark.parametrize(("threat", "levels"), [(LinfBall(8 / 255), 8), (LinfBall(3 / 255), 3), (L2Ball(0.05), None)])
def test_pictures_are_scored_again_and_stay_in_the_ball(tmp_path, threat, levels):
    y = torch.arange(12) % 2
    x = (127.5 + (2 * y - 1) * torch.arange(12)).round().to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 5, 5)
    data = Images.of(x.contiguous(), y)
    found = evaluate(
        Threshold(), data, threat, ["pgd", "margin"], output=tmp_path, save_examples="png", most_examples=9
    )
    saved = read_json(tmp_path / "evaluation.json")["examples"]["saved"]
    assert list(saved) == ["pgd", "margin"] and found.examples["saved"] == saved
    for name, about in saved.items():
        files = sorted((tmp_path / "examples" / name).iterdir())
        assert len(files) == about["n"] == 9
        right = 0
        for file in files:
            row = int(file.name[:6])
            assert file.name.endswith(f"class{int(y[row]):03d}.png")
            with Image.open(file) as picture:
                pixels = np.asarray(picture).astype(int)
            if levels is not None:
                assert np.abs(pixels - data.x[row, 0].numpy().astype(int)).max() <= levels
            right += int((pixels.mean() / 255 > 0.5) == bool(y[row]))
        assert about["accuracy"] == pytest.approx(right / 9)


def test_arrays_hold_what_autoattack_turned(tmp_path):
    some = {"autoattack_images": 5, "save_examples": "npz", "most_examples": 2}
    found = evaluate(
        Threshold(), IMAGES.subset([6, 5, 4, 3, 2, 1, 0]), EPSILON, [ATTACK, SOME], output=tmp_path, **some
    )
    saved = found.examples["saved"]
    assert saved["autoattack_in_part"] == {
        "format": "npz",
        "n": 2,
        "outside": 0,
        "accuracy": 0.0,
        "accuracy_before": 0.0,
    }
    with np.load(tmp_path / "examples" / "autoattack_in_part" / "examples.npz") as kept:
        rows = np.flatnonzero(np.isin(found.ids, kept["ids"]))
        assert found.correct["clean"][rows].all() and not found.correct["autoattack_in_part"][rows].any()
        assert (found.answers["autoattack_in_part"][rows] >= 0).all() and (kept["x"] != X.numpy()[kept["ids"]]).any()
        assert np.abs(kept["x"] - X.numpy()[kept["ids"]]).max() <= 0.1 + 1e-6
        np.testing.assert_array_equal(kept["y"], Y.numpy()[kept["ids"]])
    assert EvalResult.load(tmp_path).examples == plain(found.examples)


def test_pictures_that_cannot_be_are_refused_before_anything_is_attacked(tmp_path):
    class Asked(Threshold):
        calls = 0

        def forward(self, x):
            Asked.calls += 1
            return super().forward(x)

    with pytest.raises(UsageError, match="1 or 3 channels"):
        data = torch.rand(4, 4, 5, 5), torch.arange(4) % 2
        evaluate(Asked(), data, output=tmp_path, save_examples="png")
    assert Asked.calls < 20


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attacks": []},
        {"attacks": {"weak": FGSM(EPSILON), "pgd": ATTACK}, "trust": False},
        {"attacks": ["margin", SOME], "tail_share": 0.6, "tail_rounding": "ceil"},
        {"images": 4, "chunk": 3, "seed": 5, "about": {"note": "ß"}},
    ],
    ids=["default", "clean", "mapping", "autoattack", "some"],
)
def test_what_is_written_is_what_is_returned(tmp_path, settings):
    found = evaluate(Threshold(), IMAGES, output=tmp_path / "deep" / "folder", **settings)
    again = EvalResult.load(tmp_path / "deep" / "folder")
    assert again.summary() == plain(found.summary()) == read_json(tmp_path / "deep" / "folder" / "evaluation.json")
    assert again.attacks == found.attacks and again.classes == found.classes


def test_the_weights_are_given_at_the_r_that_were_asked_for(tmp_path):
    settings = {"weights_r": (2.0, 0.5), "weights_normalize": "mean_one"}
    found = evaluate(Threshold(), IMAGES, attacks=[ATTACK], output=tmp_path, **settings)
    assert [(w["r"], w["normalize"]) for w in found.summary()["weights"]] == [(2.0, "mean_one"), (0.5, "mean_one")]
    with np.load(tmp_path / "evaluation.npz") as kept:
        expected = np.stack([found.weights(r, "mean_one").weights for r in (2.0, 0.5)])
        np.testing.assert_array_equal(kept["weights"], expected)
        np.testing.assert_allclose(expected.mean(1), 1)


def test_margins_are_kept_beside_the_losses(tmp_path):
    found = evaluate(Threshold(), IMAGES, EPSILON, ["pgd", "margin"], output=tmp_path)
    again = EvalResult.load(tmp_path)
    assert list(again.margins) == list(found.margins) == ["clean", "pgd", "margin"] == list(again.answers)
    np.testing.assert_array_equal(again.margins["pgd"], found.margins["pgd"])
    sign = np.where(found.y == 1, 1, -1)
    np.testing.assert_allclose(found.margins["clean"], 20 * sign * (GRAY.numpy() - 0.5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.margins["pgd"], found.margins["clean"] - 20 * 0.1, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [7, 40, 500])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_gallery_shows_what_was_measured(tmp_path, chunk, dtype):
    """The attack with the same draws leaves the images that are stored, and the answers to them."""
    x, y = torch.rand(40, 1, 2, 3, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 2
    data = Images.of((x * 255).round().to(torch.uint8) if dtype is torch.uint8 else x, y).subset(
        torch.arange(39, 2, -1)
    )
    attack = PGD(EPSILON, 2, SignStep(0.03))
    found = evaluate(Threshold(), data, attacks=["margin", attack], output=tmp_path, seed=3, chunk=chunk)
    points = []
    for index, start in enumerate(range(0, 37, chunk)):
        part, labels = data.pixels(slice(start, start + chunk)), data.y[start : start + chunk]
        points.append(part + attack(Threshold(), part, labels, generator(3, 0, index, "evaluation")))
    point, network = torch.cat(points), Threshold()
    with np.load(tmp_path / "gallery.npz", allow_pickle=False) as kept:
        rows = 39 - kept["ids"]
        order = np.argsort(-found.losses["pgd"], kind="stable")
        np.testing.assert_array_equal(rows, [*order[:12], *order[::-1][:12]])
        for name, pixels in (("clean", data.pixels(slice(None))), ("attacked", point)):
            np.testing.assert_array_equal(kept[name], (255 * pixels[rows]).round().permute(0, 2, 3, 1).numpy())
            np.testing.assert_array_equal(kept[f"answers_{name}"], network(pixels[rows]).argmax(1).numpy())
        np.testing.assert_array_equal(kept["labels"], data.y[rows].numpy())
        np.testing.assert_array_equal(kept["weights"], found.weights(1.0, "mean_one").weights[rows])


def test_without_pgd_there_is_no_gallery_and_none_of_an_earlier_evaluation(tmp_path):
    evaluate(Threshold(), IMAGES, EPSILON, ["pgd"], output=tmp_path)
    assert (tmp_path / "gallery.npz").is_file()
    evaluate(Threshold(), IMAGES, EPSILON, ["margin"], output=tmp_path)
    assert not (tmp_path / "gallery.npz").exists()


def test_a_network_with_one_class_can_be_measured(tmp_path):
    one = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    found = evaluate(one, (X, 0 * Y), EPSILON, ["pgd"], output=tmp_path)
    assert found.ra_pgd == 1 and (EvalResult.load(tmp_path).margins["pgd"] == np.inf).all()


@pytest.mark.parametrize(
    "settings", [{"weights_r": (2.0,)}, {"weights_normalize": "all"}, {"weights_r": ()}], ids=["r", "normalize", "none"]
)
def test_the_r_of_the_weights_come_back(tmp_path, settings):
    found = evaluate(Threshold(), IMAGES, attacks=[ATTACK], output=tmp_path, **settings)
    assert EvalResult.load(tmp_path).summary() == plain(found.summary())


class Towards:
    """Everything a little darker."""

    def __call__(self, model, x, y, generator):
        return -torch.full_like(x, 0.04).minimum(x)


@dataclass(frozen=True)
class Written(Towards):
    """The same as a frozen value, as attacks are here."""

    size: float = 0.04


def darker(model, x, y, generator):
    return Towards()(model, x, y, generator)


@pytest.mark.parametrize(
    ("attacks", "name"), [([Towards()], "towards"), ({"own": Towards()}, "own"), ([darker], "function")]
)
def test_any_callable_is_an_attack(attacks, name):
    found = evaluate(Threshold(), IMAGES, attacks=attacks)
    assert found.attacks == [name] and found.correct[name].tolist() == [True, True, True, False, True, True, False]
    assert found.summary()[f"ra_{name}"] == 5 / 7


@pytest.mark.parametrize(
    "attack", [Towards(), darker, Written(), PGD(EPSILON, 2, loss=darker)], ids=["object", "function", "value", "loss"]
)
def test_an_attack_of_one_s_own_can_be_saved(tmp_path, attack):
    def loss(logits, y):
        return LogitMargin()(logits, y)

    attack = PGD(EPSILON, 2, loss=loss) if isinstance(attack, PGD) else attack
    found = evaluate(Threshold(), IMAGES, attacks=[attack], output=tmp_path)
    assert EvalResult.load(tmp_path).summary() == plain(found.summary())


def test_an_attack_of_one_s_own_is_held_to_the_threat():
    def everything(model, x, y, generator):
        return 1 - 2 * x

    try:
        found = evaluate(Threshold(), IMAGES, EPSILON, [everything])
    except UsageError:
        return
    assert found.examples["outside"] > 0 and found.trust["verdict"] == "suspicious"


def test_attacks_of_another_ball_than_the_threat_are_not_compared():
    try:
        found = evaluate(Threshold(), IMAGES, LinfBall(0.01), [ATTACK, "margin"])
    except UsageError:
        return
    assert line(found, "PGD minus PGD on the logit margin")["verdict"] == "not measured"


def test_margins_within_different_balls_are_not_compared():
    wide, narrow = (evaluate(Threshold(), IMAGES, LinfBall(radius), ["margin"]) for radius in (0.3, 0.01))
    assert wide.protocol != narrow.protocol
    with pytest.raises(UsageError, match="differ in"):
        compare(wide, narrow, resamples=1)


@pytest.mark.parametrize("attacks", [["pgd"], [SOME]], ids=["pgd", "autoattack"])
def test_a_network_in_training_mode_is_put_back(tmp_path, attacks):
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout(0.5), Threshold()).train()
    network[1].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    first = evaluate(network, IMAGES, EPSILON, attacks, output=tmp_path, save_examples="png")
    assert [module.training for module in network.modules()] == [True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())
    network.eval()
    second = evaluate(network, IMAGES, EPSILON, attacks)
    assert all(np.array_equal(given, second.answers[name]) for name, given in first.answers.items())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["sign", "sign"], ["sign (0)", "sign (1)"]),
        (["<script>", "a/../b\n\x00"], ["<script>", "a/../b\n\x00"]),
        (["", "ß\u202e\U0001f600"], ["", "ß\u202e\U0001f600"]),
    ],
)
def test_hostile_names_go_through(tmp_path, names, expected):
    found = evaluate(Threshold(), Images.of(X, Y, names), attacks=[ATTACK], output=tmp_path, save_examples="png")
    assert list(found.summary()["per_class"]) == expected and found.tail("pgd")[1] == [expected[1]]
    assert EvalResult.load(tmp_path).summary() == plain(found.summary())
    assert {file.parent for file in tmp_path.rglob("*.png")} == {tmp_path / "examples" / "pgd"}


def test_a_class_without_samples_is_null_and_in_no_tail(tmp_path):
    data = Images.of(X, 2 * Y, ["dark", "none", "light"])

    class Three(Threshold):
        def forward(self, x):
            dark, light = super().forward(x).unbind(1)
            return torch.stack([dark, torch.full_like(dark, -9), light], 1)

    found = evaluate(Three(), data, EPSILON, ["pgd", SOME], output=tmp_path, tail_share=1.0).summary()
    assert found["tail"]["pgd"]["classes"] == ["light", "dark"] and found["worst_class"]["name"] == "light"
    empty = found["per_class"]["none"]
    assert empty["n"] == 0 and {value for key, value in empty.items() if key != "n"} == {None}
    assert [w["above_0.001_per_class"]["none"] for w in found["weights"]] == [None] * 3
    assert EvalResult.load(tmp_path).summary() == plain(found)


def test_a_network_that_knows_more_classes_than_the_data():
    silent = evaluate(Threshold(others=3), IMAGES, attacks=[ATTACK])
    assert silent.classes == ("dark", "light") and silent.ra_pgd == 2 / 7
    found = evaluate(Constant(), Images.of(X, 0 * Y, ["dark"]), attacks=[ATTACK])
    assert found.classes == ("dark", "1") and found.confusion("pgd") == [[0, 7], [0, 0]]
    assert found.summary()["ra_tail_30_classes"] == ["dark"]


def test_a_class_that_only_autoattack_finds():
    found = evaluate(Corner(), IMAGES, LinfBall(0.3), [AutoAttack(LinfBall(0.3), ("apgd-ce",), iterations=5)])
    assert found.answers["clean"].max() < found.answers["autoattack_in_part"].max() == 2
    assert np.sum(found.summary()["confusion"]["autoattack_in_part"]) == 7


@pytest.mark.parametrize(("x", "y"), [(X, 0 * Y), (X[:1], Y[:1])], ids=["one class", "one image"])
def test_little_is_enough(tmp_path, x, y):
    found = evaluate(Threshold(), (x, y), EPSILON, ["pgd", "margin", SOME], output=tmp_path, save_examples="npz")
    summary = plain(found.summary())
    assert summary["ra_tail_30"] == summary["ra_pgd"] == summary["worst_class"]["ra_pgd"]
    assert summary["ra_tail_30_classes"] == ["0"]
    assert summary["weights"][0]["correlation_with_class_accuracy"] == {"pearson": None, "spearman": None}
    assert EvalResult.load(tmp_path).summary() == summary
    low, high = summary["intervals"]["ra_pgd"]
    assert low <= summary["ra_pgd"] <= high and high - low > 0.3


@pytest.mark.parametrize("seed", [0, 7])
def test_the_seed_decides_every_draw(seed):
    attack = PGD(EPSILON, 0)
    first, again, other = (evaluate(Threshold(), many(), attacks=[attack], seed=s) for s in (seed, seed, seed + 1))
    assert np.array_equal(first.losses["pgd"], again.losses["pgd"])
    assert not np.array_equal(first.losses["pgd"], other.losses["pgd"])


def test_a_watcher_hears_how_far_it_is():
    heard = []

    class Callback:
        def say(self, sentence): ...

        def images(self, done, of):
            heard.append((done, of))

        def attack(self, chunk, of, part, standing, left):
            heard.append((chunk, of, part, standing))

    evaluate(Threshold(), IMAGES, EPSILON, ["pgd", SOME], chunk=4, autoattack_chunk=4, watch=Callback())
    assert heard[:2] == [(4, 7), (7, 7)]
    assert [each[:3] for each in heard[2:]] == [(c, 2, part) for c in (0, 1) for part in ("apgd-ce", "square")]
    assert heard[-1][3] == 1
