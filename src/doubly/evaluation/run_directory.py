"""Evaluation of a run directory on its test images, with its own protocol or another."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from doubly.checkpoints.load import load_run, trained
from doubly.config.environment import command
from doubly.config.run import Run
from doubly.config.serialize import from_json
from doubly.config.user_code import OwnModel
from doubly.data import Images
from doubly.data.holdout import holdout
from doubly.distributed.launch import joined
from doubly.errors import UsageError
from doubly.evaluation.attacks import Attacks, chosen, pgd20
from doubly.evaluation.autoattack.runner import Callback
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.evaluation import Evaluation
from doubly.evaluation.result import EvalResult
from doubly.metric_names import attack_metric
from doubly.rundir import RunDir, read_json
from doubly.threat import NormBall
from doubly.training.setup import chosen_device, fetched_splits


@joined()
def evaluate_run(
    path: Path,
    which: str = "last",
    own: OwnModel | None = None,
    device: str = "auto",
    attacks: Attacks = ("pgd", "margin"),
    *,
    threat: NormBall | None = None,
    root: str | None = None,
    how: EvalConfig | None = None,
    watch: Callback | None = None,
) -> EvalResult:
    """Evaluate a run directory, and write evaluation.json and evaluation.npz into it.

    The attack is the run's own PGD, unless another threat is given. `root`: where the dataset's files are, if not where
    they were in training. A run with a hold-out picks the tail's classes on that as well.
    """
    run, how = load_run(path), how or EvalConfig()
    run = run if root is None else replace(run, data=replace(run.data, root=root))
    model, info = trained(path, which, own)
    model.to(chosen_device(device))
    splits = fetched_splits(run)
    pgd = run.validation.attack if threat is None else pgd20(threat)
    plain, ensemble = chosen(attacks, pgd, how.seed)
    about = {"split": "test", "checkpoint": which, **({"note": splits.note} if splits.note else {})}
    return Evaluation(
        model,
        splits.test,
        plain,
        ensemble,
        pgd.threat,
        replace(how, output=how.output or path),
        _held(run, splits.train),
        watch or Callback(),
        about,
        {"epoch": info["epoch"], "test_images": len(splits.test), "command": command()},
    ).run()


def measured(path: Path, run: Run, attacks: Sequence[str], how: EvalConfig) -> bool:
    """Whether a run directory has these attacks on the network as trained, on as many images as asked for."""
    try:
        found = read_json(RunDir(path).evaluation)
        keys = [attack_metric(name).key for name in attacks]
        return (
            found["epoch"] == run.epochs
            and all(key in found for key in keys)
            and from_json(found["protocol"]["attack"]) == run.validation.attack
            and ("trust" in found or not how.trust)
            and (found["protocol"]["seed"], found["protocol"]["chunk"]) == (how.seed, how.chunk)
            and (found["tail"]["share"], found["tail"]["rounding"]) == (how.tail_share, how.tail_rounding)
            and (how.curve_images is None or _as_many(found["curve"]["n"], how.curve_images, found["n"]))
            and _as_many(found["n"], how.images, found.get("test_images"))
            and ("ra_aa" not in keys or _as_many(found["autoattack"]["n"], how.autoattack_images, found["n"]))
        )
    except (UsageError, LookupError, TypeError, AttributeError):  # nothing there, or nothing that can be read
        return False


def _as_many(n: int, asked: int | None, there: int | None) -> bool:
    """`there`: how many images there are, if the file says so; of an older one that asked for all, n is believed."""
    if there is None:
        return asked in (None, n)
    return n == there if asked is None else n == min(asked, there)


def _held(run: Run, train: Images) -> Images | None:
    if run.data.holdout == 0:
        return None
    return train.subset(holdout(train.y, run.data.holdout, run.data.split, train.groups)[1])
