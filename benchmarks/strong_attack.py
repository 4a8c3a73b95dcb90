"""Does the strong attack agree with AutoAttack, and what does it cost? One line per network of a run directory.

The images are those of `doubly evaluate --images N`. Forward and backward passes are counted where they happen, with
one gradient of one image as the unit; AutoAttack runs its four attacks in order, each on the images that are still
correct. Finished attacks are kept in the results file, and the same command resumes after a stop.

    python benchmarks/strong_attack.py runs/at runs/done_pgd --data-root DIR [--images 100] [--output results.json]
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from doubly.attacks import Attack, MarginPGD, Strong, attack_context
from doubly.attacks.autoattack import STANDARD, AutoAttack
from doubly.attacks.folding import FoldedForward
from doubly.checkpoints.load import load_model, load_run
from doubly.config.serialize import to_json
from doubly.data import Images, load_splits
from doubly.evaluation.attacks import reference_pgd
from doubly.evaluation.autoattack.forward import CountedForward
from doubly.evaluation.network import model_sha256
from doubly.evaluation.task import select_images
from doubly.rundir import read_json, write_json
from doubly.seeding import BatchGenerator, generator
from doubly.threat import Threat
from doubly.training.passes import counted_passes

MAX_GAP = 0.3  # points of accuracy above AutoAttack
MAX_COST = 1 / 8  # of its gradients
AGREEMENT = ("network", "n", "SA", "RA-PGD", "RA-margin", "RA-strong", "RA-AA", "strong - AA", "only AA", "only strong")
COST = ("gradients, strong", "AA", "ratio", "forward, strong", "AA")


class Wrapped(nn.Module):
    """A function as a module, whose passes can be counted."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@contextmanager
def outcome(model: nn.Module, entry: dict[str, Any], key: str) -> Iterator[list[int]]:
    """Note the passes inside, and the images that are still correct, under `key`."""
    correct: list[int] = []
    with counted_passes(model, 1) as passes:
        yield correct
    entry[key] = {"correct": correct, "forward": passes.forward, "backward": passes.backward}


def run_attack(model: nn.Module, images: Images, attack: Attack, entry: dict[str, Any], key: str) -> None:
    """Attack all images at once, as an evaluation does."""
    settings = to_json(attack)
    if entry.get(key, {}).get("attack") == settings:
        return
    x, y = images.pixels(slice(None)), images.y
    with outcome(model, entry, key) as correct:
        delta = attack(model, x, y, BatchGenerator(generator(0, 0, 0, "evaluation")))
    correct += positions(model, x + delta, y)
    entry[key]["attack"] = settings


def run_autoattack(
    model: nn.Module, images: Images, threat: Threat, entry: dict[str, Any], save: Callable[[], None]
) -> None:
    """Run the attacks of AutoAttack that are not in the entry yet, each on the images that are still correct."""
    x, y, attack = images.pixels(slice(None)), images.y, AutoAttack(threat)
    missing = [part for part in STANDARD if part not in entry]
    if not missing:
        return
    network = Wrapped(CountedForward(FoldedForward(model, x[:64])))
    done = [entry[part]["correct"] for part in STANDARD if part in entry]
    correct = done[-1] if done else entry["clean"]["correct"]
    for part in missing:
        rows = torch.tensor(correct, dtype=torch.int64)
        with outcome(network, entry, part) as left:
            if len(rows):
                attacked = attack.perturb(part, network, x[rows], y[rows], len(images.classes), lambda warning: None)
                left += rows[positions(model, attacked, y[rows])].tolist()
        correct = left
        save()
        print(f"  {part}: {len(correct)} of {len(y)} correct", flush=True)


def positions(model: nn.Module, x: Tensor, y: Tensor) -> list[int]:
    """Return the positions of the images that are predicted correctly."""
    with torch.no_grad():
        numbers: list[int] = (model(x).argmax(1) == y).nonzero().flatten().tolist()
    return numbers


