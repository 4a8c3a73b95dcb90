"""doubly completion: what is completed, by a real bash, and where the script is written."""

import shutil
import subprocess

import pytest

from doubly.cli import VERBS

ASK = """\
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _doubly; echo "${COMPREPLY[*]}"; }
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_names_and_flags_without_python(cli, tmp_path):
    (tmp_path / "script").write_text(cli("completion", "install", "bash", "--print").out)
    cases = [
        ("doubly tr", "train"),
        ("doubly train digits.", "digits.at"),
        ("doubly search cifar10.small.done_p", "cifar10.small.done_pgd"),
        ("doubly train --data x --method cfo", "cfol"),
        ("doubly train --data gts", "gtsrb"),
        ("doubly train digits.done_pgd --method.ca", "--method.cap"),
        ("doubly train digits.at --help-", "--help-all"),
        ("doubly search digits.at --tri", "--trials"),
        ("doubly evaluate runs/x --me", "--mean"),
        ("doubly evaluate runs/x --norm l", "l2"),
        ("doubly evaluate runs/x --attacks str", "strong"),
        ("doubly reproduce weak", "weak_classes"),
        ("doubly data fe", "fetch"),
        ("doubly data fetch cifar1", "cifar10"),
        ("doubly list reci", "recipes"),
        ("doubly completion install z", "zsh"),
    ]
    script = "".join(["source ./script\n", ASK, *(f"ask {words}\n" for words, _ in cases)])
    done = subprocess.run(
        [shutil.which("bash"), "--norc", "-c", script],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    for (words, expected), line in zip(cases, done.stdout.splitlines(), strict=True):
        offered, last = line.split(), words.split()[-1]
        assert expected in offered and all(word.startswith(last) for word in offered), (words, line)
    assert done.stderr == ""


def test_each_shell_has_a_script_with_every_verb_at_its_place(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for shell, file, activation in [
        ("bash", ".local/share/bash-completion/completions/doubly", "source "),
        ("zsh", ".zfunc/_doubly", "fpath=("),
        ("fish", ".config/fish/completions/doubly.fish", "new shells use it"),
    ]:
        monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
        for _ in range(2):  # an update replaces it
            code, out, err = cli("completion", "install")
            assert (code, err) == (0, "") and f"wrote {tmp_path / file}" in out and activation in out, shell
        text = (tmp_path / file).read_text()
        assert text == cli("completion", "install", shell, "--print").out, shell
        assert all(word in text for word in (*VERBS, "digits.at", "cfol", "gtsrb", "method.cap", "trials")), shell
    assert sorted(path.name for path in tmp_path.iterdir()) == [".config", ".local", ".zfunc"]  # no start-up file
    (tmp_path / ".zfunc" / "_doubly").write_text("mine")
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    for words, message in [
        ("install zsh", "exists and is not of doubly: move it, or take the output of --print"),
        ("install", "$SHELL is 'tcsh', for which there is no completion: name a shell"),
        ("install tcsh", "there is no completion for 'tcsh': valid are bash, zsh, fish"),
    ]:
        code, out, err = cli("completion", *words.split())
        assert (code, out) == (2, "") and message in err, words
    assert cli("completion").code == 2 and "usage: doubly completion" in cli("completion", "--help").out
