"""train -> stop -> resume -> evaluate -> report -> export, and every other thing that the command line promises."""

import json
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from doubly import __version__
from doubly.checkpoints.load import load_model, load_run
from doubly.cli import VERBS
from doubly.config.serialize import to_json
from doubly.recipes import RECIPES
from doubly.rundir import read_json

EPOCHS = ["--epochs", 12, "--save-seconds", 0.1]


@pytest.fixture(scope="module")
def whole(shared):
    """A run that nobody disturbed."""
    done = shared.train("whole", *EPOCHS)
    return shared, done


# --- stop and resume -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "again"),
    [
        (signal.SIGTERM, 143, lambda doubly: ["train"]),  # the run directory knows what it is
        (signal.SIGINT, 130, lambda doubly: ["train", doubly.recipe, *doubly.small, *EPOCHS]),
    ],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_run_that_was_asked_to_stop_is_resumed_to_the_same_bits(whole, number, code, again):
    doubly, _ = whole
    output = number.name
    process = doubly.start("train", doubly.recipe, *doubly.small, *EPOCHS, "--output", output)
    doubly.reached(process, output, 4, 0)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "stopped at epoch" in out and "add --resume" in out and err == ""
    assert (doubly.folder / output / "metrics.jsonl").read_text().count("\n") < 12
    done = doubly.run(*again(doubly), "--output", output, "--resume")
    assert done.returncode == 0, done.stderr
    assert "continuing at epoch" in done.stdout
    assert doubly.tensors(output) == doubly.tensors("whole")
    assert doubly.rows(output) == doubly.rows("whole")


def test_train_says_what_it_does_in_plain_lines(whole):
    _, done = whole
    lines = done.stdout.splitlines()
    assert lines[0] == "digits.imbalanced.done_pgd, seed 0, 12 epochs -> whole"
    assert lines[1] == "not compiled: the run is too short"
    assert lines[2].startswith("epoch 10: loss") and "RA-Tail-30" in lines[2]
    assert lines[-1] == "trained; now: doubly evaluate whole"
    assert done.stderr == "" and "\x1b" not in done.stdout


# --- evaluate, report, export ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(whole):
    doubly, _ = whole
    done = doubly.run("evaluate", "whole")
    assert done.returncode == 0, done.stderr
    return doubly, done


