import csv
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from doubly.report import forms, tables
from doubly.report.collect import collect, compare
from doubly.report.html import Section
from doubly.report.paper import PRINTED, printed
from doubly.report.tables import Cell, Column
from doubly.rundir import RunDir, append_metrics, read_json, write_json


def table_of(runs):
    return tables.table(compare(collect(runs))[0])


def by_name(table, row=0):
    return dict(zip([column.name for column in table.columns], table.rows[row], strict=True))


def change(path, file="evaluation.json", **fields):
    write_json(path / file, read_json(path / file) | fields)
    return path


def with_autoattack(path, accuracy=0.4):
    settings = {"label": "RA-AA", "complete": True, "n": 200, "reference": "pyautoattack 9"}
    return change(path, ra_aa=accuracy, autoattack=settings)


def printed_text(table, width):
    console = Console(file=io.StringIO(), width=width)
    forms.show([table], console)
    return console.file.getvalue()


@pytest.fixture
def table(make_run):
    for name, robust in (("at", 0.4), ("done_pgd", 0.7)):
        for seed in (0, 1):
            path = make_run(f"digits.imbalanced.{name}", seed=seed, robust=robust)
    return table_of([path.parent])


def test_the_numbers_are_those_of_the_files(make_run):
    runs = [make_run(seed=seed) for seed in (0, 1)]
    row = by_name(table_of(runs))
    a, b = (100 * result.evaluation["ra_tail_30"] for result in collect(runs))
    assert row["RA-Tail-30"].text == f"{(a + b) / 2:.1f} ± {abs(a - b) / 2**0.5:.1f}"
    assert row["seconds"].text == "12 ± 0" and row["seeds"].text == "2"
    single = table_of(runs[:1])
    assert not any("±" in cell.text or cell.best for cell in single.rows[0]) and "±" not in single.notes[0]


def test_an_attack_that_is_not_in_the_list_of_metrics_has_a_column(make_run):
    path = make_run()
    tail = read_json(path / "evaluation.json")["tail"]
    change(path, ra_fgsm=0.456, tail={**tail, "fgsm": {}})
    assert by_name(table_of([path]))["RA-fgsm"].text == "45.6"
    (comparison,) = compare(collect([path]))
    assert Section(comparison, tables.table(comparison)).explanations["RA-fgsm"] == "accuracy under the attack fgsm"
    assert "RA-fgsm" not in by_name(table_of([change(path, ra_fgsm="damaged")]))


def test_the_best_of_each_column_is_marked_as_it_is_printed(table):
    assert [cell.best for cell in table.rows[1]][2:5] == [True] * 3
    assert not any(cell.best for cell in table.rows[0][2:5])
    column = tables._mark_best([Cell(mean=1.04), Cell(mean=1.01), Cell(mean=0.9), Cell(mean=float("nan"))], max)
    assert [cell.best for cell in column] == [True, True, False, False]
    assert [cell.best for cell in tables._mark_best([Cell(mean=1.0), Cell(mean=2.0)], min)] == [True, False]
    assert not any(cell.best for cell in tables._mark_best([Cell(mean=1.0)] * 2, min))  # all are equal


def test_every_output_format_holds_the_numbers(table):
    lines = forms.markdown(table).splitlines()
    head = "| method | SA | RA-PGD | RA-Tail-30 | worst class | seconds | passes per step | peak MB | seeds |"
    assert lines[2] == head
    assert lines[5].startswith("| DONE-PGD |") and f"**{table.rows[1][2].text}**" in lines[5]
    rows = list(csv.DictReader(io.StringIO(forms.csv([table, table]))))
    assert len(rows) == 4 and rows[1]["method"] == "DONE-PGD" and rows[1]["table"] == "digits.imbalanced"
    assert float(rows[1]["RA-PGD"]) == table.rows[1][2].mean and float(rows[1]["RA-PGD sd"]) == table.rows[1][2].sd
    latex = forms.latex(table)
    assert latex.count(r"\\") == 3 and latex.count(" & ") == 3 * 8 and r"\textbf{" in latex and "±" not in latex
    wide, narrow = printed_text(table, 140), printed_text(table, 90)
    assert "peak" in wide and "peak" not in narrow and "RA-Tail-30" in narrow and table.rows[0][3].text in narrow


