"""The flags of doubly train that doubly reproduce does not take, and why."""

from collections.abc import Sequence

from doubly.errors import UsageError

RUN_PARTS = ("method", "model", "data", "optimizer", "validation")
RUN_FLAGS = (
    *("--epochs", "--lr", "--batch-size", "--epsilon", "--norm", "--seed", "--sampling", "--warm-up", "--ema-decay"),
    *("--config", "--set", "--variant", "--weights", "--mean", "--std"),
)


def refuse_run_settings(arguments: Sequence[str]) -> None:
    """Refuse a setting of a run: a study has those that its numbers are compared with.

    Raises:
        UsageError: If there is one; the message says what a study takes.
    """
    for word in arguments:
        flag = word.partition("=")[0]
        if flag in RUN_FLAGS or (flag.startswith("--") and flag[2:].partition(".")[0] in RUN_PARTS):
            raise UsageError(
                f"reproduce does not take {flag}: all runs of a study have the settings that its numbers are compared "
                "with; change how many and where by --scale, --seeds, --methods and --output, let --search choose "
                f"settings, or train one run: doubly train RECIPE {flag} …"
            )
