"""Repair from Python: the result, its files, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offset_problems as problems
from doubly import LinfBall, UsageError, repair
from doubly.models.shifted import ShiftedLogits
from doubly.rundir import read_json

QUICK = {"rounds": 3, "images": 100, "judge_images": 100}


@pytest.fixture(scope="module")
def repaired(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repair") / "out"
    torch.manual_seed(0)
    model = problems.Rows()
    result = repair(model, problems.bright_rows(200), LinfBall(0.05), output=folder, **QUICK)
    return model, result, folder


def test_the_weakest_classes_rise_on_images_that_did_not_fit(repaired):
    _, result, _ = repaired
    assert result.after.tail("margin")[0] > result.before.tail("margin")[0] + 0.1
    assert {row.attack for row in result.differences(50)} == {"clean", "margin"}
    assert result.offsets.sum().item() == pytest.approx(0, abs=1e-5)


def test_files_hold_the_network_and_what_was_done(repaired):
    model, result, folder = repaired
    assert sorted(path.name for path in folder.iterdir()) == ["repair.json", "weights.safetensors"]
    other = problems.Rows()
    other.load_state_dict(load_file(folder / "weights.safetensors"))
    x = problems.bright_rows(8, seed=3).pixels(slice(None))
    assert torch.allclose(other(x), model(x) + result.offsets, atol=1e-5)
    saved = read_json(folder / "repair.json")
    assert saved["folded_into"] == "head" and list(saved["offsets"].values()) == result.offsets.tolist()
    assert not set(saved["fit_images"]["ids"]) & set(saved["judge_images"]["ids"])
    assert saved["judge_images"]["n"] == saved["before"]["n"] == saved["after"]["n"] == 100
    assert len(saved["after"]["per_class"]["0"]["ra_margin_interval"]) == 2
    assert saved["fit"]["implicit_share"] < 1 and saved["settings"]["rounds"] == 3


def test_priority_scales_the_offsets(repaired):
    model, result, _ = repaired
    half = repair(model, problems.bright_rows(200), LinfBall(0.05), priority=0.5, **QUICK)
    assert torch.equal(half.fit.offsets, result.fit.offsets)
    assert torch.allclose(half.offsets, 0.5 * result.offsets)
    x = problems.bright_rows(8, seed=3).pixels(slice(None))
    assert torch.allclose(half.at(0.0)(x), model(x), atol=1e-5)
    assert torch.allclose(half.at(1.0)(x), result.model(x), atol=1e-5)
    with pytest.raises(UsageError, match="priority lies in"):
        half.at(2.0)


def test_a_network_that_cannot_be_folded_is_wrapped():
    result = repair(problems.Rows(divided_by=2.0), problems.bright_rows(100), LinfBall(0.05), **QUICK)
    assert result.layer is None and isinstance(result.model, ShiftedLogits)
    assert any("behind the network" in note for note in result.notes)


def test_what_cannot_work_is_refused(tmp_path):
    model, images = problems.Rows(), problems.bright_rows(40)
    (tmp_path / "file").write_text("")
    single = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    for arguments, settings, message in [
        ((images, images), {}, "an nn.Module"),
        ((model, images, 8 / 255), {}, "the third argument is the threat"),
        ((model, images), {"gain": 2}, "no setting 'gain'"),
        ((model, images), {"test": images}, "are test images"),
        ((model, images), {"priority": 2}, "priority lies in"),
        ((model, images), {"priority": "high"}, "priority must be a number, got 'high'"),
        ((model, images), {"priority": True}, "priority must be a number, got True"),
        ((model, images), {"rounds": 1.5}, "rounds must be a whole number, got 1.5"),
        ((model, images), {"implicit": 1}, "implicit must be True or False, got 1"),
        ((model, images), {"fit_on": 3}, "fit_on"),
        ((model, images), {"temperature": -1}, "must be positive"),
        ((model, images), {"output": tmp_path}, "is not empty"),
        ((model, images.subset(images.y == 1)), {}, "of 1 class"),
        ((single, images), {}, "logits"),
    ]:
        with pytest.raises(UsageError, match=message):
            repair(*arguments, **settings)