def test_names_from_data_are_escaped_in_every_output_format(make_run):
    names = ["a|b\n<script>", "%&_#$", "[bold]", "\x1b[2J", "=1+1", "*x*"]
    cells = [Cell(name) for name in names]
    result = tables.Table("t", (Column("a"), Column("b")), tuple(zip(cells[::2], cells[1::2], strict=True)))
    assert "| a\\|b \\<script\\> | %&\\_#$ |" in forms.markdown(result)
    assert r"a|b \textless{}script\textgreater{} & \%\&\_\#\$ \\" in forms.latex(result)
    shown = printed_text(result, 100)
    assert "[bold]" in shown and "%&_#$" in shown and "\x1b" not in shown
    worst = by_name(table_of([make_run(classes=names[4:5])]))["worst class"]
    sheet = forms.csv([tables.Table("=t", (Column("worst class"),), ((worst,),))])
    assert worst.label == "=1+1" and next(csv.DictReader(io.StringIO(sheet)))["worst class of"] == "'=1+1"
    assert next(csv.DictReader(io.StringIO(sheet)))["table"] == "'=t"


def test_costs_are_shown_where_they_were_recorded(make_run):
    runs = [make_run(), make_run(seed=1)]
    row = {"epoch": 6, "loss": 1.0, "lr": 0.1, "seconds": 2.0, "passes_forward": 11.0, "passes_backward": 12.0}
    append_metrics(RunDir(runs[1]), row | {"peak_memory": 512 * 2**20})
    cells = by_name(table_of(runs))
    assert cells["passes per step"].text == "11.0 + 12.0" and cells["peak MB"].text == "512"  # of one of two seeds
    assert "predicted" not in cells


def test_predicted_passes_stand_beside_counted_ones(make_run):
    runs = [make_run(), make_run(name="digits.imbalanced.fat"), make_run(name="digits.imbalanced.old")]
    for path, predicted in zip(runs, ({"passes_forward": 11, "passes_backward": 11.0}, "damaged"), strict=False):
        change(path, "environment.json", predicted=predicted)
    result = table_of(runs)
    names = [column.name for column in result.columns]
    assert names.index("predicted") == names.index("passes per step") + 1
    assert [by_name(result, row)["predicted"].text for row in range(3)] == ["11.0 + 11.0", "-", "-"]


def test_notes_say_how_numbers_were_measured_and_why_rows_may_not_compare(make_run):
    def done(**settings):
        return make_run("digits.imbalanced.done_pgd", **settings)

    def broken():
        path = change(make_run(), epoch=2)
        with (path / "metrics.jsonl").open("a") as stream:
            stream.write('{"epoch": 6, "lo')
        return path

    def busy():
        path = make_run()
        append_metrics(RunDir(path), {"epoch": 6, "seconds": 500.0})
        return path

    def on(threads, **settings):
        return change(make_run(**settings), "environment.json", threads=threads)

    for runs, expected in [
        (
            [make_run(), make_run(seed=1)],
            "Accuracies in percent of n = 400 test images, mean ± sd over seeds. Attack: PGD-20, ℓ∞, ε = 0.15, "
            "step ε/4, 1 restart (seed 0, split test, checkpoint last, data_sha256 01234567). Training seeds 0, 1.",
        ),
        (
            [make_run(), make_run(n=300)],
            "Other runs of digits.imbalanced were measured differently (images) and are in",
        ),
        (
            [make_run(), make_run(seed=1), done()],
            "Training seeds AT: 0, 1; DONE-PGD: 0. The rows have different seeds.",
        ),
        ([make_run(), done(), done()], "DONE-PGD has several runs of the same seed."),
        (
            [with_autoattack(make_run())],
            "RA-AA: all four attacks of AutoAttack (pyautoattack 9) on n = 200 of the images.",
        ),
        (
            [with_autoattack(make_run()), make_run(seed=1), done()],
            "Only some seeds have RA-AA: AT 1 of 2, DONE-PGD 0 of 1.",
        ),
        (
            [make_run(epochs=2), done(epochs=6)],
            "The rows were trained with different settings: epochs (AT: 2, DONE-PGD: 6).",
        ),
        ([broken()], "AT, seed 0, was measured after epoch 2 of 6. AT, seed 0, has an unfinished last line"),
        ([busy()], "In 1 of 1 runs, an epoch took more than twice the median time: the machine was shared."),
        ([on(1), on(2, seed=1)], "The runs differ in threads (1, 2), so their seconds cannot be compared."),
        ([make_run(protocol={"attack": "PGD", "note": "other images"})], "other images."),
    ]:
        assert expected in " ".join(table_of(runs).notes)
    cells = by_name(table_of([with_autoattack(make_run()), done()]), 1)
    assert cells["RA-AA"].text == "-"


