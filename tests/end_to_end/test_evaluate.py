"""doubly evaluate: any network with any weights and images, settings, and refusals."""

import dataclasses
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import doubly
from doubly.evaluation.config import EvalConfig
from evaluation_inputs import (
    AUTOATTACK,
    NETS,
    NETWORKS,
    PLAIN,
    command,
    contents,
    evaluation,
    is_one_sentence,
    nearest_mean,
    results,
    split,
)


def test_weights_and_images_mean_the_same_in_every_file(run, plain, tmp_path):
    keys = ("sa", "ra_pgd", "ra_tail_30", "per_class", "confusion")
    expected = {key: evaluation(plain[0])[key] for key in keys}
    words = ["--epsilon", 0.15, "--no-trust"]
    for name in ("net.pt", "parallel.pt", "compiled.pt", "checkpoint.pt", "both.pt"):
        code, out, err = run(*command("linear", *words, weights=name, output=tmp_path / name))
        assert (code, err) == (0, "") and "RA-PGD" in out
        assert {key: evaluation(tmp_path / name)[key] for key in keys} == expected
        assert evaluation(tmp_path / name)["protocol"]["weights"] == name
    assert run(*command("linear", *words, data="digits.safetensors", output=tmp_path / "arrays"))[0] == 0
    assert {key: evaluation(tmp_path / "arrays")[key] for key in keys} == expected
    code, _, err = run(*command("of_color", *PLAIN, data="photos", output=tmp_path / "photos"))
    assert (code, err) == (0, "") and evaluation(tmp_path / "photos")["sa"] == expected["sa"]
    rows = evaluation(tmp_path / "photos")["per_class"]
    assert {name: (row["n"], row["sa"]) for name, row in rows.items()} == {
        name: (row["n"], row["sa"]) for name, row in expected["per_class"].items()
    }


def test_a_dataset_or_a_recipe_gives_its_test_images_and_a_function_its_number_of_classes(run, tmp_path):
    for data in ("digits", "digits.at"):
        words = command("as_many_as", *PLAIN, weights=None, data=data, output=tmp_path / data)
        code, _, err = run(*words)
        assert (
            code == 0 and "RANDOM weights" in err and err.count("\n") == 1 and evaluation(tmp_path / data)["n"] == 360
        )
        assert len(evaluation(tmp_path / data)["per_class"]) == 10
    assert results(tmp_path / "digits")[1] == results(tmp_path / "digits.at")[1]  # the weights follow from a seed


def test_the_output_has_a_name_of_its_own_if_none_is_given(cli, tmp_path, inputs):
    (tmp_path / "pack").mkdir()
    data = inputs / "digits.npz"
    for name in ("one", "two"):
        (tmp_path / "pack" / f"{name}.py").write_text(NETWORKS)
        assert cli("evaluate", "--model", f"pack.{name}:linear", "--data", data, *PLAIN)[0] == 0
    weights = inputs / "net.safetensors"
    _, out, _ = cli("evaluate", "--model", "pack.one:linear", "--weights", weights, "--data", data, *PLAIN)
    names = sorted(path.name for path in (tmp_path / "evaluations").iterdir())
    pattern = r"net-[0-9a-f]{6} pack\.one-linear-[0-9a-f]{6} pack\.two-linear-[0-9a-f]{6}"
    assert re.fullmatch(pattern, " ".join(names))
    assert "pack.one:linear" in out and f"wrote evaluations/{names[0]}/evaluation.json" in out
    files = ["evaluation.json", "evaluation.npz", "gallery.npz"]
    assert sorted(contents(tmp_path / "evaluations" / names[0])) == files


class Bomb:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_pickle_that_would_execute_code_is_refused_and_not_executed(run, tmp_path, output):
    bomb = Bomb(tmp_path / "executed")
    for value in (bomb, {"1.weight": torch.zeros(4, 64), "1.bias": bomb}):
        for save in (torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))):
            save(value, tmp_path / "bomb.pt")
            code, out, err = run(*command(weights=tmp_path / "bomb.pt", output=output))
            assert (code, out) == (2, "") and "give safetensors or a plain state dict" in err and is_one_sentence(err)
    assert not (tmp_path / "executed").exists() and not output.exists()


