"""doubly reproduce: a plan run here, shown, or handed to a scheduler."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from doubly.bridges.tensorboard import TensorBoard
from doubly.cli.evaluate import parse_evaluate_options
from doubly.cli.train_options import parse_train_options
from doubly.evaluation.config import EvalConfig
from doubly.jobs.slurm import job_commands
from doubly.rundir import RunDir, read_json
from doubly.studies.plans import PLANS, SCALES, Plan, Scale, plan_jobs

TINY = {
    "epochs": 1,
    "batch_size": 512,
    "model.width": 2,
    "validation.size": 20,
    "method.attack.steps": 1,
    "validation.attack.steps": 1,
    "device": "cpu",
}
CONFIG = EvalConfig(images=20, autoattack_images=2, trust_images=5)
PLAN = Plan("for tests", {"digits": ("at", "done_pgd"), "digits.imbalanced": ("at",)}, autoattack=True)
NAMES = ["digits.at-s0", "digits.done_pgd-s0", "digits.imbalanced.at-s0"]


@pytest.fixture
def reproduce(cli, monkeypatch):
    """Return a function that calls doubly reproduce, which has a tiny plan and a tiny scale."""
    monkeypatch.setitem(PLANS, "tiny", PLAN)
    monkeypatch.setitem(SCALES, "small", Scale("", CONFIG, TINY))
    monkeypatch.setattr("doubly.jobs.cost.MAX_SECONDS", 0.01)
    return lambda *words: cli("reproduce", *words)


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr("doubly.report.Report.write", lambda report, output: output / "report.html")


def split_commands(line):
    """Return the arguments of `doubly train …` and of `doubly evaluate …`."""
    words = shlex.split(line)
    middle = words.index("&&")
    assert words[:2] == ["doubly", "train"] and words[middle + 1 : middle + 3] == ["doubly", "evaluate"]
    return words[2:middle], words[middle + 3 :]


def test_a_plan_runs_and_then_nothing_is_left(reproduce, monkeypatch, request, inline):
    words = ["tiny", "--seeds", 1, "--no-autoattack", "--output", "out"]
    code, out, err = reproduce(*words, "--jobs", 1, "--tensorboard")
    assert code == 0, err
    for name in NAMES:
        evaluation = read_json(RunDir(Path("out") / name).evaluation)
        assert evaluation["n"] == 20 and evaluation["trust"] and "ra_aa" not in evaluation
        assert list(Path("out", name, "tensorboard").iterdir())
    assert out.endswith("runs: out\npage: out/report-tiny/report.html\n") and Path("out/report-tiny/table.md").exists()
    assert "DONE-PGD" in out and "digits.imbalanced" in out and "RA-Tail-30" in out
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    request.getfixturevalue("no_pictures")
    code, out, _ = reproduce(*words)
    assert code == 0 and out.startswith("3 of 3 runs are done already") and "DONE-PGD" in out
    table = reproduce(*words, "--dry-run").out
    assert table.count(" done ") == 3 and table.endswith("all 3 runs are done\n")
    assert reproduce("tiny", "--seeds", 1, "--output", "out", "--dry-run").out.count("trained, to evaluate") == 3
    commands = reproduce(*words, "--commands").out
    assert commands.startswith("# then: doubly report /") and commands.count("\n") == 1
    assert reproduce(*words, "--slurm", "array.sh").out.startswith("all 3 runs are done; now: doubly report /")


def test_a_run_that_fails_is_reported_and_the_others_are_shown(reproduce, inline, no_pictures):
    Path("out/digits.done_pgd-s0").mkdir(parents=True)
    Path("out/digits.done_pgd-s0/letter.txt").write_text("a file of the user")
    code, out, err = reproduce(
        "tiny", "--seeds", 1, "--no-autoattack", "--output", "out", "--methods", "at", "done_pgd"
    )
    assert code == 2
    assert err == (
        "doubly: out/digits.done_pgd-s0 failed: UsageError: out/digits.done_pgd-s0 is not empty (letter.txt): "
        "choose another --output\n"
    )
    assert "page: out/report-tiny/report.html" in out and "DONE-PGD" not in out


def test_a_dry_run_shows_runs_states_and_times(reproduce):
    code, out, err = reproduce("tiny", "--seeds", 2, "--jobs", 1, "--dry-run")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(" digits")}
    assert code == 0 and list(rows) == [*NAMES, *(name.replace("s0", "s1") for name in NAMES)]
    assert rows["digits.at-s0"][1:6] == ["to", "do", "2", "+", "2"]
    assert rows["digits.done_pgd-s0"][3:6] == ["3", "+", "3"]
    assert "6 of 6 runs to do: about " in out and " with 1 jobs" in out
    assert err.startswith("estimated from ") and " s for a pass of 512 images of 8 x 8 pixels, " in err
    assert err.count("\n") == 1 and not Path("runs").exists()


def test_a_search_chooses_the_settings_of_the_runs_on_a_holdout_of_ten_percent(reproduce, inline, no_pictures):
    words = ["tiny", "--seeds", 2, "--no-autoattack", "--output", "out", "--methods", "at", "--search", 2]
    plan = reproduce(*words, "--dry-run").out
    assert plan.count("to do") == 4 + 4 + 1 and "search/digits.at/trial-01-split-0" in plan and "digits.at-s1" in plan
    assert not Path("out").exists()
    code, out, err = reproduce(*words, "--jobs", 1)
    assert code == 0 and "1. search: 2 trials for each of 2 recipes" in out, err
    winners = read_json(Path("out/winners.json"))
    for name in ("digits.at", "digits.imbalanced.at"):
        search = read_json(Path("out/search", name, "search.json"))
        best = max(search["trials"], key=lambda trial: trial["score"])
        assert search["holdout"] == 0.1 and len(search["trials"]) == 2
        assert winners[name] == search["winner"] == best["changes"]
        assert set(best["changes"]) == {"optimizer.lr.peak", "optimizer.weight_decay"}
        for seed in (0, 1):
            config = read_json(Path(f"out/{name}-s{seed}/config.json"))
            assert config["optimizer"]["lr"]["peak"] == best["changes"]["optimizer.lr.peak"]
            assert config["optimizer"]["weight_decay"] == best["changes"]["optimizer.weight_decay"]
            assert config["data"]["holdout"] == 0 and config["seed"] == seed
    assert "all 8 runs are done" in reproduce(*words, "--dry-run").out
    for wrong, message in [
        (["tiny", "--search", 0], "--search takes 1 to 9 trials"),
        (["tiny", "--search", 10], "grid of digits.* has points; got 10"),
        (["tiny", "--search", 2, "--commands"], "use it here or with --ray"),
        (["digits", "--search", 2], "--search is for tables and figures"),
    ]:
        code, _, err = reproduce(*wrong)
        assert code == 2 and re.search(message, err), (wrong, err)


def test_the_verbs_parse_commands_into_the_jobs_of_the_plan(tmp_path):
    folder = tmp_path / "with space; and 'quote'"
    for scale in SCALES.values():
        for name in ("table4", "cifar10"):
            job = plan_jobs(PLANS[name], scale, 2, folder, root="/da ta")[-1]
            train, evaluate = split_commands(job_commands(job, scale.changes, ["--tensorboard"]).line)
            options = parse_train_options(train)
            assert options.run == job.run and options.output == job.output and options.resume and options.tensorboard
            options, _ = parse_evaluate_options(evaluate)
            assert options.directory == job.output and options.config == job.evaluate and options.data_root == "/da ta"
            assert options.autoattack == ("autoattack" in job.attacks) and options.attacks == ("pgd", "margin")


def test_the_commands_do_what_the_plan_would(reproduce, cli):
    """On a folder that does not exist, and again when all is done."""
    words = ["tiny", "--seeds", 1, "--methods", "at", "--commands", "--output", "out"]
    lines = reproduce(*words).out.splitlines()
    assert len(lines) == 3 and lines[-1].startswith("# then: doubly report ")
    for _ in range(2):
        train, evaluate = split_commands(lines[0])
        assert [cli("train", *train).code, cli("evaluate", *evaluate).code] == [0, 0]
    assert cli("train", *split_commands(lines[1])[0]).code == 0
    assert reproduce(*words).out.splitlines() == lines[1:]  # a trained run is resumed, which takes no time
    first, *_ = reproduce(*words, "--tensorboard").out.splitlines()
    assert split_commands(first)[0][-1] == "--tensorboard"


def test_a_slurm_script_is_written_for_what_is_not_done(reproduce):
    code, out, _ = reproduce("tiny", "--seeds", 1, "--jobs", 2, "--output", "o ut", "--slurm", "array.sh")
    assert code == 0 and "wrote array.sh, 3 runs: submit it with `sbatch array.sh`" in out
    text = Path("array.sh").read_text()
    assert "#SBATCH --array=0-2%2\n" in text and "#SBATCH --time=0-01:00:00\n" in text
    assert subprocess.run(["bash", "-n", "array.sh"]).returncode == 0


def test_missing_data_are_reported_at_once_with_the_remedy_for_each_dataset(reproduce, monkeypatch):
    monkeypatch.setitem(SCALES, "small", Scale("small.", CONFIG))
    code, out, err = reproduce("figure3", "--seeds", 1, "--data-root", "empty")
    assert (code, out) == (2, "") and not Path("runs").exists() and err.count("\n") == 1
    for name in ("svhn", "gtsrb", "cifar10", "stl10"):
        assert f"fetch it with `doubly data fetch {name} --data-root" in err
    code, out, err = reproduce("figure5", "--seeds", 1, "--data-root", "empty", "--dry-run")  # estimated without them
    assert code == 0 and "3 of 3 runs to do" in out and "as if the published files were here" in err


def test_what_does_not_fit_is_refused_in_one_sentence(reproduce, monkeypatch):
    Path("file").write_text("")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for words, message in [
        ("tabel1", "there is no study 'tabel1': did you mean 'table1'?"),
        ("tiny --scale papr", "there is no scale 'papr': did you mean 'paper'?"),
        ("tiny --methods mail", "the plan has no method 'mail'"),
        ("tiny --seeds 0", "jobs and seeds are at least 1, got 2 and 0"),
        (
            f"demo --seeds {10**400} --dry-run",
            "a study has at most 1,000 seeds, got 10000000000000000000: lower --seeds",
        ),
        ("tiny --jobs 0", "jobs and seeds are at least 1, got 0 and 3"),
        ("tiny --images 0", "images must be at least 1, got 0"),
        ("demo --methods at", "--methods is for tables and figures: demo has its own"),
        ("demo --scale small", "--scale is for tables and figures"),
        ("digits --seeds 2", "digits has a seed per fold: leave --seeds out"),
        ("tiny --output file", "file cannot hold the results"),
        ("tiny --epochs 3", "reproduce does not take --epochs: all runs of a study have the settings that its numbers"),
        ("demo --lr=0.1", "reproduce does not take --lr: "),
        ("weak_classes --method.beta 3", "reproduce does not take --method.beta: "),
        ("tiny --data folder", "reproduce does not take --data: "),
        ("tiny --tensorboard", "TensorBoard cannot be written"),
        ("demo --tensorboard", "TensorBoard cannot be written"),
    ]:
        code, out, err = reproduce(*words.split())
        assert (code, out) == (2, "") and err.startswith(f"doubly: {message}") and err.count("\n") == 1, words


def test_a_study_on_digits_lists_its_runs_or_runs_with_its_callbacks(reproduce, monkeypatch):
    code, out, _ = reproduce("demo", "--output", "there", "--dry-run")
    assert code == 0 and len(set(out.splitlines())) == out.count("\n") == 4 * 5 and out.startswith("there/")
    calls = []
    monkeypatch.setattr(
        "doubly.studies.digits.run_digits_study", lambda *arguments: calls.append(arguments) or "page.md"
    )
    code, out, _ = reproduce("digits_done", "--jobs", 3, "--tensorboard")
    assert (code, out) == (0, "runs: runs/digits_done\npage: page.md\n")
    ((name, output, jobs, seeds, _, callbacks),) = calls
    assert (name, output, jobs, seeds) == ("digits_done", Path("runs/digits_done"), 3, 3)
    assert callbacks == (TensorBoard.in_run_dir,)