def with_paper_setting(path, ratio=None, **changes):
    """Make the files of the run say that it has the paper's setting."""
    ball = {"kind": "threat.linf", "radius": 8 / 255}
    attack = {"kind": "attack.pgd", "threat": ball, "steps": 20, "start": "uniform", "restarts": 1}
    attack["rule"] = {"kind": "step.sign", "size": 2 / 255}
    imbalance = {"kind": "imbalance.step", "ratio": ratio} if ratio else {"kind": "imbalance.balanced"}
    config = {
        "data": {"source": {"kind": "dataset.cifar10"}, "imbalance": imbalance, "holdout": 0.0, "train_images": None},
        "model": {"kind": "model.resnet18"},
        "method": {"attack": {"threat": ball, "steps": 10}},
        "validation": {"attack": attack},
        "epochs": 60,
        "batch_size": 128,
    }
    change(path, "config.json", **config | changes)
    return change(path, n=10_000, protocol={"attack": attack, "seed": 0})


def test_the_papers_numbers_stand_beside_ours_where_the_setting_is_the_same(make_run):
    def remarks(path):
        return [cell.label for cell in table_of([path]).rows[0][1:5]]

    same = with_paper_setting(make_run("cifar10.imbalanced.done_pgd"), 0.2)
    assert remarks(same)[:3] == ["paper 74.58", "paper 48.13", "paper 15.83"]
    for other in ({"epochs": 30}, {"batch_size": 64}, {"model": {"kind": "model.narrow_resnet"}}):
        assert remarks(with_paper_setting(make_run("cifar10.done_pgd"), **other))[:3] == ["", "", ""]
    on_200_images = with_autoattack(with_paper_setting(make_run("cifar10.at")))
    assert remarks(on_200_images) == ["paper 82.10", "paper 49.29", "paper 28.35", ""]
    assert not printed("DONE-PGD", collect([make_run("cifar10.done_pgd")]))  # another attack, fewer images


def test_printed_numbers_are_in_the_paper():
    """Each number, in its row and in the order of its columns."""
    paper = Path(__file__).parents[3] / "shared" / "paper" / "done.tex"
    if not paper.is_file():
        pytest.skip("the paper is not beside the checkout")
    lines = re.sub(r"\\textbf|[{}\\]|text", " ", paper.read_text(encoding="utf-8")).splitlines()
    for rows in PRINTED.values():
        for label, numbers in rows.items():
            name = "DONE" if label == "DONE-FAST" else label
            rows_of_paper = [line for line in lines if re.match(rf"\W*(midrule)?\W*{name}\s*&", line)]
            texts = [" ".join(re.findall(r"\d+\.\d+", line)) for line in rows_of_paper]
            pattern = " ".join(re.escape(f"{number:g}") + "0?" for number in numbers)
            assert any(re.search(pattern, text) for text in texts), (label, numbers, texts)


def test_settings_stand_side_by_side(make_run):
    def layouts(*names, **settings):
        return tables.layouts(compare(collect([make_run(name, **settings) for name in names])))

    names = ["cifar10.small.at", "cifar10.small.done_pgd", "cifar10.imbalanced.small.at", "digits.at"]
    ((title, sides),) = layouts(*names).items()
    result = tables.side_by_side(title, sides)
    assert result.title == "Table 1: CIFAR-10, small scale"
    assert result.groups == [("", 1), ("balanced", 3), ("imbalanced", 3)]
    assert [[cell.text for cell in row][4:] for row in result.rows][1] == ["-"] * 3  # DONE was run on one of them
    assert any(note.startswith("Imbalanced: Accuracies in percent of n = 400") for note in result.notes)
    assert r"\multicolumn{3}{c}{imbalanced}" in forms.latex(result) and "| balanced SA |" in forms.markdown(result)
    fast = layouts("cifar10.small.fast_at", "cifar10.small.done_fast", table="fast")
    assert list(fast) == ["Table 4: CIFAR-10, fast setting, small scale"]
    assert list(layouts("digits.at", "digits.imbalanced.at")) == ["digits"]
    assert layouts("digits.fast_at", table="fast") == {}
    two_ways = [make_run("cifar10.at"), make_run("cifar10.at", n=300), make_run("cifar10.imbalanced.at")]
    assert tables.layouts(compare(collect(two_ways))) == {}