def test_a_network_is_evaluated_in_evaluation_mode_and_put_back(run, output):
    code, _, err = run(*command("with_batch_norm", "--epsilon", 0.15, *PLAIN, weights=None, output=output))
    assert (code, err) == (0, "")
    network = sys.modules[NETS].with_batch_norm()
    network[1].eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    images = doubly.data.Arrays("digits.npz").load().test
    result = doubly.evaluate(network, images, doubly.LinfBall(0.15), ["pgd"], trust=False)
    assert (result.sa, result.ra_pgd) == (evaluation(output)["sa"], evaluation(output)["ra_pgd"])
    assert [part.training for part in network] == [True, False, True, True] and network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_classes_and_folders_may_have_any_name(run, plain, tmp_path, output):
    code, out, _ = run(*command("linear", *PLAIN, data="named.npz", output=output))
    assert code == 0 and "[bold]" in out and "[/i]" in out
    path = shutil.copytree(plain[0], tmp_path / "run[best]")
    code, out, _ = run("compare", path, path, "--resamples", 10)
    assert code == 0 and "run[best]" in "".join(out.split())  # the title may be wrapped


def test_a_network_may_have_more_classes_than_the_data(run, tmp_path, output):
    weights = nearest_mean(*split()[:2])
    more = {
        "1.weight": torch.cat([weights["1.weight"], weights["1.weight"][:3] + 0.5]),
        "1.bias": torch.cat([weights["1.bias"], weights["1.bias"][:3] - 18]),
    }
    torch.save(more, tmp_path / "seven.pt")
    words = ["--epsilon", 0.4, "--quick", "--no-trust", "--attacks"]
    assert run(*command("seven", *words, weights=tmp_path / "seven.pt", output=output))[0] == 0


# --- refusals: one sentence with the remedy, exit code 2, and what was there stays ------------------------------------


def test_networks_weights_and_images_that_do_not_fit_are_refused(run, copy):
    before = contents(copy)
    for function, files, message in [
        ("softmax", {}, r"returns probabilities.*return the logits, without the softmax"),
        ("centered_on_the_batch", {}, r"a single image differently than in a batch.*normalize with stored statistics"),
        ("batch_statistics", {}, r"a single image differently than in a batch.*normalize with stored statistics"),
        ("batch_statistics_of_vectors", {}, r"normalize with stored statistics"),
        ("dropout_at_all_times", {}, r"differently each time.*take out what draws random numbers"),
        ("two_thirds", {}, r"labels run from 0 to 3 but the model returns 3 logits: build the model with as many"),
        ("pair", {}, "returns tuple, in which there are no logits: return a tensor"),
        ("wide", {}, r"cannot take images of shape \(1, 8, 8\).*give images of the size"),
        ("nan", {}, r"the model's logits: 48 of 48 values are NaN or infinite"),
        ("key_error", {}, r"KeyError"),
        ("weights_do_not_fit", {}, r"Error\(s\) in loading state_dict"),
        ("nothing", {}, r"has no attribute 'nothing'; run from the folder that holds the module"),
        ("number", {}, r"must return an nn.Module, got int"),
        ("of_a_path", {}, r"missing a required argument: 'path'.*name a function of nothing, or of classes"),
        ("linear", {"data": "normalized.npz"}, r"in \[0,1\].*leave normalization to the model's first layer"),
        ("linear", {"data": "nowhere.npz"}, r"there is no dataset, recipe, folder or file 'nowhere.npz'"),
        ("two_thirds", {"weights": "net.safetensors"}, r"does not fit the model: '1.weight' is \(4, 64\) in the file"),
        ("with_batch_norm", {"weights": "net.pt"}, r"'0.weight' is missing in the file and \(1,\) in the model[:;] "),
        ("linear", {"weights": "nowhere.pt"}, r"there is no weights file nowhere.pt"),
        ("linear", {"weights": "nowhere.safetensors"}, r"there is no weights file nowhere.safetensors"),
        ("linear", {"weights": "digits.npz"}, r"cannot be read as weights .*: give safetensors or a plain state dict"),
        ("linear", {"weights": "photos"}, r"photos cannot be read as weights"),
    ]:
        code, out, err = run(*command(function, *AUTOATTACK, **{"weights": None, **files}, output=copy))
        assert (code, out) == (2, "") and re.search(message, err) and is_one_sentence(err), (function, err)
        assert contents(copy) == before


