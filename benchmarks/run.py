"""Every benchmark in one command, and one page of the results.

    python benchmarks/run.py [--only NAME ...] [--rounds N] [--quick] [--output docs/benchmarks.md]

Each part runs in a process of its own, on the CPU and, where that makes sense, on CUDA too if there is one. Its results
go into results.json at once, and the page is written again: a part that fails costs only its own lines.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lines import Settings, shown
from page import lines, write

from doubly.rundir import read_json, write_json

ROOT = Path(__file__).parents[1]
MAX_OTHERS = 0.2  # cores that other processes may use on a machine that counts as idle


@dataclass(frozen=True)
class Part:
    """A module beside this one with `measure(settings) -> Outcome`."""

    name: str
    title: str
    rounds: int
    module: str = ""  # where it is not called like the part
    everywhere: bool = False  # on CUDA too


PARTS = (
    Part("imports", "Start-up time", 7),
    Part("narrow_resnet", "A training step of the narrow ResNet", 10, "step_cost", everywhere=True),
    Part("resnet18", "A training step of ResNet-18", 3, "step_cost", everywhere=True),
    Part("pgd", "PGD-20 against other libraries", 7, everywhere=True),
    Part("evaluation", "An evaluation against an earlier commit", 3),
    Part("autoattack", "AutoAttack against the reference", 1, everywhere=True),
    Part("processes", "Two processes against one", 3),
    Part("reduction", "DDP against one average of all gradients", 5),
    Part("growth", "Growth curves", 2, everywhere=True),
)
NAMES = {part.name: part for part in PARTS}


def devices() -> list[str]:
    """Return the devices; found out in another process, so that this one does not load CUDA."""
    code = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return ["cpu", "cuda"] if done.stdout.strip() == "True" else ["cpu"]


def machine(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    named = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in named if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def wait_until_idle(seconds: float) -> bool:
    """Return whether the machine becomes idle in that time: other processes use less than a fifth of a core."""
    end = time.monotonic() + seconds
    while True:
        before, start = _busy_seconds(), time.monotonic()
        if before is None:
            return True  # not Linux: nothing is known
        time.sleep(2)
        if ((_busy_seconds() or 0) - before) / (time.monotonic() - start) < MAX_OTHERS:
            return True
        if time.monotonic() > end:
            return False


def _busy_seconds() -> float | None:
    """Return the CPU seconds that all processes have used so far; None where /proc/stat is not there."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    user, nice, system, _, _, irq, soft_irq, *_ = map(int, stat.read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def measured(part: Part, settings: Settings) -> dict[str, Any]:
    """Measure one part in this process; return its results or error, and the conditions."""
    start, load = time.perf_counter(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    result: dict[str, Any] = {"title": part.title + (", CUDA" if settings.device == "cuda" else "")}
    module = part.module or part.name
    if find_spec(module) is None:
        result["problem"] = f"benchmarks/{module}.py is not there"
    else:
        try:
            result["outcome"] = asdict(import_module(module).measure(settings))
        except Exception as problem:  # of any kind: the other parts are still measured
            traceback.print_exc()
            result["problem"] = f"{type(problem).__name__}: {problem}"[:300]
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 0
    result["conditions"] = {
        **asdict(settings),
        "machine": machine(settings.device),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": version("torch"),
        "date": datetime.now(UTC).date().isoformat(),
        "took": time.perf_counter() - start,
        "load": load,
        "commit": commit(),
    }
    return result


def in_process(part: Part, settings: Settings) -> dict[str, Any]:
    """Measure one part in a process of its own, whose death is a result too."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.json"
        words = [
            "--child",
            str(file),
            "--only",
            part.name,
            "--rounds",
            str(settings.rounds),
            "--device",
            settings.device,
        ]
        done = subprocess.run([sys.executable, __file__, *words, *["--quick"] * settings.quick], check=False)
        if file.is_file():
            return read_json(file)
    nothing = dict.fromkeys(("cores", "threads"), 0) | dict.fromkeys(("took", "load"), 0.0)
    unknown = {"machine": "unknown machine", "torch": version("torch"), "date": "", "commit": commit()}
    return {
        "title": part.title,
        "problem": f"its process ended with code {done.returncode}",
        "conditions": {**asdict(settings), **nothing, **unknown},
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = f"{', '.join(NAMES)}; none of them only writes the page again"
    parser.add_argument("--only", nargs="*", default=list(NAMES), choices=list(NAMES), metavar="NAME", help=about)
    parser.add_argument("--rounds", type=int, help="of every part, in place of its own number")
    parser.add_argument("--quick", action="store_true", help="tiny: shows that everything works, and measures nothing")
    parser.add_argument("--output", type=Path, help="the page; docs/benchmarks.md, or runs/benchmarks.md where quick")
    about = "measure although other processes use the machine, and say so on the page"
    parser.add_argument("--loaded", action="store_true", help=about)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="only there")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if options.child:
        part = NAMES[options.only[0]]
        write_json(options.child, measured(part, Settings(part.name, options.rounds, options.quick, options.device)))
        return
    output = options.output or ROOT / ("runs" if options.quick else "docs") / "benchmarks.md"
    file = output.with_suffix("") / "results.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    results = read_json(file) if file.is_file() else {}
    chosen = [NAMES[name] for name in options.only]
    all_devices = not options.device and any(part.everywhere for part in chosen)
    everywhere = devices() if all_devices else [options.device or "cpu"]
    start = time.perf_counter()
    for part in chosen:
        for device in everywhere if part.everywhere else ["cpu"]:
            rounds = options.rounds or (min(part.rounds, 2) if options.quick else part.rounds)
            key = part.name if device == "cpu" else f"{part.name} {device}"
            print(f"[{time.perf_counter() - start:4.0f} s] {key}: {rounds} rounds", flush=True)
            idle = options.quick or wait_until_idle(60)
            if not idle and not options.loaded:
                sys.exit(
                    "other processes use this machine: wait until it is idle, or add --loaded, and the page says so"
                )
            results[key] = in_process(part, Settings(part.name, rounds, options.quick, device))
            results[key]["conditions"]["loaded"] = not idle
            order = [f"{name}{more}" for name in NAMES for more in ("", " cuda")]
            results = {name: results[name] for name in order if name in results}
            write_json(file, results)
            history = file.parent / "history"
            history.mkdir(exist_ok=True)
            write_json(history / f"{commit().removesuffix('-dirty')}.json", results)
            write(results, output)
            for line in lines(results[key]):
                print("  " + "  ".join(filter(None, (line.what, *shown(line, options.quick), line.note))), flush=True)
            if "problem" in results[key]:
                print(f"  failed: {results[key]['problem']}", flush=True)
    write(results, output)
    print(f"[{time.perf_counter() - start:4.0f} s] wrote {output}")


if __name__ == "__main__":
    main()
