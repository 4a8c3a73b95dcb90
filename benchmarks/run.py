"""Every benchmark in one command, and one page of what it found.

    python benchmarks/run.py [--only NAME ...] [--rounds N] [--quick] [--output docs/benchmarks.md]

Each part runs in a process of its own, on the CPU and, where that is its matter, on CUDA too if there is one. What it
found goes into results.json at once, and the page is written anew: a part that breaks off costs only its own lines.
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


@dataclass(frozen=True)
class Part:
    """A module beside this one with `measure(settings) -> Outcome`."""

    name: str
    title: str
    rounds: int
    module: str = ""  # where it is not called like the part
    everywhere: bool = False  # on CUDA too


PARTS = (
    Part("imports", "What starting costs", 7),
    Part("narrow_resnet", "A training step of the narrow ResNet", 10, "step_cost", everywhere=True),
    Part("resnet18", "A training step of ResNet-18", 3, "step_cost", everywhere=True),
    Part("pgd", "PGD-20 against other libraries", 7, everywhere=True),
    Part("autoattack", "AutoAttack against the reference", 1, everywhere=True),
    Part("processes", "Two processes against one", 3),
    Part("reduction", "DDP against one reduction of our own", 5),
    Part("growth", "Growth curves", 2, everywhere=True),
)
NAMES = {part.name: part for part in PARTS}


def devices() -> list[str]:
    """Asked in another process, so that this one stays small and the parts find CUDA untouched."""
    asked = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
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
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=9"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measured(part: Part, settings: Settings) -> dict[str, Any]:
    """One part, in this process: what it found, or what broke it off, and under which conditions."""
    begun, load = time.perf_counter(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    result: dict[str, Any] = {"title": part.title + (", CUDA" if settings.device == "cuda" else "")}
    module = part.module or part.name
    if find_spec(module) is None:
        result["problem"] = f"benchmarks/{module}.py is not there"
    else:
        try:
            result["outcome"] = asdict(import_module(module).measure(settings))
        except Exception as problem:  # of whatever kind: the other parts go on
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
        "took": time.perf_counter() - begun,
        "load": load,
        "commit": commit(),
    }
    return result


def in_process(part: Part, settings: Settings) -> dict[str, Any]:
    """The same in a process of its own, whose death is a result too."""
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
    said = {"machine": "unknown machine", "torch": version("torch"), "date": "", "commit": commit()}
    return {
        "title": part.title,
        "problem": f"its process ended with code {done.returncode}",
        "conditions": {**asdict(settings), **nothing, **said},
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = f"{', '.join(NAMES)}; none of them writes the page anew"
    parser.add_argument("--only", nargs="*", default=list(NAMES), choices=list(NAMES), metavar="NAME", help=told)
    parser.add_argument("--rounds", type=int, help="of every part, in place of its own number")
    parser.add_argument("--quick", action="store_true", help="tiny: shows that all of it works, and measures nothing")
    parser.add_argument("--output", type=Path, help="the page; docs/benchmarks.md, or runs/benchmarks.md where quick")
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
    found = read_json(file) if file.is_file() else {}
    chosen = [NAMES[name] for name in options.only]
    asked = not options.device and any(part.everywhere for part in chosen)
    everywhere = devices() if asked else [options.device or "cpu"]
    begun = time.perf_counter()
    for part in chosen:
        for device in everywhere if part.everywhere else ["cpu"]:
            rounds = options.rounds or (min(part.rounds, 2) if options.quick else part.rounds)
            key = part.name if device == "cpu" else f"{part.name} {device}"
            print(f"[{time.perf_counter() - begun:4.0f} s] {key}: {rounds} rounds", flush=True)
            found[key] = in_process(part, Settings(part.name, rounds, options.quick, device))
            order = [f"{name}{more}" for name in NAMES for more in ("", " cuda")]
            found = {name: found[name] for name in order if name in found}
            write_json(file, found)
            write(found, output)
            for line in lines(found[key]):
                print("  " + "  ".join(filter(None, (line.what, *shown(line, options.quick), line.note))), flush=True)
            if "problem" in found[key]:
                print(f"  broke off: {found[key]['problem']}", flush=True)
    write(found, output)
    print(f"[{time.perf_counter() - begun:4.0f} s] wrote {output}")


if __name__ == "__main__":
    main()
