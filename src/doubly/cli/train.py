"""doubly train."""

from typing import TYPE_CHECKING

from rich.console import Console

from doubly.cli.tables import print_line
from doubly.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from doubly.cli.train_options import TrainOptions

HELP = """\
usage: doubly train RECIPE [--variant literal] [OPTIONS]
       doubly train --data DATA --method METHOD [--model M:F] [OPTIONS]
       doubly train --config FILE [OPTIONS]
       doubly train --resume --output DIR

Train a network, and write a run directory: doubly train digits.at --output runs/at --seed 1 --epochs 60

--epsilon 8/255 sets the largest perturbation of training, validation and evaluation, --norm its norm, --lr the highest
learning rate, --epochs and --batch-size how long and in what portions.
Every field of a run has a flag, as in --optimizer.lr.peak 0.05 or --validation.every 5. `doubly train RECIPE --help`
lists the usual ones of a recipe with their values, `doubly train RECIPE --help-all` all; `doubly list recipes` shows
which recipes there are.
--set PATH=KIND replaces a whole part, whose fields then have flags: --set optimizer=optimizer.adamw
--optimizer.lr.peak 1e-3. PATH=JSON sets its fields as well. `doubly list kinds` lists the kinds.
--data takes a folder of class folders, an .npz file, the name of a dataset or a Hugging Face folder; the page Data of
the documentation lists the defaults that follow from its images.
--config FILE takes a saved config.json in place of a recipe.
--variant literal takes a recipe of the paper's DONE (done_pgd, done_gd, done_adam, done_fast) with all of the paper's
literal values at once, where ours differ; the run is named RECIPE_literal."""


def train(arguments: list[str], out: Console, err: Console) -> int:
    """Train a recipe, a saved configuration, or a run that was stopped."""
    if not arguments or arguments in (["--help"], ["-h"], ["--help-all"]):
        print_line(out, HELP)
        return 0
    from doubly.cli.train_options import parse_train_options

    options = parse_train_options(arguments)
    if options.threads is not None:
        _set_threads(options.threads)
    if options.dry_run:
        from doubly.cli.dry_run import dry_run

        return dry_run(options.run, options.output_dir if options.resume else None, out, err)
    return _train(options, out)


def _train(options: "TrainOptions", out: Console) -> int:
    from doubly.checkpoints import find_checkpoint
    from doubly.cli.loggers import logger_factories
    from doubly.cli.progress import terminal_progress
    from doubly.config.threats import describe_threats
    from doubly.config.user_code import is_library_model
    from doubly.jobs.signals import stop_on_signals
    from doubly.rundir import RunDir
    from doubly.training.loop import train_run

    run, output = options.run, options.output_dir
    with stop_on_signals() as request, terminal_progress(out, run.epochs) as lines:
        loggers = [factory(output) for factory in logger_factories(options.log, options.tensorboard)]
        for logger in loggers:
            logger.say = lines.on_message
        threats = describe_threats(run)
        lines.on_message(f"{run.name}, seed {run.seed}, {run.epochs} epochs, {threats} -> {output}")
        if is_library_model(run.model.named_code):
            from doubly.bridges.models import find_model

            lines.on_message(find_model(str(run.model.named_code)).sentence)
        if options.note:
            lines.on_message(options.note)
        if options.resume and not find_checkpoint(RunDir(output).checkpoints, "last"):
            lines.on_message(f"there is no checkpoint in {output} to resume: training starts from the beginning")
        try:
            train_run(
                run, output, resume=options.resume, callbacks=[lines, *loggers], stop=request, lock=not options.no_lock
            )
        except Interrupted as stopped:
            lines.on_message(f"{stopped}; saved: add --resume to continue")
            return 128 + (request.number or stopped.number)
    code = run.model.named_code
    print_line(out, f"trained; now: doubly evaluate {output}{f' --model {code}' if code else ''}")
    return 0


def _set_threads(threads: int) -> None:
    import torch

    if threads < 1:
        raise UsageError(f"threads must be at least 1, got {threads}")
    torch.set_num_threads(threads)
