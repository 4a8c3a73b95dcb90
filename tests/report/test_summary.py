import pytest

from doubly.report.collect import collect, compare
from doubly.report.summary import sentence
from doubly.rundir import read_json, write_json


def said(make_run, **tails):
    """The sentence about methods with these tail accuracies, one per seed."""
    for name, values in tails.items():
        for seed, value in enumerate(values):
            path = make_run(f"digits.{name}", seed=seed)
            write_json(path / "evaluation.json", read_json(path / "evaluation.json") | {"ra_tail_30": value})
    return sentence(compare(collect([path.parent]))[0])


@pytest.mark.parametrize(
    ("tails", "method", "expected"),
    [
        (
            {"at": [0.29], "done_pgd": [0.41], "done_gd": [0.35]},
            "DONE-PGD",
            "41 % of attacks, up from 29 % with AT (one seed of DONE-PGD and AT)",
        ),
        ({"at": [0.28, 0.3], "done_pgd": [0.4, 0.42]}, "DONE-PGD", "41 % of attacks, up from 29 % with AT"),
        ({"at": [0.41], "done_pgd": [0.29]}, "DONE-PGD", "29 % of attacks, fewer than the 41 % with AT"),
        ({"at": [0.3], "mail": [0.301]}, "MAIL", "30 % of attacks, not clearly different from the 30 % with AT"),
        (
            {"at": [0.2, 0.4], "mail": [0.25, 0.45]},
            "MAIL",
            "35 % of attacks, not clearly different from the 30 % with AT",
        ),
        ({"at": [0.3]}, "AT", "30 % of attacks"),
        ({"trades": [0.3], "done_pgd": [0.5]}, "DONE-PGD", "50 % of attacks"),
    ],
)
def test_it_claims_what_the_numbers_show(make_run, tails, method, expected):
    assert said(make_run, **tails).replace("\u00a0", " ") == (
        f"With {method} the weakest three of ten classes hold in {expected}."
    )


def test_what_autoattack_leaves_of_it_is_said(make_run):
    for name, accuracy in (("at", 0.45), ("gairat", 0.35)):
        path = make_run(f"digits.{name}")
        about = {"label": "RA-AA", "n": 200}
        kept = read_json(path / "evaluation.json") | {"ra_tail_30": accuracy, "ra_aa": accuracy, "autoattack": about}
        write_json(path / "evaluation.json", kept)
    text = sentence(compare(collect([path.parent]))[0]).replace("\u00a0", " ")
    assert text.endswith(" Under AutoAttack all classes together hold in 35 %, with AT in 45 %.")


def test_a_suspicious_winner_is_called_so(make_run):
    for name, tail in (("at", 0.3), ("gairat", 0.5)):
        path = make_run(f"digits.{name}")
        kept = read_json(path / "evaluation.json") | {"ra_tail_30": tail, "trust": {"verdict": "suspicious"}}
        write_json(path / "evaluation.json", kept)
    text = sentence(compare(collect([path.parent]))[0])
    assert text.endswith(" Numbers of GAIRAT under PGD are suspicious: see below.")
    cfol = make_run("digits.cfol")
    write_json(cfol / "evaluation.json", read_json(cfol / "evaluation.json") | {"ra_tail_30": 0.4})
    text = sentence(compare(collect([path.parent]))[0])
    assert text.startswith("With CFOL") and text.endswith(" Numbers of GAIRAT under PGD are suspicious: see below.")
