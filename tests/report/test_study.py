import copy
import re

import pytest

from doubly.report.study import TITLES, comparison_markdown, study_markdown

PROTOCOL = {"attack": {"kind": "attack.pgd", "steps": 20, "restarts": 1}, "seed": 0, "split": "test"}
METRICS = ("SA", "RA-PGD", "RA-Tail-30")


def row(table, label, **changes):
    fields = {
        "table": table,
        "label": label,
        "failed": [],
        "protocol": PROTOCOL,
        "n": 1797,
        "per_fold": {"sa": [0.9, 0.94], "ra_pgd": [0.5, 0.6], "ra_tail_30": [0.25, 0.25]},
        "worst_per_fold": [0.1, 0.2],
        "pooled_tail": 0.3333,
        "pooled_per_class": [0.5] * 10,
        "seconds": [10.0, 13.0],
    }
    return {**fields, **changes}


def difference(table, label, metric):
    return {"table": table, "label": label, "metric": metric, "value": 0.0123, "low": -0.004, "high": 0.03}


def trials(*scores):
    return [{"changes": {}, "score": score, "holdouts": []} for score in scores]


RESULTS = {
    "folds": 2,
    "short_epochs": 7,
    "searches": [
        {"recipe": "digits.at", "trials": trials(0.5, 0.7, 0.6), "winner": {"optimizer.lr.peak": 0.2, "epochs": 40}}
    ],
    "rows": [row(table, label) for table in TITLES for label in ("at", "done_pgd")],
    "differences": [difference(table, "done_pgd", metric) for table in TITLES for metric in METRICS],
}


@pytest.fixture
def results():
    return copy.deepcopy(RESULTS)


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def tables(text):
    """Return every table as rows of cells, which must all be as wide as the header."""
    result = [[cells(line) for line in part.splitlines()] for part in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)]
    assert all(len(line) == len(table[0]) for table in result for line in table)
    return result


def test_mean_and_deviation_of_the_folds(results):
    text = study_markdown(results)
    first, *_ = tables(text)
    assert first[0] == ["method", "SA", "RA-PGD", "RA-Tail-30", "tail of all images", "worst class", "seconds"]
    assert first[2] == ["at", "92.0 ± 2.8", "55.0 ± 7.1", "25.0 ± 0.0", "33.3", "15.0 ± 7.1", "12"]  # sd of a sample
    assert [line[0] for line in first[2:]] == ["at", "done_pgd"]
    assert text.count("mean ± sd over 2 stratified folds (seed = fold), n = 1797 in all; PGD-20, 1 restart (") == len(
        TITLES
    )


def test_a_table_per_comparison_its_differences_and_the_searches(results):
    text = study_markdown(results)
    assert re.findall(r"^### (.*)", text, re.MULTILINE) == [
        *(title.format(short_epochs=7) for title in TITLES.values()),
        "What the searches chose",
    ]
    assert len(tables(text)) == 2 * len(TITLES) + 1 and text.count("Difference to `at`, with 95 % intervals") == len(
        TITLES
    )
    assert tables(text)[1][0] == ["", *METRICS]
    assert tables(text)[1][2] == ["done_pgd", *["+1.2 [-0.4, +3.0]"] * 3]
    assert tables(text)[-1][2] == ["`digits.at`", "3", "peak 0.2, epochs 40", "70.0 (median trial 60.0)"]


def test_a_failed_row_gives_its_escaped_reason_and_leaves_the_others(results):
    sentence = "epoch 3, step 1: the losses: 5 of 128 values are NaN | <b>\nlast is a_b/c_d, [see](http://x) `ls` \\"
    index = next(i for i, old in enumerate(results["rows"]) if old["table"] == "short" and old["label"] != "at")
    results["rows"][index] = {"table": "short", "label": "done_pgd", "failed": [sentence, "another"]}
    results["differences"] = [d for d in results["differences"] if d["table"] != "short"]
    text = study_markdown(results)
    short = next(table for table in tables(text) if any("failed" in cell for line in table for cell in line))
    assert short[2][0] == "at" and short[3][0] == "done_pgd" and short[3][2:] == [""] * 5
    reason = short[3][1]
    assert reason.startswith("failed in 2 folds: epoch 3, step 1: the losses: 5 of 128 values are NaN")
    assert not re.search(r"(?<!\\)[|<>\[\]`_]", reason)  # neither cells, nor tags, nor links, nor code
    assert re.sub(r"\\(.)", r"\1", reason).endswith("NaN | <b> last is a_b/c_d, [see](http://x) `ls` \\")
    assert len(tables(text)) == 2 * len(TITLES)  # nothing to compare in that one


def test_a_table_of_failed_rows_is_still_a_table(results):
    for place, old in enumerate(results["rows"]):
        results["rows"][place] = {"table": old["table"], "label": old["label"], "failed": ["the disk was full"]}
    results["differences"] = []
    text = study_markdown(results)
    assert text.count("failed in 1 folds: the disk was full") == 2 * len(TITLES)
    assert text.count("No run of this table came to its end.") == len(TITLES)


def test_the_comparison_of_all_methods_has_margins_passes_and_alarms():
    margins = {"ra_margin": [0.4, 0.5], "ra_margin_tail_30": [0.2, 0.3]}
    folds = {"sa": [0.9, 0.94], "ra_pgd": [0.5, 0.6], "ra_tail_30": [0.25, 0.25], **margins}
    more = {"per_fold": folds, "passes": {"forward": 11.0, "backward": 12.0}, "epochs": 60, "alarms": [["a_b"], []]}
    rows = [row("balanced", "at", **more), {"table": "balanced", "label": "mail", "failed": ["no | memory"]}]
    text = comparison_markdown({**RESULTS, "rows": rows, "differences": []})
    first, *_ = tables(text)
    assert first[0][3:7] == ["RA-Tail-30", "RA-margin", "margin tail", "worst class"]
    assert first[2][4:] == ["45.0 ± 7.1", "25.0 ± 7.1", "15.0 ± 7.1", "60", "12", "11.0 + 12.0"]
    assert first[3][1] == "failed in 1 folds: no \\| memory" and "### Balanced digits" in text
    assert "`at`, fold 0, ended with an alarm: a\\_b." in text
