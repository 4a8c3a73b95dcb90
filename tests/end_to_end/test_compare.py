"""doubly compare."""

import shutil

import numpy as np
from rich.console import Console

from evaluation_inputs import PLAIN, command, is_one_sentence


def test_two_evaluations_are_compared_also_in_a_narrow_terminal(run, plain, complete, monkeypatch):
    code, out, err = run("compare", *plain, "--resamples", 50)
    assert (code, err) == (0, "") and all(word in out for word in ("average", "tail", "SA", "RA-PGD", "RA-margin"))
    correct = []
    for path in plain:
        with np.load(path / "evaluation.npz") as file:
            correct.append(file["pgd"] == file["y"])
    first, second = correct
    cells = next(line for line in out.splitlines() if "RA-PGD" in line).split()
    assert [int(cells[k]) for k in (2, -3, -2)] == [24, (first & ~second).sum(), (second & ~first).sum()]
    difference = 100 * (first.mean() - second.mean())
    assert cells[3] == f"{difference:+.1f}" and difference != 0
    monkeypatch.setattr("doubly.cli.OUT", Console(width=80))
    _, out, _ = run("compare", complete[0], complete[0], "--resamples", 10)
    assert "…" not in out and "RA-AA" in out and "+0.0 (+0.0, +0.0)" in out


def test_what_cannot_be_compared_is_refused(run, plain, tmp_path):
    for name, words, files, message in [
        ("fewer", ["--images", 8], {}, "of different samples: evaluate both models on the same images"),
        ("mirrored", [], {"data": "mirrored.npz"}, "differ in data_sha256"),
        ("weaker", ["--epsilon", 0.1], {}, "differ in pgd, threat: radius: 0.15 and 0.1: evaluate both with the same"),
    ]:
        assert run(*command("linear", "--epsilon", 0.15, *PLAIN, *words, **files, output=tmp_path / name))[0] == 0
        code, out, err = run("compare", plain[0], tmp_path / name)
        assert (code, out) == (2, "") and message in err and is_one_sentence(err)
    (tmp_path / "empty").mkdir()
    for words, message in [
        ([plain[0], tmp_path / "empty"], "evaluation.json does not exist: give a run directory"),
        ([tmp_path / "empty", plain[0]], "evaluation.json does not exist: give a run directory"),
        ([*plain, "--resamples", 0], "resamples"),
        ([*plain, "--seed", -1], "seed"),
    ]:
        code, out, err = run("compare", *words)
        assert (code, out) == (2, "") and message in err and is_one_sentence(err)


def test_a_damaged_evaluation_is_not_compared(run, plain, tmp_path):
    path = shutil.copytree(plain[1], tmp_path / "damaged")
    arrays = (path / "evaluation.npz").read_bytes()
    for count in (None, 200, 0):
        (path / "evaluation.npz").unlink(missing_ok=True)
        if count is not None:
            (path / "evaluation.npz").write_bytes(arrays[:count])
        code, _, err = run("compare", plain[0], path)
        assert code == 2 and "do not hold a complete evaluation" in err and is_one_sentence(err)
        assert "run `doubly evaluate` again" in err
    np.savez(path / "evaluation.npz")
    code, _, err = run("compare", plain[0], path)
    assert code == 2 and "evaluation.npz" in err and "run `doubly evaluate` again" in err and is_one_sentence(err)
    (path / "evaluation.json").write_text('{"schema": 2}')
    code, _, err = run("compare", plain[0], path)
    assert code == 2 and "evaluation.json" in err and "run `doubly evaluate` again" in err and is_one_sentence(err)
