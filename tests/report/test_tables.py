import csv
import io

import pytest
from rich.console import Console

from doubly.report import tables
from doubly.report.collect import collect, compare
from doubly.report.tables import Cell


@pytest.fixture
def made(make_run):
    for name, robust in (("at", 0.4), ("done_pgd", 0.7)):
        for seed in (0, 1):
            path = make_run(f"digits.imbalanced.{name}", seed=seed, robust=robust)
    return tables.table(compare(collect([path.parent]))[0])


def test_the_numbers_are_those_of_the_files(make_run):
    runs = [make_run(seed=seed) for seed in (0, 1)]
    results = collect(runs)
    row = tables.table(compare(results)[0]).rows[0]
    a, b = (100 * result.evaluation["ra_tail_30"] for result in results)
    assert row[3].text == f"{(a + b) / 2:.1f} ± {abs(a - b) / 2**0.5:.1f}"
    assert row[5].text == "12 ± 0" and row[6].text == "2"


def test_one_seed_prints_no_deviation(make_run):
    made = tables.table(compare(collect([make_run()]))[0])
    assert not any("±" in cell.text for cell in made.rows[0]) and "±" not in made.notes[0]
    assert not any(cell.best for cell in made.rows[0])  # alone is not best


def test_the_best_of_each_column_is_marked(made):
    assert [cell.best for cell in made.rows[1]][2:5] == [True] * 3
    assert not any(cell.best for cell in made.rows[0][2:5])


def test_best_is_what_reads_as_best():
    column = tables._mark([Cell(mean=1.04), Cell(mean=1.01), Cell(mean=0.9), Cell(mean=float("nan"))], lowest=False)
    assert [cell.best for cell in column] == [True, True, False, False]
    assert [cell.best for cell in tables._mark([Cell(mean=1.0), Cell(mean=2.0)], lowest=True)] == [True, False]
    assert not any(cell.best for cell in tables._mark([Cell(mean=1.0)] * 2, lowest=True))  # all equal: none is best


def test_the_caption_says_how(made):
    for expected in ("PGD-20", "radius 0.15", "n = 400", "training seeds 0, 1"):
        assert expected in made.notes[0]


def test_unequal_seeds_are_said(make_run):
    runs = [
        make_run(),
        make_run(seed=1),
        make_run("digits.imbalanced.done_pgd"),
        make_run("digits.imbalanced.done_pgd"),
    ]
    notes = " ".join(tables.table(compare(collect(runs))[0]).notes)
    assert "do not share the same seeds: AT: 0, 1; DONE-PGD: 0, 0" in notes and "DONE-PGD counts a seed" in notes


def test_markdown(made):
    lines = tables.markdown(made).splitlines()
    assert lines[2] == "| method | SA | RA-PGD | RA-Tail-30 | worst class | seconds | seeds |"
    assert lines[5].startswith("| DONE-PGD |") and f"**{made.rows[1][2].text}**" in lines[5]


def test_csv_is_read_back_unrounded(made):
    rows = list(csv.DictReader(io.StringIO(tables.csv([made, made]))))
    assert len(rows) == 4 and rows[1]["method"] == "DONE-PGD" and rows[1]["table"] == "digits.imbalanced"
    assert float(rows[1]["RA-PGD"]) == made.rows[1][2].mean and float(rows[1]["RA-PGD sd"]) == made.rows[1][2].sd


def test_hostile_names_are_escaped_in_every_form(make_run):
    names = ["a|b\n<script>", "%&_#$", "[bold]", "*x*"]
    made = tables.table(compare(collect([make_run(classes=[name], n=8, robust=0.5) for name in names]))[0])
    texts = [tables.table(c).rows[0][4].text for c in compare(collect([make_run(classes=[n]) for n in names]))]
    assert all(name in text for name, text in zip(names, texts, strict=True))
    one = tables.Table(
        "t", ("a", "b"), ((Cell(names[0]), Cell(names[1])), (Cell(names[2]), Cell(names[3]))), made.notes
    )
    assert "| a\\|b \\<script\\> | %&\\_#$ |" in tables.markdown(one)
    assert r"a|b \textless{}script\textgreater{} & \%\&\_\#\$ \\" in tables.latex(one)
    console = Console(file=io.StringIO(), width=100)
    console.print(tables.terminal(one))
    assert "[bold]" in console.file.getvalue() and "%&_#$" in console.file.getvalue()


def test_latex_keeps_its_shape(made):
    text = tables.latex(made)
    assert text.count(r"\\") == 3 and text.count(" & ") == 3 * 6 and r"\textbf{" in text and "±" not in text
