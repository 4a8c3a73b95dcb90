"""`make chaos`: malformed calls, damaged and hostile files, and kills, by the thousand; see docs/reliability.md."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support")]  # the fuzzer of calls and the writers of datasets
