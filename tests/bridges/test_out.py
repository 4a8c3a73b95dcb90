"""Networks for other tools: graphs that compute the same, a card, and a folder for the Hub."""

import contextlib
import importlib.util
import io
import json
import shutil
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from doubly.bridges import hub
from doubly.bridges.graphs import export_graph
from doubly.checkpoints import load_model
from doubly.cli import main
from doubly.config.serialize import with_changes
from doubly.data import load_splits
from doubly.errors import UsageError
from doubly.recipes import recipe
from doubly.report.card import model_card
from doubly.report.run_result import read_run
from doubly.training.loop import train_run

CHANGES = {"batch_size": 512, "model.width": 2, "epochs": 1, "method.attack.steps": 1, "validation.attack.steps": 1}


def call(*words):
    """Run doubly in this process and return (exit code, output, messages)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("out") / "run"
    train_run(with_changes(recipe("digits.at"), {**CHANGES, "validation.size": 20}), path)
    code, _, err = call("evaluate", path, "--images", 60, "--no-trust", "--attacks", "pgd")
    assert code == 0, err
    return path


def images(run_dir):
    return load_splits(recipe("digits.at").data).test.pixels(slice(0, 40))


def test_onnx_runtime_returns_the_logits_of_the_network(run_dir, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'doubly[onnx]'")
    pytest.importorskip("onnxscript", reason="pip install 'doubly[onnx]'")
    code, out, err = call("export", run_dir, "--output", tmp_path / "x.onnx")
    assert code == 0 and "(N × 1 × 8 × 8)" in out and "on test images" in " ".join(out.split()), err
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    x = images(run_dir)
    logits = session.run(None, {"images": x.numpy()})[0]
    np.testing.assert_allclose(logits, load_model(run_dir).eval()(x).detach().numpy(), atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == [str(k) for k in range(10)]


@pytest.mark.filterwarnings("ignore")
def test_torch_export_returns_the_logits_without_the_data(run_dir, tmp_path, monkeypatch):
    def missing(*_):
        raise UsageError("there are no files")

    monkeypatch.setattr("doubly.bridges.graphs.load_splits", missing)
    code, out, err = call("export", run_dir, "--output", tmp_path / "x.pt2", "--format", "torch_export")
    assert code == 0 and "images of noise" in " ".join(out.split()), err
    x = images(run_dir)
    extra = {"classes.json": ""}
    graph = torch.export.load(tmp_path / "x.pt2", extra_files=extra).module()
    assert torch.allclose(graph(x), load_model(run_dir).eval()(x), atol=1e-4)
    assert json.loads(extra["classes.json"])[9] == "9"
    with zipfile.ZipFile(tmp_path / "x.pt2") as archive:
        assert all(len(archive.read(name)) < 2000 for name in archive.namelist() if name.endswith(".pt"))  # no images


def test_a_graph_that_computes_something_else_is_not_written(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("doubly.bridges.graphs._write_torch", lambda model, x, path, classes: path.touch())
    monkeypatch.setattr("doubly.bridges.graphs._run_torch", lambda path, x: torch.full((len(x), 10), torch.nan))
    with pytest.raises(UsageError, match="differ from those of the network by nan"):
        export_graph(run_dir, tmp_path / "x.pt2", "torch_export")
    assert list(tmp_path.iterdir()) == []


def test_the_card_names_every_class_and_a_hostile_name_adds_nothing(run_dir, tmp_path):
    assert call("card", run_dir, "--output", tmp_path / "README.md")[0] == 0
    text = (tmp_path / "README.md").read_text()
    yaml = pytest.importorskip("yaml", reason="reads the header of the card")
    header = yaml.safe_load(text.split("---")[1])
    evaluation = read_run(run_dir).evaluation
    values = {entry["name"]: entry["value"] for entry in header["model-index"][0]["results"][0]["metrics"]}
    assert values["RA-Tail-30"] == pytest.approx(evaluation["ra_tail_30"], abs=1e-4)
    for heading in ("## Robustness", "### Every class", "## Protocol", "## Data", "## Intended use", "## Limits"):
        assert heading in text
    for name, row in evaluation["per_class"].items():
        assert f"| {name} | {row['n']} | {100 * row['sa']:.1f} | {100 * row['ra_pgd']:.1f} |" in text
    hostile = "x\n---\nlicense: mit\n# <script>|`"
    run = read_run(run_dir)
    bad = {**evaluation, "per_class": {hostile: {"n": 1, "sa": None, "ra_pgd": None}}}
    card = model_card(replace(run, evaluation=bad, config={**run.config, "name": hostile}), hostile)
    assert "<script>" not in card.split("---\n", 2)[2].replace("\\<script\\>", "")
    assert "\nlicense" not in card and yaml.safe_load(card.split("\n---\n")[0])["model-index"][0]["name"] == hostile


def test_a_dry_run_shows_the_folder_for_the_hub(run_dir, tmp_path):
    code, out, _ = call("push", run_dir, "--repo", "me/net", "--dry-run", "--output", tmp_path / "hub")
    assert code == 0 and "would upload to me/net (private)" in out
    assert sorted(file.name for file in (tmp_path / "hub").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    weights, state = load_file(tmp_path / "hub" / "model.safetensors"), load_model(run_dir).state_dict()
    assert all(torch.equal(weights[name], state[name]) for name in state)
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["image_size"] == [8, 8] and config["classes"][3] == "3" and config["run"]["epochs"] == 1
    assert hub._without_places({"data": {"root": "/home/me", "n": [1]}}) == {"data": {"root": None, "n": [1]}}


def test_weights_are_not_uploaded_with_the_numbers_of_others(run_dir, tmp_path):
    run = tmp_path / "run"
    for measured in ({"protocol": {"checkpoint": "best"}}, {"epoch": 0}):
        shutil.copytree(run_dir, run)
        evaluation = read_run(run).evaluation
        protocol = {**evaluation["protocol"], **measured.get("protocol", {})}
        (run / "evaluation.json").write_text(json.dumps({**evaluation, **measured, "protocol": protocol}))
        code, _, err = call("push", run, "--dry-run", "--output", tmp_path / "hub")
        assert code == 2 and f"call doubly evaluate {run} --checkpoint last first" in err, err
        assert not (tmp_path / "hub").exists()
        shutil.rmtree(run)


def test_what_cannot_be_exported_or_uploaded_is_one_sentence(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_run(with_changes(recipe("digits.at"), {**CHANGES, "validation.size": 20}), tmp_path / "new")
    cases = [
        (["export", run_dir, "--output", "x.pth"], "must end in .safetensors, .onnx or .pt2"),
        (["export", run_dir, "--output", "x.onnx", "--format", "torch_export"], "torch_export writes .pt2 files"),
        (["export", tmp_path, "--output", "x.pt2"], "is no run directory"),
        (["card", "new"], "has not been evaluated: run `doubly evaluate new` first"),
        (["card", "nowhere"], "has not been evaluated"),
        (["push", run_dir], "add --repo OWNER/NAME, or --dry-run"),
        (["push", run_dir, "--repo", "../net"], "'../net' is no repository of the Hub: write OWNER/NAME"),
        (["push", "new", "--dry-run"], "has not been evaluated"),
    ]
    if importlib.util.find_spec("huggingface_hub"):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        cases.append((["push", run_dir, "--repo", "me/net"], "nothing was uploaded to me/net (ConnectError"))
    for words, sentence in cases:
        code, _, err = call(*words)
        assert code == 2 and sentence in err and err.count("\n") == 1, (words, err)
    for module, words in (
        ("onnxruntime", ["export", run_dir, "--output", "x.onnx"]),
        ("huggingface_hub", ["push", run_dir, "--repo", "me/net"]),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        code, _, err = call(*words)
        assert code == 2 and "pip install 'doubly[" in err, err
    assert not list(tmp_path.glob("x.*"))
