"""Evaluation of any network on any images: attacks, AutoAttack, trust panel, one result."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from doubly.attacks import PGD, evaluating
from doubly.attacks.autoattack import AutoAttack
from doubly.data import Images
from doubly.data.holdout import probe
from doubly.errors import UsageError
from doubly.evaluation import trust
from doubly.evaluation.examples import check_format, save_examples
from doubly.evaluation.network import check_network
from doubly.evaluation.result import NOT_MEASURED, EvalResult
from doubly.runs.answers import Answers, answers
from doubly.runs.autoattack import Ensemble, Unheard
from doubly.runs.measuring import Measuring
from doubly.runs.own_model import AnyImages, as_images
from doubly.runs.standard_attacks import Attacks, ball_of, chosen, described, pgd20
from doubly.threat import LinfBall, NormBall, Threat
from doubly.types import Attack


def evaluate(
    model: nn.Module,
    data: AnyImages,
    threat: NormBall | None = None,
    attacks: Attacks = ("pgd", "margin"),
    *,
    validation: AnyImages | None = None,
    watch: Unheard | None = None,
    about: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EvalResult:
    """How robust a network is that takes images in [0,1] and returns logits: on every sample, under every attack.

    `attacks`: pgd, margin, autoattack, quick, or attacks such as PGD(…). `validation`: other images, on which the
    classes of the tail are picked as well. `about`: what else to say with the numbers. `settings`: of `Measuring`.
    """
    if threat is not None and not isinstance(threat, NormBall):
        raise UsageError(f"the third argument is the threat, got {type(threat).__name__}: pass attacks=[…] by name")
    names = [f.name for f in fields(Measuring)]
    if unknown := [name for name in settings if name not in names]:
        raise UsageError(f"evaluate has no setting '{unknown[0]}': it has {', '.join(names)}")
    if not isinstance(model, nn.Module):
        raise UsageError(f"the first argument is the network, an nn.Module, got {type(model).__name__}")
    paths = {name: Path(settings[name]) for name in ("output", "state") if settings.get(name) is not None}
    how, images = Measuring(**{**settings, **paths}), as_images(data)
    ball = ball_of(attacks, threat)
    plain, ensemble = chosen(attacks, pgd20(ball), how.seed)
    others = None if validation is None else as_images(validation)
    if how.save_examples is not None and how.output is None:
        raise UsageError("attacked images need a folder to be saved in: give an output")
    result = measure(model, images, plain, ensemble, ball, how, others, watch or Unheard(), about or {})
    if how.output is not None and not how.sharded:
        result.save(how.output)
    return result


def measure(
    model: nn.Module,
    images: Images,
    attacks: Mapping[str, Attack],
    ensemble: AutoAttack | None,
    ball: Threat,
    how: Measuring,
    validation: Images | None,
    watch: Unheard,
    about: Mapping[str, Any],
) -> EvalResult:
    """All of it, in this order: is the network fit to be measured, attacks, AutoAttack, examples, trust."""
    if how.sharded and ensemble is None:
        raise UsageError("a shard is a part of AutoAttack's chunks: ask for autoattack or quick as well")
    if how.output is not None:
        check_folder(how.output)
    if how.save_examples is not None:
        check_format(how.save_examples, images.x.shape[1])
    attacks = {} if how.sharded else attacks
    if how.images is not None and how.images < len(images):
        images = images.subset(probe(images.y, how.images, seed=0))
    device = next((p.device for p in model.parameters()), images.x.device)
    few = images.subset(probe(images.y, how.trust_images, seed=0)).to(device)
    x, y = few.pixels(slice(None)), few.y
    invariance = check_network(model, x, y)

    def done(count: int) -> None:
        watch.images(count, len(images))

    keep = None if how.save_examples is None else probe(images.y, how.most_examples, seed=0).sort()[0]
    judge = ball if isinstance(ball, NormBall) else None
    found = answers(model, images, attacks, how.seed, how.chunk, done, keep, judge)
    result = _result(images, attacks, found, how, about)
    if validation is not None and attacks:
        others = answers(model, validation, attacks, how.seed, how.chunk)
        result = replace(result, validation=_result(validation, attacks, others, how, {}))
    examples = [Kept(name, keep, points, attacks[name]) for name, points in found.attacked.items() if keep is not None]
    if ensemble is not None:
        result, broken = _autoattack(model, images, ensemble, how, result, watch)
        examples += broken
    if examples:
        saved = {kept.name: _saved(model, images.to(device), kept, how) for kept in examples}
        result = replace(result, examples={**result.examples, "saved": saved})
    if how.trust and not how.sharded:
        pgd = attacks.get("pgd", None if judge is None else pgd20(judge))
        more = trust.probe(model, x, y, pgd, how.seed) if isinstance(pgd, PGD) and judge is not None else []
        result = replace(result, trust=trust.panel([*trust.from_result(result, invariance), *more]))
    return result


def check_folder(path: Path) -> None:
    """Before hours of work: can the results be written there?"""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(
            f"{path} cannot hold the results, since {there} is no folder that may be written: choose another"
        )


class Kept(NamedTuple):
    """Attacked images, and which images they were."""

    name: str
    rows: Tensor
    points: Tensor
    attack: Any


def _result(
    images: Images, attacks: Mapping[str, Attack], found: Answers, how: Measuring, about: Mapping[str, Any]
) -> EvalResult:
    protocol = {
        **described(attacks),
        "seed": how.seed,
        "chunk": how.chunk,
        "data_sha256": images.sha256(),
        **about,
    }
    return EvalResult(
        images.y.cpu().numpy(),
        _named(images.classes, max(int(given.max()) for given in found.classes.values())),
        found.classes,
        protocol,
        images.ids.cpu().numpy(),
        {name: losses for name, losses in found.losses.items() if name != "clean"},
        examples=found.examples if attacks else {},
        tail_share=how.tail_share,
        tail_rounding=how.tail_rounding,
        weights_r=how.weights_r,
        weights_normalise=how.weights_normalise,
    )


def _named(classes: tuple[str, ...], highest: int) -> tuple[str, ...]:
    """The names of the data's classes, and numbers for others that the network answered with."""
    return (*classes, *(str(k) for k in range(len(classes), highest + 1)))


