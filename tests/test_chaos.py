"""A few attempts of `make chaos`, so that the campaign keeps working between two runs of it."""

import re
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_few_attempts_and_the_page(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the campaign adds a folder
    data, campaigns, page = (import_module(f"tests.chaos.{name}") for name in ("data", "campaigns", "page"))
    monkeypatch.setattr(data.reading, "MAX_UNPACKED_BYTES", data.BOUND)  # restored afterwards
    monkeypatch.chdir(tmp_path)
    outcomes = list(data.hostile_data(tmp_path, 5, 25))
    counts = {"hostile data": page.count(outcomes)}
    assert counts["hostile data"].keys() <= {"survived", "refused"}, outcomes
    counts["kills"] = Counter(survived=1200, lost=1)
    page.write_page(tmp_path / "page.md", counts, page.Settings(3, 0.1, 2, 600.0, 1.5))
    text = (tmp_path / "page.md").read_text()
    assert "| kills | 1,201 | 1,200 | 0 | 1 | 0 | 0 |" in text and "| **all** | 1,226 |" in text
    assert "seed 3, scale 0.1, commit" in text and all(campaign.name in text for campaign in campaigns.CAMPAIGNS)
    rows = {campaign.name: Counter(refused=2) for campaign in campaigns.CAMPAIGNS}
    page.write_page(tmp_path / "page.md", rows, page.Settings(3, 0.1, 2, 600.0, 1.5))
    page.replace_rows(tmp_path / "page.md", {"hostile names": Counter(survived=1)}, page.Settings(4, 1.0, 2, 60.0, 1.5))
    text = (tmp_path / "page.md").read_text()
    assert f"| **all** | {2 * len(rows) - 1} | 1 | {2 * len(rows) - 2} |" in text
    assert "seed 3" in text and "Run again later: hostile names (before: 0 lost or worse): `make chaos` of" in text
    full = campaigns.tasks_of([campaign.name for campaign in campaigns.CAMPAIGNS], 0, 1.0)
    kills = sum(task.count for task in full if task.campaign.startswith("kills"))
    assert kills >= 200 and sum(task.count for task in full) - kills >= 10_000
    assert len({task.seed for task in full}) == len(full)


def test_the_result_of_the_last_campaign_is_clean():
    rows = re.findall(r"^\| (.+) \|$", (ROOT / "docs" / "reliability.md").read_text(), re.M)
    *_, lost, tracebacks, executed = rows[-1].split(" | ")
    assert (lost, tracebacks, executed) == ("0", "0", "0") and rows[-1].startswith("**all**")
