"""doubly reproduce: a plan run here, shown, or handed to a scheduler."""

import shlex
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from doubly.cli import _train_options, main
from doubly.cli.evaluate import _options as evaluate_options
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


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PLANS, "tiny", PLAN)
    monkeypatch.setitem(SCALES, "small", Scale("", CONFIG, TINY))
    monkeypatch.setattr("doubly.jobs.cost.MAX_SECONDS", 0.01)
    monkeypatch.setattr("doubly.cli.OUT", Console(width=200))
    monkeypatch.setattr("doubly.cli.ERR", Console(width=200, stderr=True))


@pytest.fixture
def call(capfd):
    def run(*words):
        code = main(["reproduce", *map(str, words)])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr("doubly.report.Report.write", lambda report, output: output / "report.html")


NAMES = ["digits.at-s0", "digits.done_pgd-s0", "digits.imbalanced.at-s0"]


def test_a_plan_in_two_processes_then_nothing_is_left(call, monkeypatch, request):
    code, out, err = call("tiny", "--seeds", 1, "--jobs", 2, "--no-autoattack", "--output", "here")
    assert code == 0, err
    for name in NAMES:
        found = read_json(RunDir(Path("here") / name).evaluation)
        assert found["n"] == 20 and found["trust"] and "ra_aa" not in found
    assert (
        out.endswith("runs: here\npage: here/report-tiny/report.html\n") and Path("here/report-tiny/table.md").exists()
    )
    assert "DONE-PGD" in out and "digits.imbalanced" in out and "RA-Tail-30" in out
    monkeypatch.setattr("doubly.jobs.pool.ProcessPoolExecutor", None)
    request.getfixturevalue("no_pictures")
    code, out, _ = call("tiny", "--seeds", 1, "--no-autoattack", "--output", "here")
    assert code == 0 and out.startswith("3 of 3 runs are done already") and "DONE-PGD" in out
    shown = call("tiny", "--seeds", 1, "--output", "here", "--no-autoattack", "--dry-run")[1]
    assert shown.count(" done ") == 3 and shown.endswith("all 3 runs are done\n")
    assert call("tiny", "--seeds", 1, "--output", "here", "--dry-run")[1].count("trained, to evaluate") == 3
    said = call("tiny", "--seeds", 1, "--output", "here", "--commands", "--no-autoattack")[1]
    assert said.startswith("# then: doubly report /") and said.count("\n") == 1


def test_what_fails_is_said_and_the_rest_is_reported(call, inline, no_pictures):
    Path("here/digits.done_pgd-s0").mkdir(parents=True)
    Path("here/digits.done_pgd-s0/letter.txt").write_text("somebody's file")
    code, out, err = call("tiny", "--seeds", 1, "--no-autoattack", "--output", "here", "--methods", "at", "done_pgd")
    assert code == 2
    assert err == (
        "doubly: here/digits.done_pgd-s0 failed: UsageError: here/digits.done_pgd-s0 is not empty (letter.txt): "
        "choose another --output\n"
    )
    assert "page: here/report-tiny/report.html" in out and "DONE-PGD" not in out


def test_a_dry_run_shows_runs_states_and_times(call):
    code, out, err = call("tiny", "--seeds", 2, "--jobs", 1, "--dry-run")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(" digits")}
    assert code == 0 and list(rows) == [*NAMES, *(name.replace("s0", "s1") for name in NAMES)]
    assert rows["digits.at-s0"][1:6] == ["to", "do", "2", "+", "2"]
    assert rows["digits.done_pgd-s0"][3:6] == ["3", "+", "3"]
    assert "6 of 6 runs to do: about " in out and " with 1 jobs" in out
    assert err.startswith("from ") and " s for a pass of 512 images of 8 x 8 pixels here, " in err
    assert err.count("\n") == 1 and not Path("runs").exists()


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_commands_are_taken_by_the_verbs_and_mean_the_plan(scale, monkeypatch, tmp_path):
    monkeypatch.undo()
    folder = tmp_path / "with space; and 'quote'"
    for name in ("table4", "cifar10"):
        for job in plan_jobs(PLANS[name], SCALES[scale], 2, folder, root="/da ta")[-1:]:
            train, evaluate = both(job_commands(job, SCALES[scale].changes).line)
            options, output = _train_options(train)
            assert options.run == job.run and output == job.output and options.resume
            options, _ = evaluate_options(evaluate)
            assert options.directory == job.output and options.config == job.evaluate and options.data_root == "/da ta"
            assert options.autoattack == ("autoattack" in job.attacks) and options.attacks == ("pgd", "margin")


