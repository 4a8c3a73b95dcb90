"""doubly list."""

import json
import re

from doubly.attacks import ATTACKS
from doubly.cli.catalog import catalog
from doubly.cli.list import CATALOG
from doubly.config.serialize import KINDS
from doubly.data import DATASETS
from doubly.methods import METHODS
from doubly.models import MODELS
from doubly.recipes import RECIPES


def test_each_table_is_listed_with_a_line_about_each_entry(cli):
    tables = {"methods": METHODS, "attacks": (*ATTACKS, "autoattack"), "models": MODELS, "datasets": DATASETS}
    for name, entries in {**tables, "recipes --names": RECIPES, "kinds": KINDS}.items():
        code, out, err = cli("list", *name.split())
        lines = out.splitlines()
        assert (code, err) == (0, "") and [line.split()[0] for line in lines] == list(entries), name
        assert all(len(line.split()) > 2 for line in lines), name
    assert cli("list", "recipes", "digits.done_p").out.split(maxsplit=1) == [
        "digits.done_pgd",
        "DONE-PGD, SmallCNN, 60 epochs, batch size 128\n",
    ]


def test_the_catalog_is_that_of_the_registries():
    assert json.loads(CATALOG.read_text(encoding="utf-8")) == catalog(), "run python -m doubly.cli.catalog"


def test_recipes_are_a_table_of_datasets_and_methods(cli):
    code, out, err = cli("list", "recipes")
    lines = out.splitlines()
    assert (code, err) == (0, "") and max(map(len, lines)) <= 100 and len(lines) < 50
    assert lines[0].split() == ["method", *dict.fromkeys(name.partition(".")[0] for name in RECIPES)]
    table = dict(line.split(maxsplit=1) for line in lines[2 : lines.index("")])
    assert list(table) == list(dict.fromkeys(name.rpartition(".")[2] for name in RECIPES))
    assert sum(cell.isalpha() for row in table.values() for cell in row.split()) == len(RECIPES)
    for method, digits, cifar10 in [("at", "B I - -", "B I b i"), ("at_031", "- - - -", "B I - -")]:
        assert re.split(r"\s{2,}", table[method])[:2] == [digits, cifar10]
    assert "B  DATASET.METHOD" in out and "`doubly list recipes --names`" in out


def test_the_passes_of_all_methods_are_a_table(cli, monkeypatch):
    monkeypatch.setattr("doubly.studies.passes.passes_table", lambda: "| method | predicted |")
    assert cli("list", "passes") == (0, "| method | predicted |\n", "")


def test_wrong_words_are_refused(cli):
    assert cli("list", "method").err == "doubly: there is no list of 'method': did you mean 'methods'?\n"
    code, out, _ = cli("list")
    assert code == 2 and "usage: doubly list methods|" in out
