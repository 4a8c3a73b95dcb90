"""Runs for Weights & Biases, which is an optional dependency and imported only when it is used."""

import hashlib
import os
from typing import Any

from doubly.bridges.logger import Logger, require
from doubly.bridges.tensorboard import bars, scalars
from doubly.text import file_name


class WandB(Logger):
    """Writes metrics, a picture of the classes, the configuration and the trained weights as a run of W&B.

    It is offline unless the environment says WANDB_MODE=online, so that nothing leaves the machine unasked;
    `wandb sync FOLDER` uploads it later. Steps are epochs. Use it as `train(…, callbacks=[WandB(folder)])`.
    """

    title = "wandb"
    project = "doubly"
    run: Any = None

    @classmethod
    def check_installed(cls) -> None:
        """Raise UsageError if the package is missing."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would send errors to its makers, also offline
        require("wandb", "W&B", "wandb")

    def write(self, row: dict[str, Any]) -> None:
        """Log a `row` of metrics."""
        import wandb

        run, epoch = self.run or self._begin(), row["epoch"]
        values: dict[str, Any] = dict(scalars(row))
        if "validation" in row:
            values["classes"] = wandb.Image(bars(row["validation"]["per_class"], epoch))
        run.log(values, step=epoch)

    def _begin(self) -> Any:
        import wandb

        config = self.read_config()
        identity = hashlib.blake2b(str(self.folder.resolve()).encode(), digest_size=8).hexdigest()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", self.project),
            name=f"{config.get('name', 'run')}-s{config.get('seed', 0)}",
            dir=str(self.folder),
            id=identity,  # the same after a restart, so that W&B joins the parts
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type, unused-ignore]
            config=config,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        return self.run

    def finish(self) -> None:
        """Log the files of the run, and end it."""
        import wandb

        if self.run is None:
            return
        run, self.run = self.run, None
        try:
            if files := self.artifacts():
                artifact = wandb.Artifact(file_name(run.name), type="model")
                for file in files:
                    artifact.add_file(str(file))
                run.log_artifact(artifact)
        finally:
            run.finish(exit_code=0 if self.is_complete else 1)
