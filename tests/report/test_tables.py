import csv
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from doubly.report import forms, tables
from doubly.report.collect import collect, compare
from doubly.report.paper import PRINTED, printed
from doubly.report.tables import Cell, Column
from doubly.rundir import RunDir, append_metrics, read_json, write_json


@pytest.fixture
def made(make_run):
    for name, robust in (("at", 0.4), ("done_pgd", 0.7)):
        for seed in (0, 1):
            path = make_run(f"digits.imbalanced.{name}", seed=seed, robust=robust)
    return tables.table(compare(collect([path.parent]))[0])


def test_the_numbers_are_those_of_the_files(make_run):
    runs = [make_run(seed=seed) for seed in (0, 1)]
    results = collect(runs)
    table = tables.table(compare(results)[0])
    row = table.rows[0]
    a, b = (100 * result.evaluation["ra_tail_30"] for result in results)
    assert row[3].text == f"{(a + b) / 2:.1f} ± {abs(a - b) / 2**0.5:.1f}"
    by_name = dict(zip([column.name for column in table.columns], row, strict=True))
    assert by_name["seconds"].text == "12 ± 0" and by_name["seeds"].text == "2"


def test_one_seed_prints_no_deviation(make_run):
    made = tables.table(compare(collect([make_run()]))[0])
    assert not any("±" in cell.text for cell in made.rows[0]) and "±" not in made.notes[0]
    assert not any(cell.best for cell in made.rows[0])  # alone is not best


def test_the_best_of_each_column_is_marked(made):
    assert [cell.best for cell in made.rows[1]][2:5] == [True] * 3
    assert not any(cell.best for cell in made.rows[0][2:5])


def test_best_is_what_reads_as_best():
    column = tables._mark([Cell(mean=1.04), Cell(mean=1.01), Cell(mean=0.9), Cell(mean=float("nan"))], max)
    assert [cell.best for cell in column] == [True, True, False, False]
    assert [cell.best for cell in tables._mark([Cell(mean=1.0), Cell(mean=2.0)], min)] == [True, False]
    assert not any(cell.best for cell in tables._mark([Cell(mean=1.0)] * 2, min))  # all equal: none is best


def test_the_caption_says_how(made):
    for expected in ("PGD-20", "ε = 0.15", "n = 400", "training seeds 0, 1"):
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
    lines = forms.markdown(made).splitlines()
    assert (
        lines[2] == "| method | SA | RA-PGD | RA-Tail-30 | worst class | seconds | passes per step | peak MB | seeds |"
    )
    assert lines[5].startswith("| DONE-PGD |") and f"**{made.rows[1][2].text}**" in lines[5]


def test_csv_is_read_back_unrounded(made):
    rows = list(csv.DictReader(io.StringIO(forms.csv([made, made]))))
    assert len(rows) == 4 and rows[1]["method"] == "DONE-PGD" and rows[1]["table"] == "digits.imbalanced"
    assert float(rows[1]["RA-PGD"]) == made.rows[1][2].mean and float(rows[1]["RA-PGD sd"]) == made.rows[1][2].sd


def test_hostile_names_are_escaped_in_every_form(make_run):
    names = ["a|b\n<script>", "%&_#$", "[bold]", "*x*"]
    made = tables.table(compare(collect([make_run(classes=[name], n=8, robust=0.5) for name in names]))[0])
    texts = [tables.table(c).rows[0][4].text for c in compare(collect([make_run(classes=[n]) for n in names]))]
    assert all(name in text for name, text in zip(names, texts, strict=True))
    one = tables.Table(
        "t",
        (Column("a"), Column("b")),
        ((Cell(names[0]), Cell(names[1])), (Cell(names[2]), Cell(names[3]))),
        made.notes,
    )
    assert "| a\\|b \\<script\\> | %&\\_#$ |" in forms.markdown(one)
    assert r"a|b \textless{}script\textgreater{} & \%\&\_\#\$ \\" in forms.latex(one)
    console = Console(file=io.StringIO(), width=100)
    console.print(forms.terminal(one))
    assert "[bold]" in console.file.getvalue() and "%&_#$" in console.file.getvalue()


def test_a_narrow_terminal_gets_the_accuracies(made):
    def shown(width):
        console = Console(file=io.StringIO(), width=width)
        forms.show([made], console)
        return console.file.getvalue()

    assert "peak" in shown(140) and "peak" not in shown(90)
    assert "RA-Tail-30" in shown(90) and made.rows[0][3].text in shown(90)