def fractions(value):
    """Every accuracy below here."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("sa", "ra_pgd", "ra_tail_30", "ra_margin", "ra_margin_tail_30"):
                yield from item if isinstance(item, list) else [item]
            else:
                yield from fractions(item)


def test_evaluation_json_has_the_promised_fields_as_fractions(evaluated):
    doubly, done = evaluated
    found = read_json(doubly.folder / "whole" / "evaluation.json")
    promised = {"sa", "ra_pgd", "ra_tail_30", "ra_tail_30_classes", "worst_class", "per_class", "confusion", "n"}
    margin = {"ra_margin", "ra_margin_tail_30", "ra_margin_tail_30_classes", "worst_class_ra_margin"}
    further = {"ra_worst_case", "tail", "intervals", "weights", "examples", "trust", "protocol", "schema", "epoch"}
    further |= {"test_images", "command"}
    assert set(found) == promised | margin | further and found["schema"] == 2
    shown = promised | margin | {"intervals"}
    values = list(fractions({key: value for key, value in found.items() if key in shown}))
    assert len(values) > 40 and all(0 <= value <= 1 for value in values)
    assert set(found["worst_class"]) == {"name", "ra_pgd"} and len(found["ra_tail_30_classes"]) == 3
    names = [str(k) for k in range(10)]
    assert list(found["per_class"]) == names
    assert all(set(row) >= {"n", "sa", "ra_pgd", "ra_pgd_interval"} for row in found["per_class"].values())
    assert sum(row["n"] for row in found["per_class"].values()) == found["n"] == 360
    assert set(found["confusion"]) == {"clean", "pgd", "margin"} and sum(map(sum, found["confusion"]["pgd"])) == 360
    assert found["trust"]["verdict"] in ("fine", "suspicious") and len(found["trust"]["lines"]) == 11
    assert found["protocol"]["attack"]["threat"]["radius"] == 0.15 and found["protocol"]["split"] == "test"
    assert found["protocol"].keys() >= {"attack", "seed", "chunk", "checkpoint", "data_sha256"}
    assert f"{100 * found['ra_pgd']:.1f} (" in done.stdout and "RA-Tail-30" in done.stdout


def test_the_run_directory_holds_what_is_promised(evaluated):
    doubly, _ = evaluated
    path = doubly.folder / "whole"
    files = ["config.json", "environment.json", "evaluation.json", "evaluation.npz", "gallery.npz", "metrics.jsonl"]
    assert sorted(p.name for p in path.iterdir() if p.name != ".lock") == ["checkpoints", *files]
    environment = read_json(path / "environment.json")
    assert environment["doubly"] == __version__ and environment["threads"] == 1
    assert environment["packages"]["torch"] == torch.__version__ and "train digits" in environment["command"]
    assert json.loads((path / "config.json").read_text()) == to_json(load_run(path))


def test_report_writes_a_page(evaluated):
    doubly, _ = evaluated
    before = doubly.tensors("whole")
    done = doubly.run("report", "whole", "--output", "page")
    assert done.returncode == 0, done.stderr
    assert "wrote page/report.html" in done.stdout
    assert "done" in (doubly.folder / "page" / "report.html").read_text().lower()
    assert doubly.tensors("whole") == before


def test_export_gives_other_tools_the_weights(evaluated, here):
    doubly, _ = evaluated
    code, out, err = here("export", doubly.folder / "whole", "--output", "plain/net.safetensors")
    assert (code, err) == (0, "") and "wrote plain/net.safetensors" in out
    tensors = safetensors.torch.load_file("plain/net.safetensors")
    expected = load_model(doubly.folder / "whole").state_dict()
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_an_export_is_never_a_pickle(evaluated, here):
    doubly, _ = evaluated
    code, _, err = here("export", doubly.folder / "whole", "--output", "net.pt")
    assert code == 2 and ".safetensors" in err


# --- resume: what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", 13], "epochs: 12 -> 13"),
        (["--seed", 1], "seed: 0 -> 1"),
        (["--method.attack.threat.radius", "8/255"], "method.attack.threat.radius: 0.15 -> 0.03137"),
        (["--set", "method.attack.rule=step.adam"], "method.attack.rule.kind: 'step.sign' -> 'step.adam'"),
    ],
)
def test_a_changed_field_is_refused_by_name(whole, here, words, said):
    doubly, _ = whole
    before = doubly.tensors("whole"), doubly.rows("whole")
    code, _, err = here("train", "--output", doubly.folder / "whole", "--resume", *words)
    assert code == 2 and "begun with another configuration" in err and said in err
    assert before == (doubly.tensors("whole"), doubly.rows("whole"))


def test_what_changes_no_bit_may_change(whole, here):
    doubly, _ = whole
    words = ["--output", doubly.folder / "whole", "--resume", "--save-seconds", 5, "--device", "auto"]
    assert here("train", *words)[0] == 0


# --- choosing a run --------------------------------------------------------------------------------------------------


def quick(output, *words):
    """One epoch of the small run."""
    from_recipe = ["digits.at", "--model.width", "2", "--method.attack.steps", "1", "--validation.attack.steps", "1"]
    return ["train", *from_recipe, "--epochs", 1, "--threads", 1, "--output", output, *words]


def config_of(output):
    return Path(output) / "config.json"


def test_every_field_has_a_dotted_flag(here):
    words = ["--seed", 3, "--batch", 256, "--method.attack.threat.radius", "8/255", "--optimizer.lr.peak", 0.05]
    words += ["--data.source.fold", 2, "--ema-decay", 0.9, "--optimizer.clip", 2, "--validation.choose", "ra_pgd"]
    code, _, err = here(*quick("a", *words))
    assert (code, err) == (0, "")
    config = read_json(config_of("a"))
    assert (config["seed"], config["batch"], config["average"], config["epochs"]) == (3, 256, 0.9, 1)
    assert config["method"]["attack"]["threat"]["radius"] == 8 / 255 and config["optimizer"]["lr"]["peak"] == 0.05
    assert config["data"]["source"]["fold"] == 2 and config["optimizer"]["clip"] == 2.0
    assert config["validation"]["choose"] == "ra_pgd"


def test_whole_parts_are_replaced_with_set(here):
    words = ["--set", "optimizer.lr=schedule.constant", '--set=data.imbalance={"kind": "imbalance.step"}']
    code, _, err = here(*quick("a", *words, "--optimizer.lr.value", 0.02))
    assert (code, err) == (0, "")
    config = read_json(config_of("a"))
    assert config["optimizer"]["lr"] == {"kind": "schedule.constant", "value": 0.02}
    assert config["data"]["imbalance"]["kind"] == "imbalance.step"


def test_a_divergence_is_chosen_by_name(here):
    words = ["train", "digits.done_pgd", "--model.width", 2, "--method.attack.steps", 1, "--validation.attack.steps", 1]
    words += ["--epochs", 2, "--threads", 1, "--output", "a", "--method.divergence"]
    code, _, err = here(*words, "cvar", "--method.cap", 2)
    assert (code, err) == (0, "")
    method = read_json(config_of("a"))["method"]
    assert (method["divergence"], method["cap"]) == ("cvar", 2.0)
    saved = safetensors.torch.load_file("a/checkpoints/last/state.safetensors")
    assert any(name.endswith("threshold") for name in saved)
    code, _, err = here(*words, "mean_variance", "--method.cap", 2)
    assert code == 2 and "divergence mean_variance has no cap: use chi2, or leave the cap out" in err
    code, _, err = here(*words, "hellinger")
    assert code == 2 and all(name in err for name in ("hellinger", "kl", "chi2", "mean_variance", "cvar"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("method.atack=attack.pgd", "did you mean 'attack'"),
        ("method.attack.rule=step.adm", "did you mean 'step.adam'"),
        ("method.attack.rule", "PATH=KIND or PATH=JSON"),
        ("method=attack.pgd", "must be a Method"),
    ],
)
def test_a_wrong_set_says_what_is_meant(here, change, said):
    code, _, err = here(*quick("a", "--set", change))
    assert code == 2 and said in err


def test_a_saved_config_is_a_recipe(here):
    assert here(*quick("a", "--seed", 4))[0] == 0
    code, _, err = here("train", "--config", "a/config.json", "--output", "b", "--threads", 1)
    assert (code, err) == (0, "")
    assert read_json(config_of("a")) == read_json(config_of("b"))
    tensors = [safetensors.torch.load_file(f"{run}/checkpoints/last/model.safetensors") for run in "ab"]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    config = read_json(config_of("a"))
    config["epoch"] = config.pop("epochs")
    config_of("c").parent.mkdir()
    config_of("c").write_text(json.dumps(config))
    code, _, err = here("train", "--config", "c/config.json", "--output", "d")
    assert code == 2 and "has no field 'epoch': did you mean 'epochs'?" in err


def test_the_directory_has_a_name_if_none_is_given(here, tmp_path):
    words = [word for word in quick("x") if word not in ("--output", "x")]
    assert here(*words)[0] == 0
    assert (tmp_path / "runs" / "digits.at-s0" / "config.json").exists()


# --- somebody's own network ------------------------------------------------------------------------------------------

NETWORK = """
from torch import nn