def test_options_that_do_not_fit_are_refused(run, output):
    model = ["--model", f"{NETS}:linear"]
    for words, message in [
        ([], "give a run directory, or --model package.module:function with --weights FILE and --data NAME"),
        (model, "give a run directory, or --model"),
        (["--data", "digits.npz"], "give a run directory, or --model"),
        (["--model", NETS, "--data", "digits.npz"], f"--model is written package.module:function, got '{NETS}'"),
        (["--model", "nowhere:linear", "--data", "digits.npz"], "run from the folder that holds the module"),
        (["nowhere"], "nowhere is no run directory: it has no config.json; give one that `doubly train` wrote"),
        (["nowhere", "--data", "digits.npz"], "a run directory knows its data and weights: leave out --data"),
        *(
            ([*model, "--data", "digits.npz", "--output", output, *words], message)
            for words, message in [
                (
                    ["--epsilon", 8],
                    "epsilon must lie in (0, 1], got 8: images are in [0,1], so 8 gray levels are 8/255",
                ),
                (["--epsilon", "8/0"], "'8/0' is not a number: write 0.03 or 8/255"),
                (["--threat", "l2", "--epsilon", -1], "epsilon must be positive and finite, got -1"),
                (["--threat", "l2", "--epsilon", "inf"], "epsilon must be positive and finite"),
                (["--tail-share", 0], "tail_share is a share of the classes in (0, 1], got 0"),
                (["--images", 0], "images must be at least 1, got 0"),
                (["--jobs", 0], "jobs run in at least 1 process, got 0"),
                (["--shard", 0, 2], "--jobs and --shard share AutoAttack's chunks: add --autoattack or --quick"),
                (["--quick", "--shard", 2, 2], "a shard is k of n with 0 <= k < n, got 2 of 2"),
                (["--quick", "--autoattack"], "give --autoattack or --quick"),
                (["--attacks", "pdg"], "there is no attack 'pdg': did you mean 'pgd'?"),
                (["--device", "cuda:77"], "device 'cuda:77' is not available here"),
            ]
        ),
    ]:
        code, out, err = run("evaluate", *words)
        assert (code, out) == (2, "") and message in err and is_one_sentence(err), (words, err)
        assert not output.exists()
    output.write_text("precious")
    code, _, err = run(*command("linear", *PLAIN, output=output))
    assert code == 2 and "choose another" in err and output.read_text() == "precious"


def test_jobs_are_refused_under_torchrun(run, output, monkeypatch):
    monkeypatch.setattr("doubly.distributed.launch.launched", lambda: (0, 2))
    code, _, err = run(*command("linear", "--quick", "--jobs", 2, output=output))
    assert code == 2 and "the processes of torchrun share AutoAttack's chunks by themselves: leave out --jobs" in err


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_threat_is_the_one_of_the_options(run, tmp_path):
    for number, (words, kind, radius, norm) in enumerate(
        [
            (["--threat", "l2", "--epsilon", 0.4], "threat.l2", 0.4, "L2"),
            (["--threat", "l2"], "threat.l2", 0.5, "L2"),
            (["--epsilon", "4/255"], "threat.linf", 4 / 255, "Linf"),
            ([], "threat.linf", 8 / 255, "Linf"),
        ]
    ):
        output = tmp_path / str(number)
        code, out, _ = run(*command("linear", *words, "--quick", "--autoattack-images", 4, *PLAIN, output=output))
        about = evaluation(output)
        assert code == 0 and f"epsilon {radius:.6g}, {norm}" in out
        threat = about["protocol"]["attack"]["threat"]
        assert (threat["kind"], threat["radius"]) == (kind, radius)
        assert (about["autoattack"]["norm"], about["autoattack"]["epsilon"]) == (norm, radius)


def test_images_curve_and_tail_are_as_large_as_the_options_say(run, tmp_path):
    for name in "ab":
        assert run(*command("linear", "--images", 8, *PLAIN, output=tmp_path / name))[0] == 0
    about = evaluation(tmp_path / "a")
    assert about["n"] == 8 and [row["n"] for row in about["per_class"].values()] == [2, 2, 2, 2]
    assert results(tmp_path / "a") == results(tmp_path / "b")
    for words, title, count in [
        (["--tail-share", 0.5], "RA-Tail-50", 2),
        (["--tail-share", 1], "RA-Tail-100", 4),
        (["--tail-rounding", "ceil"], "RA-Tail-30", 2),
        (["--tail-rounding", "floor", "--curve-images", 8], "RA-Tail-30", 1),
    ]:
        code, out, err = run(*command("linear", "--epsilon", 0.15, *words, *PLAIN, output=tmp_path / "tail"))
        about = evaluation(tmp_path / "tail")
        assert (code, err) == (0, "") and title in out and len(about["tail"]["pgd"]["classes"]) == count
        weakest = sorted(row["ra_pgd"] for row in about["per_class"].values())[:count]
        assert about["tail"]["pgd"]["value"] == pytest.approx(np.mean(weakest))
        assert ("ra_tail_30" in about) == (title == "RA-Tail-30")
    points = about["curve"]["points"]
    text = ", ".join(f"{100 * point['accuracy']:.1f} at {point['epsilon']:.3g}" for point in points)
    assert f"% under PGD by radius, n = 8: {text}\n" in out
    assert [point["epsilon"] for point in points] == pytest.approx([0, 0.0375, 0.075, 0.15, 0.225, 0.3, 0.45, 0.6])


