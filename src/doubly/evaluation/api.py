"""Evaluation of any network on any images from Python, in one call."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from doubly.config.user_code import AnyImages, as_images
from doubly.distributed.launch import joined
from doubly.errors import UsageError
from doubly.evaluation.attacks import Attacks, ball_of, chosen, pgd20
from doubly.evaluation.autoattack.runner import Callback
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.evaluation import Evaluation
from doubly.evaluation.result import EvalResult
from doubly.threat import NormBall


@joined()
def evaluate(
    model: nn.Module,
    data: AnyImages,
    threat: NormBall | None = None,
    attacks: Attacks = ("pgd", "margin"),
    *,
    validation: AnyImages | None = None,
    watch: Callback | None = None,
    about: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EvalResult:
    """How robust a network is that takes images in [0,1] and returns logits: on every sample, under every attack.

    `attacks`: pgd, margin, autoattack, quick, or attacks such as PGD(…). `validation`: other images, on which the
    classes of the tail are picked as well. `about`: what else to say with the numbers. `settings`: of `EvalConfig`.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the first argument is the network, an nn.Module, got {type(model).__name__}")
    if threat is not None and not isinstance(threat, NormBall):
        raise UsageError(f"the third argument is the threat, got {type(threat).__name__}: pass attacks=[…] by name")
    names = [f.name for f in fields(EvalConfig)]
    if unknown := [name for name in settings if name not in names]:
        raise UsageError(f"evaluate has no setting '{unknown[0]}': it has {', '.join(names)}")
    paths = {name: Path(settings[name]) for name in ("output", "state") if settings.get(name) is not None}
    how = EvalConfig(**{**settings, **paths})
    ball = ball_of(attacks, threat)
    plain, ensemble = chosen(attacks, pgd20(ball), how.seed)
    others = None if validation is None else as_images(validation)
    images, watch = as_images(data), watch or Callback()
    return Evaluation(model, images, plain, ensemble, ball, how, others, watch, about or {}).run()
