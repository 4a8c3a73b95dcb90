"""The page in a real browser: no errors, sorting and zoom work, and it fits the width of a phone."""

import json
import re
import shutil
import subprocess

import pytest

from doubly.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

ACT = """
<script>
const result = {errors: window.errors, sideways: document.documentElement.scrollWidth - innerWidth};
const table = document.querySelector("section table"), column = name =>
  [...table.tHead.rows].at(-1).querySelectorAll("th button").values().find(b => b.textContent === name);
const shown = place => [...table.tBodies[0].rows].map(row => row.cells[place].textContent);
result.before = shown(0);
column("RA-PGD").click(); result.falling = shown(2);
column("RA-PGD").click(); result.rising = shown(2);
column("method").click(); column("method").click(); result.names = shown(0);
const last = () => { column("seconds").click(); return shown(0).at(-1); };
result.missing = [last(), last()];
document.querySelector(".zoom").click();
result.open = document.querySelector("dialog").open;
const wide = () => document.querySelector("dialog svg").getBoundingClientRect().width, first = wide();
document.querySelector("dialog [data-zoom]").click(); result.grown = wide() / first;
document.querySelector("dialog [data-close]").click(); result.closed = !document.querySelector("dialog").open;
document.body.innerHTML = ""; document.body.dataset.result = JSON.stringify(result);
</script>
"""
LISTEN = "<script>window.errors = []; addEventListener('error', event => window.errors.push(event.message));</script>"


@pytest.fixture
def page(make_run, tmp_path):
    for name, robust in (("at", 0.4), ("done_pgd", 0.7), ("trades", 0.55), ("mail", 0.5)):
        for seed in (0, 1):
            path = make_run(f"digits.imbalanced.{name}", seed=seed, robust=robust, classes=["<b>x</b>", "y" * 90, "z"])
            if name == "mail":
                (path / "metrics.jsonl").unlink()  # so that it has no seconds
    return write_report([path.parent], tmp_path / "out")


@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium: apt install chromium")
def test_the_page_works_in_a_browser(page, tmp_path):
    """On a wide light screen and a narrow dark one."""
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{LISTEN}").replace("</body>", f"{ACT}</body>")
    page.write_text(text, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000"]
    for screen in (["--window-size=1280,900"], ["--window-size=390,900", "--blink-settings=preferredColorScheme=0"]):
        run = subprocess.run([*command, *screen, page.as_uri()], capture_output=True, text=True, timeout=600)
        assert "CONSOLE" not in run.stderr
        (answer,) = re.findall(r'data-result="([^"]*)"', run.stdout)
        result = json.loads(answer.replace("&quot;", '"'))
        assert result["errors"] == [] and result["sideways"] <= 0
        assert result["before"] == ["AT", "DONE-PGD", "MAIL", "TRADES"] == result["names"]
        order = [float(cell.split()[0]) for cell in result["falling"]]
        assert order == sorted(order, reverse=True) and len(set(order)) == 4
        assert result["rising"] == result["falling"][::-1]
        assert result["missing"] == ["MAIL", "MAIL"]  # last in both orders
        assert result["open"] and result["closed"] and result["grown"] > 1.2