def measure_run(path: Path, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run all attacks on the network of a run directory and note the outcomes in `results`."""
    run, model = load_run(path), load_model(path).eval()
    images = select_images(load_splits(run.data, options.data_root).test, options.images)
    threat = run.validation.attack.threat
    identity = {"model": model_sha256(model), "images": images.sha256(), "threat": to_json(threat)}
    entry = results.get(run.name, {})
    if any(entry.get(key) != value for key, value in identity.items()):
        entry = {**identity, "n": len(images)}
    results[run.name] = entry
    print(f"{run.name}: {len(images)} images, {threat}", flush=True)
    with attack_context(model, "eval"):
        entry["clean"] = {"correct": positions(model, images.pixels(slice(None)), images.y)}
        reference = reference_pgd(threat)
        attacks = {"pgd": reference, "margin": MarginPGD.for_evaluation(reference), "strong": Strong(threat)}
        for key, attack in attacks.items():
            run_attack(model, images, attack, entry, key)
        write_json(options.output, results)
        if options.autoattack:
            save = lambda: write_json(options.output, results)  # noqa: E731
            run_autoattack(model, images, threat, entry, save)


def table_row(name: str, entry: dict[str, Any]) -> list[str]:
    """Return the cells of a network for which all attacks have finished."""
    n, correct = entry["n"], {key: set(entry[key]["correct"]) for key in ("clean", "pgd", "margin", "strong", "square")}
    accuracies = [f"{100 * len(images) / n:.1f}" for images in correct.values()]
    aa, strong = correct["square"], correct["strong"]
    gap = 100 * (len(strong) - len(aa)) / n
    cells = [name, str(n), *accuracies, f"{gap:+.1f}", str(len(strong - aa)), str(len(aa - strong))]
    backward, forward = ([passes(entry, kind, s) for s in (True, False)] for kind in ("backward", "forward"))
    ratio = f"1/{backward[1] / backward[0]:.1f}" if backward[0] else ""
    return [*cells, *(f"{count:.0f}" for count in backward), ratio, *(f"{count:.0f}" for count in forward)]


def passes(entry: dict[str, Any], kind: str, strong: bool) -> float:
    """Return the forward or backward passes per image, of the strong attack or of AutoAttack."""
    return sum(entry[part][kind] for part in (("strong",) if strong else STANDARD)) / entry["n"]  # type: ignore[no-any-return]


def write_table(results: dict[str, Any]) -> None:
    """Print a Markdown table of the networks that are finished, and whether the aims are met."""
    finished = {name: entry for name, entry in results.items() if "square" in entry}
    header = (*AGREEMENT, *COST)
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for name, entry in finished.items():
        print(f"| {' | '.join(table_row(name, entry))} |")
    if not finished:
        return
    gaps = [
        100 * (len(entry["strong"]["correct"]) - len(entry["square"]["correct"])) / entry["n"]
        for entry in finished.values()
    ]
    costs = [passes(entry, "backward", True) / passes(entry, "backward", False) for entry in finished.values()]
    print(
        f"\n{len(finished)} networks: strong - AA mean {sum(gaps) / len(gaps):+.2f}, largest {max(gaps):+.1f} points "
        f"(aim {MAX_GAP}); gradients at most 1/{1 / max(costs):.1f} of AutoAttack's (aim 1/{1 / MAX_COST:.0f})"
    )


def main() -> None:
    """Compare the two attacks on the networks of run directories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="run directories; none only prints the table")
    parser.add_argument("--data-root", type=Path, help="folder with the dataset's files")
    parser.add_argument("--images", type=int, default=100, help="number of test images")
    parser.add_argument("--output", type=Path, default=Path("results/strong-attack.json"), help="file with the results")
    parser.add_argument("--no-autoattack", dest="autoattack", action="store_false", help="only the cheap attacks")
    options = parser.parse_args()
    results = read_json(options.output) if options.output.is_file() else {}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for path in options.runs:
        measure_run(path, options, results)
    write_table(results)


if __name__ == "__main__":
    main()
