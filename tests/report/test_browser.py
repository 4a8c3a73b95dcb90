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
const result = {errors: window.errors, sideways: document.documentElement.scrollWidth - innerWidth, width: innerWidth};
const scrolling = name => [...document.querySelectorAll(name)].filter(box => box.scrollWidth > box.clientWidth).length;
for (const box of document.querySelectorAll("details")) box.open = true;
result.tables = scrolling(".scroll"); result.figures = scrolling(".zoom, .pairs");
let table = document.querySelector("section table");
const column = name =>
  [...table.tHead.rows].at(-1).querySelectorAll("th button").values().find(b => b.textContent === name);
document.querySelector("abbr").dispatchEvent(new FocusEvent("focusin", {bubbles: true}));  // keyboard, touch
 result.tip = document.querySelector("#tip:not([hidden])").textContent;
const shown = place => [...table.tBodies[0].rows].map(row => row.cells[place].textContent);
result.before = shown(0);
column("RA-PGD").click(); result.falling = shown(2);
column("RA-PGD").click(); result.rising = shown(2);
column("method").click(); column("method").click(); result.names = shown(0);
table = document.querySelector("[aria-label='Cost of training'] table");
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
FRAME = """<iframe src="{page}" width="{width}" height="900" style="border:0"></iframe>
<script>onload = () => {{ document.body.dataset.result = frames[0].document.body.dataset.result; }};</script>"""
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
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--window-size=1400,900"]
    command.append("--allow-file-access-from-files")  # a window is at least 500 pixels wide, but a frame is not
    for width, looks in ((1280, []), (390, ["--blink-settings=preferredColorScheme=0"])):
        frame = tmp_path / "frame.html"
        frame.write_text(FRAME.format(page=page.as_uri(), width=width), encoding="utf-8")
        run = subprocess.run([*command, *looks, frame.as_uri()], capture_output=True, text=True, timeout=600)
        assert "CONSOLE" not in run.stderr
        (answer,) = re.findall(r'<body data-result="([^"]*)"', run.stdout)
        result = json.loads(answer.replace("&quot;", '"'))
        assert result["width"] == width and result["errors"] == [] and result["sideways"] <= 0
        assert result["figures"] == 0 and (result["tables"] == 0 or width == 390)
        assert result["tip"].startswith("tail: mean robust accuracy")
        assert result["before"] == ["AT", "DONE-PGD", "MAIL", "TRADES"] == result["names"]
        order = [float(cell.split()[0]) for cell in result["falling"]]
        assert order == sorted(order, reverse=True) and len(set(order)) == 4
        assert result["rising"] == result["falling"][::-1]
        assert result["missing"] == ["MAIL", "MAIL"]  # last in both orders
        assert result["open"] and result["closed"] and result["grown"] > 1.2