def build(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))
"""


def test_somebodys_own_network_is_fine_tuned_from_its_weights(here, tmp_path):
    package = f"nets_{abs(hash(tmp_path))}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "mine.py").write_text(NETWORK)
    given = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    torch.save(given.state_dict(), "given.pt")
    words = ["train", "digits.at", "--method.attack.steps", 1, "--epochs", 1, "--threads", 1]
    words += ["--model", f"{package}.mine:build", "--weights", "given.pt"]
    assert here(*words, "--output", "still", "--optimizer.lr.peak", 0)[0] == 0
    assert here(*words, "--output", "tuned")[0] == 0
    still, tuned = (
        safetensors.torch.load_file(f"{run}/checkpoints/last/model.safetensors") for run in ("still", "tuned")
    )
    for name, value in given.state_dict().items():
        assert torch.equal(still[name], value) and not torch.equal(tuned[name], value)
    (tmp_path / "given.pt").unlink()
    code, _, err = here("evaluate", "tuned")
    assert (code, err) == (0, "") and read_json(tmp_path / "tuned" / "evaluation.json")["n"] == 360


# --- help and lists --------------------------------------------------------------------------------------------------


def test_the_version_comes_from_another_process_at_once(doubly):
    done = doubly.run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"doubly {__version__}\n", "")


def test_help_names_every_verb(here):
    code, out, err = here("--help")
    assert (code, err) == (0, "") and all(verb in out for verb in VERBS)
    assert here()[0] == 2


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_verb_has_help(here, verb, flag):
    code, out, err = here(verb, flag)
    assert (code, err) == (0, "") and f"doubly {verb}" in out


def test_the_help_of_a_recipe_has_a_line_per_field(here):
    code, out, _ = here("train", "digits.done_gd", "--help")
    assert code == 0
    for flag in (
        "--epochs",
        "--method.cap",
        "--method.attack.threat.barrier",
        "--optimizer.lr.peak",
        "--validation.every",
    ):
        assert flag in out
    assert "no weight exceeds it" in " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("what", "some"),
    [
        ("methods", ["done", "at", "standard"]),
        ("attacks", ["pgd", "fgsm"]),
        ("models", ["small_cnn", "resnet18"]),
        ("datasets", ["digits"]),
        ("recipes", list(RECIPES)),
    ],
)
def test_lists(here, what, some):
    code, out, err = here("list", what)
    names = [line.split()[0] for line in out.splitlines()]
    assert (code, err) == (0, "") and set(some) <= set(names) and len(names) == len(set(names))
    assert all(len(line.split()) > 2 for line in out.splitlines())  # each with a word about it


def test_doctor(here):
    code, out, err = here("doctor")
    assert (code, err) == (0, "") and __version__ in out and out.count("ok:") == 5