def test_latex_keeps_its_shape(made):
    text = forms.latex(made)
    assert text.count(r"\\") == 3 and text.count(" & ") == 3 * 8 and r"\textbf{" in text and "±" not in text


def test_costs_are_shown_where_they_were_recorded(make_run):
    runs = [make_run(), make_run(seed=1)]
    row = {"epoch": 6, "loss": 1.0, "lr": 0.1, "seconds": 2.0, "passes_forward": 11.0, "passes_backward": 12.0}
    append_metrics(RunDir(runs[1]), row | {"peak_memory": 512 * 2**20})
    made = tables.table(compare(collect(runs))[0])
    by_name = dict(zip([column.name for column in made.columns], made.rows[0], strict=True))
    assert by_name["passes per step"].text == "11.0 + 12.0" and by_name["peak MB"].text == "512"  # of one of two seeds


def test_passes_that_were_foreseen_stand_beside_those_that_were_counted(make_run):
    runs = [make_run(), make_run(name="digits.imbalanced.fat"), make_run(name="digits.imbalanced.old")]
    for path, foreseen in zip(runs, ({"passes_forward": 11, "passes_backward": 11.0}, "damaged"), strict=False):
        about = read_json(path / "environment.json")
        write_json(path / "environment.json", {**about, "predicted": foreseen})
    made = tables.table(compare(collect(runs))[0])
    names = [column.name for column in made.columns]
    assert names.index("predicted") == names.index("passes per step") + 1
    assert [row[names.index("predicted")].text for row in made.rows] == ["11.0 + 11.0", "-", "-"]
    console = Console(file=io.StringIO(), width=80)
    forms.show([made], console)
    assert "predicted" not in console.file.getvalue() and "RA-Tail-30" in console.file.getvalue()


def autoattacked(path, accuracy=0.4):
    about = {"label": "RA-AA", "complete": True, "n": 200, "reference": "pyautoattack 9"}
    write_json(path / "evaluation.json", read_json(path / "evaluation.json") | {"ra_aa": accuracy, "autoattack": about})
    return path


def test_autoattack_has_its_column_and_says_on_how_many_images(make_run):
    runs = [autoattacked(make_run()), make_run(seed=1), make_run("digits.imbalanced.done_pgd")]
    made = tables.table(compare(collect(runs))[0])
    place = [column.name for column in made.columns].index("RA-AA")
    assert [row[place].text for row in made.rows] == ["40.0", "-"]
    assert "on n = 200 of the images (pyautoattack 9)" in made.notes[1]
    assert made.notes[2] == "RA-AA is of some seeds only: AT 1 of 2, DONE-PGD 0 of 1."


def test_unequal_training_is_said(make_run):
    runs = [make_run(epochs=2), make_run("digits.imbalanced.done_pgd", epochs=6)]
    assert "The rows differ in epochs (AT: 2, DONE-PGD: 6)." in tables.table(compare(collect(runs))[0]).notes


def test_a_run_measured_before_its_end_is_said_and_so_is_an_unfinished_line(make_run):
    path = make_run()
    write_json(path / "evaluation.json", read_json(path / "evaluation.json") | {"epoch": 2})
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"epoch": 6, "lo')
    notes = tables.table(compare(collect([path]))[0]).notes
    assert "AT, seed 0, was measured after epoch 2 of 6." in notes
    assert any("unfinished last line" in note for note in notes)


def test_a_shared_machine_is_said(make_run):
    path = make_run()
    append_metrics(RunDir(path), {"epoch": 6, "seconds": 500.0})
    assert "1 of 1 runs an epoch took over twice" in tables.table(compare(collect([path]))[0]).notes[-1]


def test_nothing_steers_a_terminal_or_a_spreadsheet(make_run):
    path = make_run(classes=["\x1b[2J", "=1+1"])
    made = tables.table(compare(collect([path]))[0])
    console = Console(file=io.StringIO(), width=200)
    forms.show([made], console)
    assert "\x1b" not in console.file.getvalue()
    worst = next(iter(csv.DictReader(io.StringIO(forms.csv([made])))))["worst class of"]
    assert not worst.startswith("=")


def test_machines_that_differ_are_said(make_run):
    runs = [make_run(), make_run(seed=1)]
    for path, threads in zip(runs, (1, 2), strict=True):
        write_json(path / "environment.json", {"threads": threads, "device": "cpu"})
    assert tables.table(compare(collect(runs))[0]).notes[-1] == (
        "The runs differ in threads (1, 2): their seconds do not compare."
    )


# --- the paper's layout, and its numbers -----------------------------------------------------------------------------


