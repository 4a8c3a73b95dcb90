"""doubly evaluate --autoattack: whole, divided among processes, stopped, and with a damaged state."""

import io
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from doubly.rundir import read_json
from doubly.text import TRUST_QUESTION, trust_answer
from evaluation_inputs import (
    AUTOATTACK,
    SEVERAL,
    command,
    contents,
    evaluation,
    is_one_sentence,
    results,
    state_folder,
)


def test_autoattack_is_complete_and_checked(complete):
    path, out, err = complete
    about = evaluation(path)
    assert about["n"] == about["autoattack"]["n"] == 12 and about["autoattack"]["label"] == "RA-AA"
    assert about["autoattack"]["parts"] == ["apgd-ce", "apgd-t", "fab-t", "square"] and about["autoattack"]["complete"]
    assert 0 < about["ra_aa"] <= min(about["ra_pgd"], about["ra_margin"]) < about["sa"]
    assert 0 <= about["ra_aa_tail_30"] <= about["ra_aa"] and len(about["ra_aa_tail_30_classes"]) == 1
    assert (
        about["worst_class_ra_aa"].keys() - {"tied"} == {"name", "ra_aa"}
        and "ra_aa_interval" in about["per_class"]["3"]
    )
    low, high = about["intervals"]["ra_aa"]
    assert low < about["ra_aa"] < high
    checks = about["trust"]
    assert checks["measured"] == checks["of"] == len(checks["lines"]) == 11
    assert f"{TRUST_QUESTION} {trust_answer(checks['verdict'])}" in out and "RA-AA" in out
    assert "3 targets instead of 9, since there are 4 classes" in out
    assert err.count("\n") == 4 * 4 and err.startswith("chunk 1 of 4, apgd-ce: ")


def test_quick_has_another_label_and_a_part_of_the_images_their_number(run, output, tmp_path):
    code, out, _ = run(*command("linear", *SEVERAL, "--quick", output=output))
    text = (output / "evaluation.json").read_text()
    assert code == 0 and "RA-APGD" in out and '"ra_apgd"' in text
    assert "RA-AA" not in out + text and "ra_aa" not in text
    words = [*SEVERAL, "--autoattack", "--autoattack-images", 8]
    code, out, _ = run(*command("linear", *words, output=tmp_path / "part"))
    about = evaluation(tmp_path / "part")
    assert code == 0 and "RA-AA: " in out and "n = 8" in out
    assert (about["n"], about["autoattack"]["n"], about["per_class"]["0"]["n_ra_aa"]) == (12, 8, 2)


def without_chunks(folder, *chunks):
    """Remove chunks as if they had not been begun; Square, which takes seconds, runs only where it is looked at."""
    (folder / "evaluation.json").unlink()
    for index in chunks:
        (state_folder(folder) / f"chunk-0000{index}.json").unlink()
    return command("linear", *AUTOATTACK, output=folder)


def test_shards_combined_are_the_whole(run, complete, copy):
    words = without_chunks(copy, 0, 1, 2)
    for shard, chunks, done in ((0, "3 of 4", {"chunk 1", "chunk 3"}), (1, "4 of 4", {"chunk 2"})):
        code, out, err = run(*words, "--shard", shard, 2)
        assert code == 0 and f"{chunks} chunks are finished; a call without --shard combines them" in out
        assert {line.partition(" of")[0] for line in err.splitlines()} == done
        assert not (copy / "evaluation.json").exists()
    code, _, err = run(*words)
    assert (code, err) == (0, "")
    assert results(copy) == results(complete[0])


@pytest.mark.slow  # tests/evaluation/test_autoattack_driver.py combines shards
def test_jobs_give_what_one_process_gives(run, complete, copy):
    code, _, err = run(*without_chunks(copy, 0, 1), "--jobs", 2)
    assert code == 0 and sorted(line[:12] for line in err.splitlines()) == ["chunk 1 of 4"] * 4 + ["chunk 2 of 4"] * 4
    assert results(copy) == results(complete[0])


class InterruptedProcess:
    """Stands for a process that is interrupted while it is waited for."""

    terminated = 0

    def __init__(self, *words, **settings):
        self.stderr = io.StringIO()

    def wait(self):
        if not InterruptedProcess.terminated:
            raise KeyboardInterrupt

    def terminate(self):
        InterruptedProcess.terminated += 1


def test_jobs_that_are_interrupted_are_ended_and_those_that_fail_report_once(run, output, monkeypatch):
    code, _, err = run(*command("softmax", "--quick", "--jobs", 2, weights=None, output=output))
    assert code == 2 and "returns probabilities" in err and is_one_sentence(err)
    monkeypatch.setattr(subprocess, "Popen", InterruptedProcess)
    code, _, err = run(*command("linear", *AUTOATTACK, "--jobs", 2, output=output))
    assert (code, InterruptedProcess.terminated) == (130, 2)
    assert "the same command continues" in err and is_one_sentence(err)


