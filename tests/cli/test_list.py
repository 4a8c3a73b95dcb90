"""doubly list."""

from doubly.attacks import ATTACKS
from doubly.config.serialize import KINDS
from doubly.data import DATASETS
from doubly.methods import METHODS
from doubly.models import MODELS
from doubly.recipes import RECIPES


def test_each_table_is_listed_with_a_line_about_each_entry(cli):
    tables = {"methods": METHODS, "attacks": (*ATTACKS, "autoattack"), "models": MODELS, "datasets": DATASETS}
    for name, entries in {**tables, "recipes": RECIPES, "kinds": KINDS}.items():
        code, out, err = cli("list", name)
        lines = out.splitlines()
        assert (code, err) == (0, "") and [line.split()[0] for line in lines] == list(entries), name
        assert all(len(line.split()) > 2 for line in lines), name
    assert cli("list", "recipes", "digits.done_p").out.split(maxsplit=1) == [
        "digits.done_pgd",
        "DONE-PGD, SmallCNN, 60 epochs, batch size 128\n",
    ]


def test_the_passes_of_all_methods_are_a_table(cli, monkeypatch):
    monkeypatch.setattr("doubly.studies.passes.passes_table", lambda: "| method | predicted |")
    assert cli("list", "passes") == (0, "| method | predicted |\n", "")


def test_wrong_words_are_refused(cli):
    assert cli("list", "method").err == "doubly: there is no list of 'method': did you mean 'methods'?\n"
    code, out, _ = cli("list")
    assert code == 2 and "usage: doubly list methods|" in out
