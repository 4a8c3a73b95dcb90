"""`python -m tests.chaos [--seed 0] [--scale 1]`: run the campaign, print the table and write docs/reliability.md."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

import torch
from tests.chaos import ROOT
from tests.chaos.campaigns import CAMPAIGNS, tasks_of
from tests.chaos.outcomes import FINE
from tests.chaos.page import Settings, count, replace_rows, table_lines, write_page
from tests.chaos.prepared import prepare
from tests.chaos.workers import fork_call, run_tasks


def main() -> int:
    """Run the campaign; the exit code is 1 if anything was lost, executed, or ended in a traceback."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the attempts")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--only", nargs="*", default=[], help="names of campaigns; the page is not written")
    parser.add_argument("--replace", action="store_true", help="with --only: replace these rows of the page")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "reliability.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only or [campaign.name for campaign in CAMPAIGNS]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="doubly-chaos-") as name:
        folder = Path(name)
        base = folder / "base"
        pid = fork_call(lambda: prepare(base) or 0, folder / "out", folder / "err")
        if os.waitpid(pid, 0)[1]:
            print((folder / "err").read_text(), file=sys.stderr)
            return 2
        print(f"prepared in {time.monotonic() - begun:.0f} s", flush=True)
        tasks = tasks_of(names, options.seed, options.scale)
        outcomes = run_tasks(tasks, options.workers, folder, base)
    seconds = time.monotonic() - begun
    counts = {campaign.name: count(outcomes[campaign.name]) for campaign in CAMPAIGNS if campaign.name in outcomes}
    failed = any(outcome.kind not in FINE for results in outcomes.values() for outcome in results)
    print("\n".join(table_lines(counts)), f"\n{seconds / 60:.1f} minutes, seed {options.seed}, scale {options.scale:g}")
    settings = Settings(options.seed, options.scale, options.workers, seconds, os.getloadavg()[2])
    if not options.only:
        write_page(options.output, counts, settings)
    elif options.replace:
        replace_rows(options.output, counts, settings)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
