"""Every public function and class of doubly with arguments that work, for `malformed_calls`."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import doubly
from doubly import attacks, bilevel, losses, methods, schedules
from doubly.bilevel import Terms
from doubly.data import DATASETS, IMBALANCES
from doubly.evaluation import comparison, intervals, metrics
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.weights import KLWeights
from doubly.offsets.config import RepairConfig
from doubly.threat import is_image, is_inside

Target = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
MADE = inspect.Parameter.empty


def images(count: int = 6) -> Tensor:
    return torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(count))


def labels(count: int = 6) -> Tensor:
    return torch.arange(count) % 2


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))


class Returns(nn.Module):
    """A network that returns something else than logits."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.change = network(), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.inner(x))


NETWORKS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(7, 2),
    lambda: nn.Conv2d(3, 4, 3),
    lambda: network().double(),
    lambda: network().to("meta"),
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 1)),
    lambda: nn.Identity(),
    lambda: nn.Sequential(),
    lambda: Returns(lambda z: z[:, 0]),
    lambda: Returns(lambda z: z.mean()),
    lambda: Returns(lambda z: z[None]),
    lambda: Returns(lambda z: z[:1]),
    lambda: Returns(lambda z: z.argmax(1)),
    lambda: Returns(lambda z: None),
    lambda: Returns(lambda z: (z, z)),
    lambda: Returns(lambda z: z * float("nan")),
    lambda: Returns(lambda z: z * float("inf")),
    lambda: Returns(lambda z: z.detach()),
    lambda: Returns(lambda z: z.long()),
    lambda: Returns(lambda z: z.numpy(force=True)),
    lambda: Returns(lambda z: z.to(torch.complex64)),
    lambda: Returns(lambda z: z[:, :0]),
)


def terms(delta: Tensor) -> Terms:
    theta = torch.ones(3, requires_grad=True)
    return Terms((delta * theta).sum(1), (delta - theta).square().sum(1))


def problem(theta: Any, delta: Any, batch: Any) -> Terms:
    return Terms((delta * theta).sum(1) + batch, (delta - theta).square().sum(1))