def papers(path, ratio=None, **changes):
    """Make the run one of the paper's setting, as far as its files say."""
    radius = {"kind": "threat.linf", "radius": 8 / 255}
    attack = {"kind": "attack.pgd", "threat": radius, "steps": 20, "start": "uniform", "restarts": 1}
    attack["rule"] = {"kind": "step.sign", "size": 2 / 255}
    imbalance = {"kind": "imbalance.step", "ratio": ratio} if ratio else {"kind": "imbalance.balanced"}
    config = {
        "data": {"source": {"kind": "dataset.cifar10"}, "imbalance": imbalance, "holdout": 0.0, "train_images": None},
        "model": {"kind": "model.resnet18"},
        "method": {"attack": {"threat": radius, "steps": 10}},
        "validation": {"attack": attack},
        "epochs": 60,
        "batch": 128,
    }
    write_json(path / "config.json", read_json(path / "config.json") | config | changes)
    evaluation = read_json(path / "evaluation.json")
    write_json(path / "evaluation.json", evaluation | {"n": 10_000, "protocol": {"attack": attack, "seed": 0}})
    return path


def test_the_papers_numbers_stand_beside_ours_where_the_setting_is_the_same(make_run):
    same = tables.table(compare(collect([papers(make_run("cifar10.imbalanced.done_pgd"), 0.2)]))[0])
    assert [cell.label for cell in same.rows[0][1:4]] == ["paper 74.58", "paper 48.13", "paper 15.83"]
    for other in ({"epochs": 30}, {"batch": 64}, {"model": {"kind": "model.narrow_resnet"}}):
        made = tables.table(compare(collect([papers(make_run("cifar10.done_pgd"), **other)]))[0])
        assert [cell.label for cell in made.rows[0][1:4]] == ["", "", ""]
    few = autoattacked(papers(make_run("cifar10.at")))
    (row,) = tables.table(compare(collect([few]))[0]).rows
    assert [cell.label for cell in row[1:5]] == ["paper 82.10", "paper 49.29", "paper 28.35", ""]  # RA-AA on 200 images
    assert not printed("DONE-PGD", collect([make_run("cifar10.done_pgd")]))  # another attack, fewer images


def test_what_is_printed_is_in_the_paper():
    """Each number, in its row and in the order of its columns."""
    paper = Path(__file__).parents[3] / "shared" / "paper" / "done.tex"
    if not paper.is_file():
        pytest.skip("the paper is not beside the checkout")
    lines = re.sub(r"\\textbf|[{}\\]|text", " ", paper.read_text(encoding="utf-8")).splitlines()
    for rows in PRINTED.values():
        for label, numbers in rows.items():
            name = "DONE" if label == "DONE-FAST" else label
            found = [line for line in lines if re.match(rf"\W*(midrule)?\W*{name}\s*&", line)]
            texts = [" ".join(re.findall(r"\d+\.\d+", line)) for line in found]
            wanted = [re.escape(f"{number:g}") + "0?" for number in numbers]
            assert any(re.search(" ".join(wanted), text) for text in texts), (label, numbers, texts)


def test_settings_stand_side_by_side(make_run):
    names = ["cifar10.small.at", "cifar10.small.done_pgd", "cifar10.imbalanced.small.at", "digits.at"]
    comparisons = compare(collect([make_run(name) for name in names]))
    ((title, sides),) = tables.layouts(comparisons).items()
    made = tables.side_by_side(title, sides)
    assert made.title == "Table 1: CIFAR-10, small scale"
    assert made.groups == [("", 1), ("balanced", 3), ("imbalanced", 3)]
    assert [[cell.text for cell in row][4:] for row in made.rows][1] == ["-"] * 3  # DONE was run on one of them
    assert any(note.startswith("Imbalanced: Percent of n = 400") for note in made.notes)
    assert r"\multicolumn{3}{c}{imbalanced}" in forms.latex(made) and "| balanced SA |" in forms.markdown(made)
    fast = compare(collect([make_run("cifar10.small.fast_at"), make_run("cifar10.small.done_fast")]))
    assert list(tables.layouts(fast)) == ["Table 4: CIFAR-10, fast setting, small scale"]
    pair = compare(collect([make_run("digits.at"), make_run("digits.imbalanced.at")]))
    assert list(tables.layouts(pair)) == ["digits"]


def test_a_setting_measured_in_two_ways_stands_in_no_paper_table(make_run):
    runs = [make_run("cifar10.at"), make_run("cifar10.at", n=300), make_run("cifar10.imbalanced.at")]
    assert tables.layouts(compare(collect(runs))) == {}
