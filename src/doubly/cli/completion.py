"""doubly completion: install the completion of a shell."""

import os
from pathlib import Path

from rich.console import Console

from doubly.cli.tables import print_line
from doubly.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
HELP = """\
usage: doubly completion install [bash|zsh|fish] [--print]

Write the completion of a shell to the place where that shell looks for it: verbs, recipes, methods, datasets and the
flags of each verb. Without a name it is the shell of $SHELL. No start-up file is changed; the output says what to do.
--print: print the script, write nothing. Install again after an update of doubly, which may have new words."""


def completion(arguments: list[str], out: Console, err: Console) -> int:
    """Write or print the completion script of a shell."""
    if not arguments or arguments in (["-h"], ["--help"]):
        print_line(out, HELP)
        return 0 if arguments else 2
    words = [word for word in arguments if word not in ("install", "--print")]
    if len(words) > 1 or (words and words[0] not in SHELLS):
        raise UsageError(f"there is no completion for '{' '.join(words)}': valid are {', '.join(SHELLS)}")
    shell = words[0] if words else _current_shell()
    from doubly.cli import VERBS
    from doubly.cli.completion_scripts import SCRIPTS, collect_words

    script = SCRIPTS[shell](collect_words(VERBS))
    if "--print" in arguments:
        out.out(script, end="", highlight=False)
        return 0
    path = script_path(shell)
    _write(path, script)
    print_line(out, f"wrote {path}\n{_activation(shell, path)}")
    return 0


def script_path(shell: str) -> Path:
    """Return where a shell looks for the completion script of a user."""
    home = Path.home()
    if shell == "bash":
        return Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share") / "bash-completion/completions/doubly"
    if shell == "fish":
        return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish/completions/doubly.fish"
    return home / ".zfunc" / "_doubly"


def _current_shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise UsageError(
            f"$SHELL is '{name}', for which there is no completion: name a shell, as in doubly completion install bash"
        )
    return name


def _write(path: Path, script: str) -> None:
    from doubly.cli.completion_scripts import HEADER

    if path.exists() and HEADER not in path.read_text(encoding="utf-8", errors="replace"):
        raise UsageError(f"{path} exists and is not of doubly: move it, or take the output of --print")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")


def _activation(shell: str, path: Path) -> str:
    """Return what to do so that the script is used."""
    if shell == "bash":
        return (
            f"new shells use it if they have the package bash-completion; else, and in this shell: source {path} "
            "(as a line of ~/.bashrc for all shells)"
        )
    if shell == "fish":
        return "new shells use it; nothing else is to do"
    return f"new shells use it if ~/.zshrc has: fpath=({path.parent} $fpath); autoload -Uz compinit; compinit"
