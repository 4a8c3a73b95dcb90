"""Results are read back as they were written, and damaged files are refused."""

import json
import re

import numpy as np
import pytest

from doubly.errors import UsageError
from doubly.evaluation.io import check_folder
from doubly.evaluation.result import EvalResult
from doubly.rundir import read_json, write_json


def random_result(names=("a", "b", "c"), **fields):
    y, clean, pgd = np.random.default_rng(0).integers(0, len(names), (3, 60))
    return EvalResult(y, tuple(names), {"clean": clean, "pgd": pgd}, **fields)


def test_what_is_saved_is_loaded(tmp_path):
    losses = np.random.default_rng(1).random(60)
    base = random_result()
    third = np.where(np.arange(60) % 3 == 0, base.predictions["pgd"], -1)
    saved = EvalResult(
        base.y,
        base.classes,
        {**base.predictions, "autoattack": third},
        {"seed": 3, "attack": {"steps": 20}},
        np.arange(60) * 7,
        {"pgd": losses},
        {"apgd-ce": third == base.y},
        {"label": "x", "complete": True},
        None,
        {"n": 60, "asked": 60, "outside": 0, "changed": 0, "largest": 1.0},
        {"verdict": "fine", "lines": []},
        0.5,
        "floor",
        (2.0, 0.5),
        "mean_one",
        {"clean": losses - 0.5, "pgd": np.full(60, np.inf)},
        {"n": 3, "points": []},
    )
    folder = tmp_path / "new" / "folder"
    saved.save(folder, epoch=4)
    loaded = EvalResult.load(folder)
    assert loaded.summary() == json.loads(json.dumps(saved.summary(), allow_nan=False))
    assert read_json(folder / "evaluation.json") == {"epoch": 4, **loaded.summary()}
    for name in ("tail_share", "tail_rounding", "weights_r", "weights_normalize", "classes", "examples", "curve"):
        assert getattr(loaded, name) == getattr(saved, name)
    for name in ("predictions", "losses", "robust_after", "margins"):
        ours, theirs = getattr(saved, name), getattr(loaded, name)
        assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)
    np.testing.assert_array_equal(loaded.ids, saved.ids)
    with np.load(folder / "evaluation.npz") as arrays:
        expected = np.stack([saved.weights(r, "mean_one").weights for r in (2.0, 0.5)])
        np.testing.assert_array_equal(arrays["weights"], expected)
    assert sorted(file.name for file in folder.iterdir()) == ["evaluation.json", "evaluation.npz"]


def test_what_a_file_lacks_is_empty(tmp_path):
    random_result().save(tmp_path)
    loaded = EvalResult.load(tmp_path)
    assert loaded.margins == loaded.losses == loaded.curve == loaded.autoattack == {}
    assert loaded.ids.tolist() == list(range(60))


def test_hostile_class_names_are_loaded_as_they_are_but_distinct(tmp_path):
    for names in (["s"] * 3, ["", "\n", "<b>", "ß \U0001f600", '"'], ["n", "sa", "a", "a", "a (2)"]):
        saved = random_result(names)
        saved.save(tmp_path)
        loaded = EvalResult.load(tmp_path)
        assert list(loaded.classes) == loaded.names == saved.names and loaded.summary() == saved.summary()
    random_result(["\udcff", *"bcd"]).save(tmp_path)  # not valid UTF-8
    assert len(EvalResult.load(tmp_path).classes) == 4


def test_another_version_is_refused(tmp_path):
    for content in ({}, {"schema": 99}, {"schema": None}, [1], "text"):
        write_json(tmp_path / "evaluation.json", content)
        with pytest.raises(UsageError, match="of another version: run `doubly evaluate` again"):
            EvalResult.load(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_files_are_refused_with_their_folder(tmp_path):
    def damage(file, content):
        return lambda folder: (folder / file).write_bytes(content)

    for number, change in enumerate(
        (
            lambda folder: (folder / "evaluation.npz").unlink(),
            lambda folder: (folder / "evaluation.json").unlink(),
            damage("evaluation.npz", b"not arrays"),
            damage("evaluation.npz", b""),
            lambda folder: damage("evaluation.npz", (folder / "evaluation.npz").read_bytes()[:200])(folder),
            lambda folder: np.savez(folder / "evaluation.npz", y=np.array([0]), ids=np.array([0])),
            lambda folder: write_json(folder / "evaluation.json", {"schema": 2}),
        )
    ):
        folder = tmp_path / str(number)
        random_result().save(folder)
        change(folder)
        with pytest.raises(UsageError, match=re.escape(str(folder))):
            EvalResult.load(folder)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    check_folder(tmp_path / "new" / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is not a folder that may be written"):
        check_folder(tmp_path / "file" / "folder")