def _autoattack(
    model: nn.Module, images: Images, attack: AutoAttack, how: Measuring, result: EvalResult, watch: Unheard
) -> tuple[EvalResult, list[Kept]]:
    """The result with AutoAttack's outcome, if all chunks are done; and some of the images that it turned."""
    rows = torch.arange(len(images))
    if how.autoattack_images is not None and how.autoattack_images < len(images):
        rows = probe(images.y, how.autoattack_images, seed=0).cpu()
    place = how.state or (how.output / "autoattack" if how.output else None)
    keep = how.save_examples is not None
    run = Ensemble(attack, how.autoattack_chunk, how.compile, place, how.state is not None, how.shard, keep)
    standing, about = run.run(model, images.subset(rows), watch)
    if not standing.complete:
        return replace(result, autoattack={**about, "label": f"{about['label']}, incomplete"}), []

    def spread(values: NDArray[Any], elsewhere: Any) -> NDArray[Any]:
        whole = np.full(len(images), elsewhere, dtype=values.dtype)
        whole[rows.numpy()] = values
        return whole

    checked: dict[str, Any] = dict(result.examples) or {"n": 0, "outside": 0, "changed": 0, "largest": None}
    checked["n"] += standing.made
    checked["outside"] += standing.outside
    checked["largest"] = max(checked["largest"] or 0.0, standing.largest)
    with_outcome = replace(
        result,
        classes=_named(result.classes, int(standing.answers.max())),
        answers={**result.answers, "autoattack": spread(standing.answers, NOT_MEASURED)},
        after={name: spread(values, False) for name, values in standing.after.items()},
        autoattack=about,
        examples=checked,
    )
    turned = torch.tensor(sorted(standing.examples), dtype=torch.int64)
    missing = standing.broken - len(turned)
    if keep and missing:
        watch.say(
            f"{missing} images that AutoAttack turned before --save-examples was given were not kept: delete {place} "
            "to have them"
        )
    if not len(turned):
        return with_outcome, []
    turned = turned[probe(images.y.cpu()[rows][turned], how.most_examples, seed=0).sort()[0]]
    points = torch.stack([standing.examples[row] for row in turned.tolist()])
    return with_outcome, [Kept("autoattack", rows[turned], points, attack)]


def _saved(model: nn.Module, images: Images, kept: Kept, how: Measuring) -> dict[str, Any]:
    part = images.subset(kept.rows)

    def answer(x: Tensor) -> Tensor:
        with evaluating(model), torch.no_grad():
            return torch.cat([model(piece).argmax(1) for piece in torch.split(x, how.chunk)])

    place = (how.output or Path()) / "examples" / kept.name
    points, threat = kept.points.to(images.x.device), getattr(kept.attack, "threat", LinfBall(1.0))
    clean = part.pixels(slice(None))
    return save_examples(place, how.save_examples or "npz", points, clean, part.y, part.ids, threat, answer)
