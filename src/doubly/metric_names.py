"""The one list of metrics, which evaluation.json, terminal, report, TensorBoard and `doubly watch` share. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_NUMBER = 1e300  # files may come from anywhere; larger values, infinity and NaN count as missing
WEAK_SHARE = 2 / 3  # of the average under attack: a tail below it is called weak


@dataclass(frozen=True)
class Metric:
    """A metric: its key and label, how its value is printed, and which direction is better."""

    key: str
    """field of evaluation.json, of a row of metrics.jsonl, or of the validation in a row"""
    label: str
    """name in tables, figures and on the terminal"""
    explanation: str
    """what the number says, for readers of the report"""
    format: str = ".1%"
    """format specification of a printed value"""
    higher_is_better: bool | None = True
    """direction; None where neither is better"""
    is_accuracy: bool = True
    """a share of images in [0, 1]"""
    is_main: bool = False
    """a column of the paper's tables"""
    field: str = ""
    """where the value is an object, such as the worst class with its name: the field that holds the number"""

    def value(self, record: Mapping[str, Any]) -> float | None:
        """Return the number in a row, a validation or an evaluation; None where it holds no finite one."""
        value = record.get(self.key)
        if self.field:
            value = value.get(self.field) if isinstance(value, Mapping) else None
        return finite_number(value)

    def text(self, value: float) -> str:
        """Return the value as it is printed."""
        return f"{value:{self.format}}"

    def best(self, values: list[float]) -> float | None:
        """Return the best of the values; None where no direction is better."""
        return None if self.higher_is_better is None else max(values) if self.higher_is_better else min(values)


def finite_number(value: object) -> float | None:
    """Return a value from a file as a float; None if it is not a number, or not a finite one."""
    return float(value) if isinstance(value, int | float) and abs(value) < MAX_NUMBER else None


METRICS: dict[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("sa", "SA", "accuracy on clean images", is_main=True),
        Metric("ra_pgd", "RA-PGD", "accuracy under PGD", is_main=True),
        Metric("ra_tail_30", "RA-Tail-30", "mean RA-PGD of the weakest 30 % of classes of each model", is_main=True),
        Metric("ra_aa", "RA-AA", "accuracy under AutoAttack", is_main=True),
        Metric(
            "ra_margin",
            "RA-margin",
            "accuracy under the same PGD with the logit margin as its loss; where it is far below RA-PGD, "
            "RA-PGD is not a reliable measure of robustness",
        ),
        Metric("ra_margin_tail_30", "margin tail", "mean RA-margin of the weakest 30 % of classes under that attack"),
        Metric(
            "ra_strong",
            "RA-strong",
            "accuracy under short targeted attacks from several starts, which is close to RA-AA at about a tenth of "
            "its gradients",
        ),
        Metric("ra_strong_tail_30", "strong tail", "mean RA-strong of the weakest 30 % of classes under that attack"),
        Metric("worst_class", "worst class", "RA-PGD of the weakest class", field="ra_pgd"),
        Metric("loss", "training loss", "mean loss of the training images", ".3g", False, False),
        Metric("weighted_loss", "weighted loss", "the same with the method's weights", ".3g", False, False),
        Metric("train_accuracy", "training accuracy", "accuracy on the training images as attacked in training"),
        Metric("lr", "learning rate", "step size of the optimizer", ".2g", None, False),
        Metric("r", "r", "temperature of the weights in DONE", ".3g", None, False),
        Metric("weight_ess", "effective sample size", "as a share of the batch", ".2f", None, False),
        Metric(
            "weight_limited",
            "steps with limited weights",
            "share of the steps in which the limit of the mean weight acted",
            ".0%",
            None,
            False,
        ),
        Metric("seconds", "seconds per epoch", "training time of an epoch", ".1f", None, False),
    )
}
ATTACK_KEYS = {"clean": "sa", "autoattack": "ra_aa", "quick": "ra_apgd"}  # of other attacks it is ra_NAME
ATTACK_LABELS = {"ra_apgd": "RA-APGD"}


def attack_metric(attack: str) -> Metric:
    """Return the metric for the accuracy under an attack.

    Args:
        attack: Name of the attack in an evaluation, such as `pgd`, `margin` or a name of the user's own; `clean` for
            the unchanged images; `autoattack` for all of AutoAttack, `quick` or `apgd` for its two APGD attacks.

    Returns:
        The entry of `METRICS`, or one made from the name: key `ra_NAME` and label `RA-NAME`.
    """
    key = ATTACK_KEYS.get(attack, f"ra_{attack}")
    label = ATTACK_LABELS.get(key, f"RA-{attack}")
    return METRICS.get(key) or Metric(key, label, f"accuracy under the attack {attack}")


def tail_metric(metric: Metric) -> Metric:
    """Return the metric for the mean over the weakest 30 % of classes of an accuracy under attack."""
    key = "ra_tail_30" if metric.key == "ra_pgd" else f"{metric.key}_tail_30"
    return METRICS.get(key) or Metric(
        key, f"{metric.label} tail", f"mean {metric.label} of its weakest 30 % of classes"
    )


def worst_class_metric(metric: Metric) -> Metric:
    """Return the metric for the weakest class of an accuracy under attack."""
    key = "worst_class" if metric.key == "ra_pgd" else f"worst_class_{metric.key}"
    explanation = f"{metric.label} of the weakest class"
    return METRICS.get(key) or Metric(key, f"worst class, {metric.label}", explanation, field=metric.key)


def has_weak_classes(average: float, tail: float) -> bool:
    """Return whether the weakest classes under attack are so far below the average that repair is worth a try."""
    return tail < WEAK_SHARE * average


def repair_advice(network: str, command: str, holdout: float) -> str:
    """Return what to try on a network with weak classes.

    Args:
        network: Its name in the sentence.
        command: The command that repairs it.
        holdout: Share of the training images that its run held out, without which it cannot be repaired.
    """
    weak = f"The weakest classes of {network} are far below its average under attack: the first thing to try is "
    if holdout == 0:
        return f"{weak}`doubly repair`, which needs images held out: train with --data.holdout 0.1, then `{command}`."
    return f"{weak}`{command}`, which needs no training."


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return not isinstance(value, bool) and finite_number(value) is not None


def is_share(value: Any) -> bool:
    """Return whether a value is a number in [0, 1]."""
    return is_number(value) and 0 <= value <= 1
