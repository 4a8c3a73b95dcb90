"""What a person watching the curves would shout: training that has gone wrong, in one sentence each."""

from collections.abc import Mapping
from typing import Any

FALL = 0.2  # of accuracy under PGD since its highest, with the training attack still beaten: catastrophic overfitting
ONE_CLASS = 0.9  # share of the answers that are one class
MASKED = 0.15  # accuracy under cross-entropy PGD above that under margin PGD


def alarms(row: Mapping[str, Any], peak: float) -> list[str]:
    """Sentences about an epoch's line with its validation; `peak` is the highest ra_pgd of the validations before it."""
    validation, found = row["validation"], []
    fell = peak - validation["ra_pgd"]
    if fell > FALL and row["train_accuracy"] - validation["ra_pgd"] > FALL:
        found.append(
            f"catastrophic overfitting: accuracy under PGD fell from {peak:.0%} to {validation['ra_pgd']:.0%}, while the "
            f"attack that it trains on leaves {row['train_accuracy']:.0%}; use more steps, warm_up, or N-FGSM"
        )
    name, share, true_share = (validation["commonest"][key] for key in ("name", "share", "true_share"))
    if share > ONE_CLASS > true_share:
        found.append(
            f"collapse: {share:.0%} of the answers are '{name}', {true_share:.0%} of the images are; lower the "
            "learning rate, or let epsilon grow with warm_up"
        )
    if validation["ra_pgd"] - validation["ra_margin"] > MASKED:
        found.append(
            f"masked gradients: accuracy is {validation['ra_pgd']:.0%} under PGD on cross-entropy, but "
            f"{validation['ra_margin']:.0%} under PGD on the margin; do not trust the first"
        )
    return found
