"""Names from outside (folders, class names, runs) in every output form: they are shown, and nothing obeys them."""

import csv
import io
import json
import os
import random
import re

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import doubly
from doubly.data import ImageFolder, load_splits
from doubly.data.config import Data
from doubly.report import forms, write_report
from doubly.report.tables import Cell, Column, Table
from doubly.text import (
    FORMULA_STARTS,
    escape_csv,
    escape_html,
    escape_latex,
    escape_markdown,
    escape_terminal,
    file_name,
    printable,
    shorten,
    utf8,
)

PARTS = (
    "cat", "=1+1", "+", "-2", "@x", "\t=", "\x1b[2J", "\x1b]0;t\x07", "\n", "\r", "\x00", "\x85", "\u2028", "\udcff",
    "\ud83d", "<script>alert(1)</script>", "&amp;", "'", '"', "|", "`", "*", "_", "[", "]", "\\", "{", "}", "$", "%",
    "#", "~", "^", "\\end{tabular}", "[bold]", "../", "/", "é", "猫", "x" * 300,
)  # fmt: skip


def hostile_names(count):
    draw = random.Random(0)
    return [*PARTS, *("".join(draw.choices(PARTS, k=draw.randint(1, 5))) for _ in range(count))]


def one_table(name):
    columns = (Column(name), Column(name, group=name), Column("RA"))
    return Table(name, columns, ((Cell(name), Cell(name, best=True), Cell(mean=46.3)),), (name,))


def test_every_output_form_survives_hostile_names():
    control = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
    for name in hostile_names(300):
        for form in (printable, escape_terminal, escape_markdown, escape_latex, escape_csv, escape_html, shorten):
            text = form(name)
            assert not control.search(text) and "\n" not in text and utf8(text) == text, (form, name)
        assert not escape_csv(name).lstrip().startswith(FORMULA_STARTS)
        assert not re.search("[<>\"']", escape_html(name)) and not re.search(r"(?<!\\)[|<`*]", escape_markdown(name))
        latex = re.sub(r"\\[&%$#_{}]|\\text\w+\{\}|\{[][]\}", "", escape_latex(name))
        assert not re.search(r"[][\\{}$&#%_~^]", latex), (name, latex)
        assert len(shorten(name)) <= 24 and len(utf8(name).encode()) >= len(name)
        file = file_name(name)
        assert len(file.encode()) <= 120 and not set("/\0\n") & set(file)
        table, console = one_table(name), Console(file=io.StringIO(), width=2000)
        forms.show([table], console)
        rows = list(csv.reader(io.StringIO(forms.csv([table]))))
        assert len(rows) == 2 and not any(cell.startswith(FORMULA_STARTS) for row in rows for cell in row)
        for text in (console.file.getvalue(), forms.markdown(table), forms.latex(table)):
            assert utf8(text) == text and "\x1b" not in text
        assert forms.latex(table).count("\\end{tabular}") == 1
    assert file_name("a" * 300) != file_name("a" * 299 + "b") and utf8("\udce9t\u00e9") == "\\xe9t\u00e9"


def test_training_from_folders_whose_names_are_not_utf8(tmp_path, capsys):
    pixels = np.random.default_rng(0)
    for name in (b"caf\xe9", b"\x1b[2J=1+1", b"n" * 250):
        folder = os.path.join(os.fsencode(tmp_path / "images"), name)
        os.makedirs(folder)
        for index in range(10):
            path = os.fsdecode(os.path.join(folder, b"%d.png" % index))
            Image.fromarray(pixels.integers(0, 256, (4, 4), dtype=np.uint8)).save(path)
    splits = load_splits(Data(ImageFolder("images")), tmp_path)
    assert splits.train.classes == ("\x1b[2J=1+1", "caf\\xe9", "n" * 250)
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Flatten(), nn.Linear(splits.train.x[0].numel(), 3))
    attack, run = doubly.PGD(doubly.LinfBall(0.1), 1), tmp_path / "run"
    doubly.train(model, splits.train, doubly.AT(attack), epochs=1, batch_size=8, test=splits.test, output=run)
    doubly.evaluate(model, splits.test, attacks=[attack], trust=False, output=run)
    state = json.loads((run / "checkpoints" / "last" / "state.json").read_text("utf-8"))
    assert state["classes"] == list(splits.train.classes)
    page = write_report([run], tmp_path / "report")
    assert "\x1b" not in capsys.readouterr().out and "\x1b" not in page.read_text("utf-8")