def test_attacked_images_are_saved_exactly_or_as_pictures(run, inputs, output, tmp_path):
    words = ["--epsilon", 0.15, "--save-examples", "npz", "--max-examples", 8, *PLAIN]
    assert run(*command("linear", *words, output=output))[0] == 0
    with np.load(inputs / "digits.npz") as file:
        gray_levels = file["x_test"]
    with np.load(output / "examples" / "pgd" / "examples.npz") as file:
        difference = np.abs(file["x"] - gray_levels[file["ids"], None] / 255)
        assert file["x"].shape == (8, 1, 8, 8) and np.bincount(file["y"]).tolist() == [2, 2, 2, 2]
    assert 0.14 < difference.max() <= 0.15 + 1e-6
    saved = evaluation(output)["examples"]["saved"]["pgd"]
    assert saved["n"] == 8 and saved["accuracy"] == saved["accuracy_before"]
    words = ["--epsilon", "8/255", "--save-examples", "png", "--quick", "--autoattack-chunk-size", 24, *PLAIN]
    assert run(*command("linear", *words, output=tmp_path / "png"))[0] == 0
    pictures = sorted((tmp_path / "png" / "examples" / "pgd").iterdir())
    assert len(pictures) == 24 and pictures[1].name == "000001-class000.png"
    levels = np.stack([np.asarray(Image.open(picture)) for picture in pictures]).astype(int)
    assert np.abs(levels - gray_levels).max() == 8
    assert evaluation(tmp_path / "png")["examples"]["saved"]["pgd"]["format"] == "png"


def test_a_network_whose_numbers_cannot_be_trusted_is_suspicious(run, output):
    code, out, _ = run(*command("loud", "--epsilon", 0.1, weights=None, output=output))
    trust = evaluation(output)["trust"]
    assert code == 0 and "are these numbers trustworthy? no" in out and trust["verdict"] == "suspicious"
    verdicts = {line["name"]: line["verdict"] for line in trust["lines"]}
    assert verdicts["logit scale"] == "suspicious" and verdicts["AutoAttack's own warnings"] == "not measured"
    assert trust["measured"] == 8


def test_a_run_directory_is_evaluated_with_its_hold_out_or_under_another_threat(cli, tmp_path, output):
    words = ["train", "digits.at", "--model.width", 2, "--method.attack.steps", 1, "--validation.attack.steps", 1]
    assert cli(*words, "--epochs", 1, "--threads", 1, "--data.holdout", 0.2, "--output", "run")[0] == 0
    code, out, err = cli("evaluate", "run", "--no-trust", "--attacks", "pgd")
    about = evaluation("run")
    tail, rows = about["tail"]["pgd"], about["per_class"]
    assert (
        code == 0 and "takes 1, so accuracy under it is too high" in err and "RA-Tail-30" in out and about["epoch"] == 1
    )
    validated = tail["validated"]
    assert len(validated["classes"]) == 3 and 0 < validated["n_validation"] < 300
    assert validated["value"] == pytest.approx(np.mean([rows[name]["ra_pgd"] for name in validated["classes"]]))
    assert tail["value"] <= validated["value"]
    before = contents(tmp_path / "run")
    words = ["--threat", "l2", "--epsilon", 0.5, "--images", 20, *PLAIN]
    assert cli("evaluate", "run", *words, "--output", output)[0] == 0
    assert evaluation(output)["protocol"]["attack"]["threat"] == {"kind": "threat.l2", "radius": 0.5}
    assert evaluation(output)["n"] == 20 and contents(tmp_path / "run") == before


def test_help_lists_every_option(cli):
    options = [field.name.replace("_", "-") for field in dataclasses.fields(EvalConfig) if field.name != "trust"]
    options += [
        "trust-code",
        "attacks",
        "autoattack",
        "quick",
        "threat",
        "epsilon",
        "jobs",
        "checkpoint",
        "device",
        "no-trust",
        "perturbations",
    ]
    options += ["model", "weights", "mean", "std", "data", "data-root"]
    for verb, expected in (("evaluate", options), ("compare", ["resamples", "seed"])):
        code, out, err = cli(verb, "--help-all")
        assert (code, err) == (0, "") and sorted(re.findall(r"^[│ ]+ --([a-z-]+)", out, re.M)) == sorted(expected)
        assert "run directory" in out
    assert "--set FIELD=JSON" in cli("evaluate", "--help").out