def stop(processes, wait_until, number):
    """Start an evaluation, and send a signal when the first attack on the first chunk has ended."""
    output = processes.folder / number.name
    child = processes.start(*command("linear", *AUTOATTACK, output=output))
    state = output / "autoattack"
    wait_until(lambda: any(state.glob("*/chunk-*.json")) or not child.is_running(), "the first attack")
    child.send(number)
    return child, output


@pytest.mark.slow  # tests/evaluation/test_autoattack_driver.py kills it in the middle
def test_an_evaluation_that_was_killed_is_resumed_and_gives_the_same(run, processes, wait_until, complete):
    child, output = stop(processes, wait_until, signal.SIGKILL)
    assert child.code == -signal.SIGKILL and "ra_aa" not in evaluation(output)
    code, _, err = run(*command("linear", *AUTOATTACK, output=output))
    assert code == 0 and 0 < err.count("\n") < 4 * 4
    assert results(output) == results(complete[0])


def test_an_interrupted_evaluation_keeps_its_state_and_says_how_to_continue(processes, wait_until):
    child, output = stop(processes, wait_until, signal.SIGINT)
    assert (child.code, child.out) == (130, "") and "Traceback" not in child.err
    lines = [line for line in child.err.splitlines() if line.startswith("doubly: ")]
    assert len(lines) == 1 and "the same command continues" in lines[0]
    assert all(read_json(file)["attacks"] for file in state_folder(output).glob("chunk-*.json"))
    assert "ra_aa" not in evaluation(output)  # only what came before AutoAttack


def children(pid):
    return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_sigterm_ends_all_processes(processes, wait_until):
    child = processes.start(*command("linear", *AUTOATTACK, "--jobs", 2, output="terminated"))
    wait_until(lambda: not child.is_running() or len(children(child.pid)) == 2, "the start of two workers")
    workers = children(child.pid)
    assert child.send(signal.SIGTERM) == 143 and "the same command continues" in child.err
    wait_until(lambda: not any(map(is_running, workers)), "the end of the workers")
    assert len(workers) == 2


def test_the_state_of_another_network_is_refused_and_that_of_this_one_is_used(run, complete, output):
    before, state = contents(complete[0]), state_folder(complete[0])
    code, out, err = run(*command("linear", *AUTOATTACK, "--state", state, weights="other.pt", output=output))
    assert (code, out) == (2, "") and is_one_sentence(err)
    assert "key.json belongs to another evaluation: its model is " in err
    assert "choose another folder, or delete that one to start again" in err
    assert contents(complete[0]) == before and not output.exists()
    code, _, err = run(*command("linear", *AUTOATTACK, "--state", state, output=output))
    assert (code, err) == (0, "")  # nothing was left to attack
    assert results(output) == results(complete[0]) and not (output / "autoattack").exists()


def test_a_damaged_state_is_refused_and_the_rest_of_it_stays(run, complete, copy):
    damaged = state_folder(copy) / "chunk-00001.json"
    content, key = damaged.read_bytes(), state_folder(copy) / "key.json"
    for file, text in [
        (damaged, content[:-30]),
        (damaged, b'{"schema": 1, "chunk": 2}'),
        (damaged, b'{"schema": 1, "chunk": 1}'),
        (key, b'{"model": "ab'),
        (key, b"[]"),
    ]:
        original = file.read_bytes()
        file.write_bytes(text)
        before = contents(copy)
        code, out, err = run(*command("linear", *AUTOATTACK, output=copy))
        assert (code, out) == (2, "") and file.name in err and "delete" in err and is_one_sentence(err)
        assert contents(copy) == before
        file.write_bytes(original)
    damaged.unlink()
    code, _, err = run(*command("linear", *AUTOATTACK, output=copy))
    assert code == 0 and {line.partition(",")[0] for line in err.splitlines()} == {"chunk 2 of 4"}
    assert results(copy) == results(complete[0])


def test_images_that_autoattack_broke_are_saved_if_its_state_has_them(run, copy, output):
    code, out, err = run(*command("linear", *AUTOATTACK, "--save-examples", "npz", output=copy))
    assert code == 0 and "images that AutoAttack broke before --save-examples was given were not kept" in out + err
    assert not (copy / "examples" / "autoattack").exists()
    shutil.rmtree(output)
    words = command("linear", *SEVERAL, "--quick", "--save-examples", "npz", output=output)
    assert run(*words)[0] == 0
    file = min(state_folder(output).glob("images-*.npz"))
    file.write_bytes(file.read_bytes()[:100])
    code, _, err = run(*words)
    assert code == 2 and file.name in err and is_one_sentence(err)
