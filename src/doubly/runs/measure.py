"""Evaluation of any network on any images: attacks, AutoAttack, trust panel, one result."""

from collections.abc import Iterable, Mapping
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
from doubly.evaluation.examples import save_examples
from doubly.evaluation.network import check_network
from doubly.evaluation.result import NOT_MEASURED, EvalResult
from doubly.runs.answers import Answers, answers
from doubly.runs.autoattack import Ensemble, Unheard
from doubly.runs.measuring import Measuring
from doubly.runs.own_model import AnyImages, as_images
from doubly.runs.saved_config import to_json
from doubly.runs.standard_attacks import Attacks, chosen, pgd20
from doubly.threat import LinfBall, NormBall
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
    given = attacks.values() if isinstance(attacks, Mapping) else attacks
    plain, ensemble = chosen(attacks, pgd20(threat or _ball(given)))
    others = None if validation is None else as_images(validation)
    how, images = Measuring(**settings), as_images(data)
    if how.save_examples is not None and how.output is None:
        raise UsageError("attacked images need a folder to be saved in: give an output")
    result = measure(model, images, plain, ensemble, how, others, watch or Unheard(), about or {})
    if how.output is not None and not how.sharded:
        result.save(how.output)
    return result


def _ball(attacks: Iterable[Any]) -> NormBall:
    """AutoAttack beside an attack that was handed in looks at the same ball."""
    balls = [attack.threat for attack in attacks if isinstance(getattr(attack, "threat", None), NormBall)]
    return balls[0] if balls else LinfBall()


def measure(
    model: nn.Module,
    images: Images,
    attacks: Mapping[str, Attack],
    ensemble: AutoAttack | None,
    how: Measuring,
    validation: Images | None,
    watch: Unheard,
    about: Mapping[str, Any],
) -> EvalResult:
    """All of it, in this order: is the network fit to be measured, attacks, AutoAttack, examples, trust."""
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
    found = answers(model, images, attacks, how.seed, how.chunk, done, keep)
    result = _result(images, attacks, found, how, about)
    if validation is not None and attacks:
        others = answers(model, validation, attacks, how.seed, how.chunk)
        result = replace(result, validation=_result(validation, attacks, others, how, {}))
    examples = [Kept(name, keep, points, attacks[name]) for name, points in found.attacked.items() if keep is not None]
    if ensemble is not None:
        result, broken = _autoattack(model, images, replace(ensemble, seed=how.seed), how, result, watch)
        examples += broken
    if examples:
        saved = {kept.name: _saved(model, images.to(device), kept, how) for kept in examples}
        result = replace(result, examples={**result.examples, "saved": saved})
    if how.trust and not how.sharded:
        pgd = attacks.get("pgd")
        more = trust.probe(model, x, y, pgd, how.seed) if isinstance(pgd, PGD) else []
        result = replace(result, trust=trust.panel([*trust.from_result(result, invariance), *more]))
    return result


class Kept(NamedTuple):
    """Attacked images, and which images they were."""

    name: str
    rows: Tensor
    points: Tensor
    attack: Any


def _result(
    images: Images, attacks: Mapping[str, Attack], found: Answers, how: Measuring, about: Mapping[str, Any]
) -> EvalResult:
    known = 1 + max(int(given.max()) for given in found.classes.values())  # also classes that are not in the data
    others = {name: to_json(attack) for name, attack in attacks.items() if name not in ("pgd", "margin")}
    protocol = {
        **({"attack": to_json(attacks["pgd"])} if "pgd" in attacks else {}),
        **({"attacks": others} if others else {}),
        "seed": how.seed,
        "chunk": how.chunk,
        "data_sha256": images.sha256(),
        **about,
    }
    return EvalResult(
        images.y.cpu().numpy(),
        (*images.classes, *(str(k) for k in range(len(images.classes), known))),
        found.classes,
        protocol,
        images.ids.cpu().numpy(),
        {name: losses for name, losses in found.losses.items() if name != "clean"},
        examples=found.examples if attacks else {},
        tail_share=how.tail_share,
        tail_rounding=how.tail_rounding,
    )


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

    checked = dict(result.examples) or {"n": 0, "outside": 0, "changed": 0, "largest": 0.0}
    checked["n"] += standing.made
    checked["outside"] += standing.outside
    checked["largest"] = max(checked["largest"], standing.largest)
    with_outcome = replace(
        result,
        answers={**result.answers, "autoattack": spread(standing.answers, NOT_MEASURED)},
        after={name: spread(values, False) for name, values in standing.after.items()},
        autoattack=about,
        examples=checked,
    )
    turned = torch.tensor(sorted(standing.examples), dtype=torch.int64)
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

    folder = (how.output or Path()) / "examples" / kept.name
    points, threat = kept.points.to(images.x.device), getattr(kept.attack, "threat", LinfBall(1.0))
    clean = part.pixels(slice(None))
    return save_examples(folder, how.save_examples or "npz", points, clean, part.y, part.ids, threat, answer)
