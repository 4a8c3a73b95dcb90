from doubly.report.collect import collect, compare
from doubly.report.next_steps import next_steps
from doubly.report.notes import notes
from doubly.report.summary import headline, summary_sentence
from doubly.rundir import read_json, write_json


def change(path, **fields):
    write_json(path / "evaluation.json", read_json(path / "evaluation.json") | fields)
    return path


def sentence_of(runs):
    return summary_sentence(compare(collect(runs))[0]).replace("\u00a0", " ")


def test_the_sentence_claims_what_the_numbers_show(make_run):
    for tails, method, expected in [
        (
            {"at": [0.29], "done_pgd": [0.41], "done_gd": [0.35]},
            "DONE-PGD",
            "41 %, up from 29 % with AT (one seed of DONE-PGD and AT)",
        ),
        (
            {"at": [0.28, 0.3], "done_pgd": [0.4, 0.42]},
            "DONE-PGD",
            "41 %, up from 29 % with AT (judged over seeds, on 400 images)",
        ),
        ({"at": [0.41], "done_pgd": [0.29]}, "DONE-PGD", "29 %, less than the 41 % with AT"),
        ({"at": [0.3], "mail": [0.301]}, "MAIL", "30 %, not clearly different from the 30 % with AT"),
        ({"at": [0.2, 0.4], "mail": [0.25, 0.45]}, "MAIL", "35 %, not clearly different from the 30 % with AT"),
        ({"at": [0.3]}, "AT", "30 %"),
        ({"trades": [0.3], "done_pgd": [0.5]}, "DONE-PGD", "50 %"),
    ]:
        runs = [
            change(make_run(f"digits.{name}", seed=seed, epochs=0), ra_tail_30=value)
            for name, values in tails.items()
            for seed, value in enumerate(values)
        ]
        assert sentence_of(runs) == (
            f"With {method}, accuracy under attack on the weakest three of ten classes is {expected}."
        )


def test_the_sentence_includes_autoattack_where_all_runs_have_it(make_run):
    runs = [
        change(make_run(f"digits.{name}"), ra_tail_30=value, ra_aa=value, autoattack={"label": "RA-AA", "n": 200})
        for name, value in (("at", 0.45), ("gairat", 0.35))
    ]
    assert sentence_of(runs).endswith(" Under AutoAttack, accuracy on all classes is 35 %, and 45 % with AT.")


def test_the_strong_attack_decides_where_all_runs_have_it(make_run):
    runs = [
        change(make_run(f"digits.{name}"), ra_tail_30=pgd, ra_strong_tail_30=strong)
        for name, pgd, strong in (("at", 0.3, 0.25), ("gairat", 0.5, 0.1), ("cfol", 0.4, 0.4))
    ]
    assert sentence_of(runs).startswith("With CFOL, accuracy under the strong attack on the weakest three of ten")
    evaluation = read_json(runs[0] / "evaluation.json")
    del evaluation["ra_strong_tail_30"]
    write_json(runs[0] / "evaluation.json", evaluation)
    assert sentence_of(runs).startswith("With GAIRAT, accuracy under attack on")


def test_the_headline_says_tail_and_average_with_differences_to_the_baseline(make_run):
    strong = {"ra_strong": 0.41, "ra_strong_tail_30": 0.2}
    for fields, expected, measured in [
        (
            {"at": {"ra_pgd": 0.433, "ra_tail_30": 0.158}},
            "AT: tail 15.8, average 43.3",
            "PGD-20, ℓ∞, ε = 0.15; one seed",
        ),
        (
            {"at": {"ra_pgd": 0.433, "ra_tail_30": 0.158}, "cfol": {"ra_pgd": 0.422, "ra_tail_30": 0.303}},
            "CFOL: tail 30.3 (+14.5), average 42.2 (−1.1) against AT",
            "Percent of n = 400 test images under PGD-20",
        ),
        (
            {"at": strong, "trades": strong | {"ra_strong_tail_30": 0.31}},
            "TRADES: tail 31.0 (+11.0), average 41.0 (±0.0) against AT",
            "under the strong attack, ℓ∞, ε = 0.15; one seed. Tail: mean over the weakest three of ten classes",
        ),
    ]:
        runs = [change(make_run(f"digits.{name}", epochs=0), **values) for name, values in fields.items()]
        found = headline(compare(collect(runs))[0])
        assert str(found) == expected and measured in found.measured, found
    assert "on the weakest of three classes is" in sentence_of([make_run("pets.at", classes=3, epochs=0)])


def test_what_to_do_next(make_run):
    """Each step only where its command would be accepted and its result is not there already."""
    weak, held = {"ra_pgd": 0.6, "ra_tail_30": 0.3}, {"source": {"kind": "dataset.digits"}, "holdout": 0.1}
    at = change(make_run("digits.at", data=held), **weak)
    commands = [step.command for step in next_steps(compare(collect([at]))[0])]
    retrain = "doubly train digits.cfol --epsilon 0.15"
    assert commands == [f"doubly repair {at}", retrain, f"doubly evaluate {at} --autoattack"]
    titles = [step.title for step in next_steps(compare(collect([at]))[0])]
    assert titles[0] == "Without training" and titles[1].startswith("Retrain with cfol")
    folder = {"source": {"kind": "dataset.folder", "path": "pets"}, "holdout": 0.0, "root": "my photos"}
    for run, expected in [
        (change(make_run("pets.at", data=folder), **weak), "doubly train --data 'my photos/pets' --method cfol"),
        (change(make_run("digits.cfol", data=held), **weak), "doubly repair"),
        (change(make_run("digits.at", data=held), ra_pgd=0.6, ra_tail_30=0.5), "doubly evaluate"),
        (change(make_run("mine.at"), **weak), "doubly repair"),
    ]:
        assert str(next_steps(compare(collect([run]))[0])[0].command).startswith(expected), run
    network = change(make_run(), **weak)
    (network / "config.json").unlink()
    about = {"model": "mynet:build", "weights": "w.safetensors", "data": "my_images"}
    change(network, protocol=read_json(network / "evaluation.json")["protocol"] | about)
    assert [step.command for step in next_steps(compare(collect([network]))[0])] == [
        "doubly repair --model mynet:build --weights w.safetensors --data my_images --epsilon 0.15",
        "doubly train --data my_images --method cfol --model mynet:build --epsilon 0.15",
    ]
    repaired, other = make_run("digits.at", label="AT repaired", data=held), make_run("digits.mail", data=held)
    write_json(repaired / "repair.json", {})
    comparison = compare(collect([other, repaired, at]))[0]
    assert list(comparison.methods) == ["AT", "AT repaired", "MAIL"]
    assert not any("doubly repair" in step.command for step in next_steps(comparison))
    assert next_steps(comparison)[-1].command.startswith("doubly compare")
    assert any(note.startswith("AT repaired: networks of AT with class offsets") for note in notes(comparison))


def test_a_suspicious_method_is_named_and_wins_only_if_all_are_suspicious(make_run):
    warning = " Accuracies of GAIRAT under PGD are suspicious (see the checks below)."
    runs = [
        change(make_run(f"digits.{name}"), ra_tail_30=value, trust={"verdict": "suspicious"})
        for name, value in (("at", 0.3), ("gairat", 0.5))
    ]
    assert sentence_of(runs).startswith("With GAIRAT,") and sentence_of(runs).endswith(warning)
    runs.append(change(make_run("digits.cfol"), ra_tail_30=0.4))
    assert sentence_of(runs).startswith("With CFOL,") and sentence_of(runs).endswith(warning)
