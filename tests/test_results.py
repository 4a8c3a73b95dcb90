"""The saved runs in results/: complete, loadable, and the source of the tables in docs/cifar10.md."""

from pathlib import Path

from doubly.checkpoints.load import load_run
from doubly.report import Report, collect, forms

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "results" / "cifar10-small"
FILES = {"config.json", "environment.json", "metrics.jsonl", "evaluation.json"}


def test_the_page_holds_the_tables_of_the_results():
    page = (ROOT / "docs" / "cifar10.md").read_text(encoding="utf-8")
    quoted = page.partition("<!-- table -->\n")[2].partition("\n<!-- end -->")[0]
    tables = "\n".join(map(forms.markdown, Report.of([STUDY]).tables)).replace("### ", "#### ")
    assert quoted == tables.rstrip("\n")


def test_every_run_is_complete_small_and_loads():
    runs = collect([STUDY])
    assert len(runs) == 14
    for run in runs:
        assert load_run(run.path).name == run.config["name"]
        assert len(run.metrics) == run.config["epochs"] and run.evaluation["n"] == 2000
        assert run.path.name == f"{run.config['name']}-s{run.seed}"
        sizes = {file.name: file.stat().st_size for file in run.path.iterdir()}
        assert set(sizes) >= FILES and set(sizes) <= FILES | {"gallery.npz", "evaluation.npz"}
        assert sum(sizes.values()) < 2**20