def both(line):
    """The words of `doubly train …` and of `doubly evaluate …`."""
    words = shlex.split(line)
    middle = words.index("&&")
    assert words[:2] == ["doubly", "train"] and words[middle + 1 : middle + 3] == ["doubly", "evaluate"]
    return words[2:middle], words[middle + 3 :]


def test_the_commands_do_what_the_plan_would(call, capfd):
    """On a folder that does not exist, and again when all is done."""
    out = call("tiny", "--seeds", 1, "--methods", "at", "--commands", "--output", "here")[1]
    lines = out.splitlines()
    assert len(lines) == 3 and lines[-1].startswith("# then: doubly report ")
    for _ in range(2):
        assert [main(["train", *both(lines[0])[0]]), main(["evaluate", *both(lines[0])[1]])] == [0, 0]
    assert main(["train", *both(lines[1])[0]]) == 0
    capfd.readouterr()
    left = call("tiny", "--seeds", 1, "--methods", "at", "--commands", "--output", "here")[1]
    assert left.splitlines() == lines[1:]  # what is trained is resumed, which takes no time, and measured


def test_a_slurm_script_is_written_for_what_is_not_done(call):
    code, out, _ = call("tiny", "--seeds", 1, "--jobs", 2, "--output", "he re", "--slurm", "array.sh")
    assert code == 0 and "wrote array.sh, 3 runs: submit it with `sbatch array.sh`" in out
    text = Path("array.sh").read_text()
    assert "#SBATCH --array=0-2%2\n" in text and "#SBATCH --time=0-01:00:00\n" in text
    assert subprocess.run(["bash", "-n", "array.sh"]).returncode == 0


def test_missing_data_are_said_at_once_with_the_remedy_for_each_dataset(call, monkeypatch):
    monkeypatch.setitem(SCALES, "small", Scale("small.", CONFIG))
    code, out, err = call("figure3", "--seeds", 1, "--data-root", "empty")
    assert code == 2 and not out and not Path("runs").exists() and err.count("\n") == 1
    for name in ("svhn", "gtsrb", "cifar10", "stl10"):
        assert f"fetch it with `doubly data fetch {name} --data-root" in err
    code, out, err = call("figure2", "--seeds", 1, "--data-root", "empty", "--dry-run")  # estimated without them
    assert code == 0 and "1 of 1 runs to do" in out and "as if the published files were here" in err


def test_bad_input_is_refused_in_one_sentence(call):
    Path("file").write_text("")
    for words, sentence in [
        (["tabel1"], "there is no study 'tabel1': did you mean 'table1'?"),
        (["tiny", "--scale", "papr"], "there is no scale 'papr': did you mean 'paper'?"),
        (["tiny", "--methods", "mail"], "the plan has no method 'mail'"),
        (["tiny", "--seeds", "0"], "jobs and seeds are at least 1, got 2 and 0"),
        (["tiny", "--jobs", "0"], "jobs and seeds are at least 1, got 0 and 3"),
        (["tiny", "--images", "0"], "images must be at least 1, got 0"),
        (["demo", "--methods", "at"], "--methods is for tables and figures: demo has its own"),
        (["demo", "--scale", "small"], "--scale is for tables and figures"),
        (["tiny", "--output", "file"], "file cannot hold the results"),
    ]:
        code, out, err = call(*words)
        assert code == 2 and not out and err.startswith(f"doubly: {sentence}") and err.count("\n") == 1, words


def test_a_study_on_digits_lists_its_runs(call):
    code, out, _ = call("demo", "--output", "there", "--dry-run")
    assert code == 0 and len(set(out.splitlines())) == out.count("\n") == 4 * 3 and out.startswith("there/")