def with_variants(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with others that return something wrong, as `variants`."""
    wrong: tuple[Callable[[Terms], Any], ...] = (
        lambda t: None,
        lambda t: t.outer.mean(),
        lambda t: (t.outer, "inner"),
        lambda t: (t.outer.long(), t.inner),
        lambda t: (t.outer * float("nan"), t.inner),
        lambda t: (t.outer, t.inner / 0),
        lambda t: (t.outer[:1], t.inner),
        lambda t: (t.outer.detach(), t.inner.detach()),
        lambda t: (t.outer, t.inner, None, 4),
        lambda t: (t.outer.detach().numpy(), None),
        lambda t: (t.outer.to("meta"), t.inner.to("meta")),
        lambda t: (t.outer[:0], t.inner[:0]),
        lambda t: (t.outer.to(torch.complex64), t.inner),
    )

    def call(change: Callable[[Terms], Any], *arguments: Any) -> Any:
        return change(function(*arguments))

    own = lambda *arguments: function(*arguments)  # noqa: E731 - functions of a module cannot carry attributes safely
    own.variants = tuple(partial(call, change) for change in wrong)  # type: ignore[attr-defined]
    return own


def _square(v: Tensor) -> Tensor:
    return 2 * v


def _result() -> doubly.EvalResult:
    y = labels(6).numpy()
    return doubly.EvalResult(y, ("a", "b"), {"clean": y, "pgd": y[::-1].copy()})


VALUES: dict[str, Callable[[], Any]] = {  # by the name of a parameter that has no default
    "x": images,
    "y": labels,
    "delta": lambda: torch.full((6, 3), 0.1),
    "radius": lambda: 0.5,
    "lower": lambda: torch.full((6, 3), -1.0),
    "upper": lambda: torch.full((6, 3), 1.0),
    "shares": lambda: torch.tensor([0.5, 0.5]),
    "classes": lambda: ("a", "b"),
    "problem": lambda: with_variants(terms),
    "shifted": lambda: with_variants(terms),
    "inverse_curvature": lambda: torch.ones(6, 3),
    "state": dict,
    "folder": lambda: "events",
    "path": lambda: "nowhere",
    "predictions": lambda: {"clean": labels().numpy()},
}


def targets() -> dict[str, Target]:
    """Return each target by its name: a function that makes the callable and its arguments."""
    table: dict[str, Target] = {}
    for module in (doubly, bilevel, attacks, methods):
        for name in module.__all__:
            kind = getattr(module, name)
            protocol = getattr(kind, "_is_protocol", False)
            if isinstance(kind, type) and not protocol and not issubclass(kind, Exception | nn.Module):
                table[f"{module.__name__}.{name}"] = partial(_constructor, kind)
    for part in (*losses.LOSSES.values(), *schedules.SCHEDULES.values(), *IMBALANCES.values(), *DATASETS.values()):
        table[f"{part.__module__}.{part.__name__}"] = partial(_constructor, part)
    for config in (EvalConfig, RepairConfig):
        table[config.__name__] = partial(_constructor, config)
    return {**table, **_attacks(), **_methods(), **_bilevel(), **_minimize(), **_evaluation(), **_front_door()}


def _constructor(kind: type) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a class with its defaults, and values where it has none."""
    arguments: dict[str, Any] = {}
    made = (
        {f.name: f.default_factory for f in fields(kind) if callable(f.default_factory)} if is_dataclass(kind) else {}
    )
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in made:
            arguments[name] = made[name]()
        elif parameter.default is not MADE:
            arguments[name] = parameter.default
        else:
            arguments[name] = VALUES.get(name, lambda: torch.zeros(6))()
    return kind, arguments


def _attacks() -> dict[str, Target]:
    table: dict[str, Target] = {}
    for name, kind in attacks.ATTACKS.items():
        attack: Any = kind()
        for verb in ("__call__", "perturb"):
            table[f"attack {name}.{verb}"] = partial(_attack_call, getattr(attack, verb))
    for ball in (doubly.LinfBall(0.1), doubly.L2Ball(0.5)):
        pgd = doubly.PGD(ball, 2, restarts=2)
        table[f"attack {type(ball).__name__}"] = partial(_attack_call, pgd)
        table[f"{type(ball).__name__}.around"] = partial(lambda b: (b.around, {"x": images()}), ball)
        table[f"{type(ball).__name__}.length"] = partial(lambda b: (b.length, {"delta": images()}), ball)
        table[f"{type(ball).__name__}.scaled"] = partial(lambda b: (b.scaled, {"factor": 0.5}), ball)
    table["PGD.with_class_factors"] = lambda: (_class_factors, {"factors": torch.ones(2)})
    table["is_inside"] = lambda: (is_inside, {"threat": doubly.LinfBall(0.1), "delta": images()})
    table["is_image"] = lambda: (is_image, {"x": images()})
    for name, loss in losses.LOSSES.items():
        values = {"logits": torch.randn(6, 2), "y": labels()}
        extra = {"clean": torch.randn(6, 2)} if loss.needs_clean_logits else {}
        table[f"loss {name}"] = partial(lambda f, v: (f, dict(v)), loss(), {**values, **extra})
    return table


def _attack_call(attack: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    return attack, {"model": network(), "x": images(), "y": labels(), "generator": 0}


def _class_factors(factors: Any) -> Tensor:
    return doubly.PGD(steps=1).with_class_factors(factors)(network(), images(), labels())


def _methods() -> dict[str, Target]:
    def objective(kind: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        method = kind()
        if method.attack is not None:
            method = method.with_attack(method.attack.within(method.attack.threat))
        batch = doubly.Batch(images(), labels(), torch.arange(6))
        state, step = method.init(torch.tensor([3, 3])), doubly.TrainStep()
        return method.objective, {"model": network(), "batch": batch, "state": state, "step": step}

    def init(kind: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        return kind().init, {"counts": torch.tensor([3, 3])}

    table: dict[str, Target] = {}
    for name, kind in methods.METHODS.items():
        table[f"method {name}.objective"] = partial(objective, kind)
        table[f"method {name}.init"] = partial(init, kind)
    return table


def _bilevel() -> dict[str, Target]:
    def update(composition: Any, values: Tensor) -> tuple[Callable[..., Any], dict[str, Any]]:
        _, state = composition.update(values, values, {})
        return composition.update, {"values": values, "all_values": values, "state": state}

    losses_of_batch, table = torch.rand(6), {}
    compositions: tuple[tuple[Any, Tensor], ...] = (
        (bilevel.RunningMean(), losses_of_batch),
        (bilevel.LogMeanExp(), losses_of_batch),
        (bilevel.LogMeanExp(cap=2.0), losses_of_batch),
        (bilevel.MeanVariance(), losses_of_batch),
        (bilevel.ChiSquare(), losses_of_batch),
        (bilevel.CVaR(), losses_of_batch),
        (bilevel.ClassLogMeanExp(torch.tensor([0.5, 0.5])), torch.stack([losses_of_batch, labels().float()], 1)),
    )
    for composition, values in compositions:
        name = type(composition).__name__
        table[f"{name}.update"] = partial(update, composition, values)
        table[f"{name}.value"] = partial(lambda c, v: (c.value, {"values": v}), composition, values)
    sets: tuple[Any, ...] = (bilevel.Box(-1, 1, 0.1), bilevel.Ball(0.5, bilevel.Box(-1, 1)), bilevel.Simplex())
    for number, constraint in enumerate((*sets, bilevel.WholeSpace(), bilevel.Ball(torch.ones(6)))):
        point = torch.full((6, 3), 0.1)
        for verb, values_by_name in {
            "project": {"delta": point},
            "at": {"fraction": point},
            "face": {"delta": point, "slope": point},
        }.items():
            name = f"{type(constraint).__name__}{number}.{verb}"
            table[name] = partial(lambda f, v: (f, dict(v)), getattr(constraint, verb), values_by_name)
    for solver in (bilevel.ConjugateGradient(), bilevel.Diagonal(), bilevel.Neumann(), bilevel.Direct()):
        table[f"{type(solver).__name__}.__call__"] = partial(
            lambda s: (s, {"matvec": _square, "b": torch.ones(6, 3)}), solver
        )
    return table


def _minimize() -> dict[str, Target]:
    def arguments(**more: Any) -> dict[str, Any]:
        delta, composition = torch.full((6, 3), 0.1), bilevel.RunningMean()
        return {"delta": delta, "composition": composition, "state": {}, **more}

    def minimize_arguments() -> dict[str, Any]:
        return {
            "problem": with_variants(problem),
            "theta": torch.ones(3),
            "delta": torch.full((6, 3), 0.1),
            "data": torch.rand(6),
            "optimizer": lambda tensors: torch.optim.SGD(tensors, 0.1),
            "steps": 2,
            "batch_size": 3,
            "composition": bilevel.LogMeanExp(),
            "constraint": bilevel.Box(-1, 1),
            "descent": bilevel.Descent(steps=2),
            "solve": bilevel.Direct(),
            "shared": False,
            "warm_start": True,
            "step_size": None,
            "eta": None,
            "storm": False,
            "state": None,
            "callback": None,
            "seed": 0,
            "communicator": bilevel.SingleProcess(),
        }

    ones, theta = torch.ones(6, 3), torch.ones(3, requires_grad=True)
    own = with_variants(lambda delta: Terms((delta * theta).sum(1)))
    first = {"problem": own, "shifted": own, "inverse_curvature": ones, "parameters": [theta], "span": 1e-4}
    part = bilevel.Part(own, own, ones, ones)
    parts = {"parts": [part, part], "composition": bilevel.RunningMean(), "state": {}, "parameters": [theta]}
    descent = {
        "inner": lambda delta: delta.square().sum(1),
        "start": torch.ones(6, 3),
        "constraint": bilevel.WholeSpace(),
        "rule": bilevel.AdamStep(),
        "steps": 2,
        "tolerance": 0.1,
    }
    table: dict[str, Target] = {
        f"minimize {number}": lambda: (bilevel.minimize, minimize_arguments()) for number in range(8)
    }
    table["cid"] = lambda: (
        bilevel.cid,
        arguments(problem=with_variants(terms), solve=bilevel.Direct(), constraint=bilevel.Box(-1, 1), previous=None),
    )
    table["cid_first_order"] = lambda: (bilevel.cid_first_order, arguments(**first))
    table["cid_first_order_parts"] = lambda: (bilevel.cid_first_order_parts, dict(parts))
    table["projected_descent"] = lambda: (bilevel.projected_descent, dict(descent))
    table["tilted_probabilities"] = lambda: (
        bilevel.tilted_probabilities,
        {"scores": torch.rand(3), "prior": torch.ones(3) / 3, "temperature": 0.5, "cap": 2.0},
    )
    return table


def _evaluation() -> dict[str, Target]:
    y = labels().numpy()
    right, floats = y == 0, np.array([0.5, 0.25, 1.0])
    table: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "per_class": (metrics.per_class, {"correct": right, "y": y, "classes": 2}),
        "tail": (metrics.tail, {"accuracies": floats, "share": 0.3, "rounding": "round"}),
        "worst_class": (metrics.worst_class, {"accuracies": floats}),
        "confusion": (metrics.confusion, {"predictions": y, "y": y, "classes": 2}),
        "wilson": (intervals.wilson, {"successes": 3, "n": 6, "level": 0.95}),
        "bootstrap_difference": (
            intervals.bootstrap_difference,
            {
                "correct_a": right,
                "correct_b": ~right,
                "y": y,
                "statistic": intervals.average_accuracy,
                "resamples": 3,
                "seed": 0,
                "level": 0.95,
            },
        ),
        "KLWeights.of": (
            KLWeights.of,
            {
                "losses": np.linspace(0, 1, 6),
                "y": y,
                "accuracies": floats[:2],
                "r": 1.0,
                "normalize": "batch",
                "batch": 3,
            },
        ),
        "compare": (comparison.compare, {"first": _result(), "second": _result(), "resamples": 3, "seed": 0}),
    }
    return {name: partial(lambda f, v: (f, dict(v)), function, values) for name, (function, values) in table.items()}


def _front_door() -> dict[str, Target]:
    def few() -> tuple[Tensor, Tensor]:
        return images(12), labels(12)

    pgd = doubly.PGD(doubly.LinfBall(0.1), 1)
    return {
        "Images.of": lambda: (doubly.Images.of, {"x": images(), "y": labels(), "classes": ("a", "b")}),
        "evaluate": lambda: (
            doubly.evaluate,
            {"model": network(), "data": few(), "threat": pgd.threat, "attacks": [pgd], "trust": False, "seed": 0},
        ),
        "repair": lambda: (
            doubly.repair,
            {"model": network(), "held_out": few(), "threat": pgd.threat, "attacks": [pgd], "rounds": 1, "mean": None},
        ),
        "train": lambda: (
            doubly.train,
            {
                "model": network(),
                "data": few(),
                "method": doubly.AT(pgd),
                "epochs": 1,
                "lr": 0.1,
                "batch_size": 6,
                "holdout": None,
                "mean": 0.5,
                "std": 0.5,
                "verbose": False,
            },
        ),
        "load": lambda: (doubly.load, {"path": "nowhere", "checkpoint": "last", "device": "cpu"}),
    }
