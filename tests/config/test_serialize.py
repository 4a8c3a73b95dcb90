"""Runs as JSON: they survive, and what is wrong in a file is one sentence with its place."""

import json
import math
import sys
from dataclasses import fields, replace

import pytest

from doubly.config import Adam, Run
from doubly.config.serialize import (
    KINDS,
    first_difference,
    from_json,
    suggestion,
    to_json,
    with_change,
    with_changes,
)
from doubly.config.user_code import UntrustedModel
from doubly.errors import UsageError
from doubly.methods import DONE
from doubly.recipes import RECIPES, recipe
from doubly.schedules import Piecewise
from doubly.text import parse_number
from doubly.threat import LinfBall

NAME = "digits.imbalanced.done_pgd"


def changed(path, value, name=NAME):
    """Return the JSON of a recipe with the part at the dotted path replaced."""
    tree = to_json(recipe(name))
    *parents, last = path.split(".")
    node = tree
    for parent in parents:
        node = node[parent]
    node[last] = value
    return tree


def refusal(value) -> str:
    with pytest.raises(UsageError) as error:
        from_json(value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_recipe_survives_a_file_and_every_node_has_its_kind_and_all_fields():
    def check(node):
        if isinstance(node, dict):
            assert node["kind"] in KINDS
            assert set(node) - {"kind"} == {field.name for field in fields(KINDS[node["kind"]])}
            for value in node.values():
                check(value)

    for name in RECIPES:
        run = recipe(name)
        text = json.dumps(to_json(run), allow_nan=False)
        assert from_json(json.loads(text)) == run, name
        assert json.dumps(to_json(from_json(json.loads(text)))) == text
        check(json.loads(text))


def test_every_kind_can_be_named():
    for kind in KINDS:
        if kind not in ("run", "data"):  # these have fields without a default
            assert isinstance(from_json({"kind": kind}), KINDS[kind])
    assert isinstance(from_json(to_json(recipe(NAME))), Run)


def test_unknown_fields_and_kinds_are_refused_with_place_and_suggestion():
    for path, key, close in [
        ("", "epoch", "epochs"),
        ("method", "temprature", "temperature"),
        ("method.attack", "step", "steps"),
        ("method.attack.threat", "raduis", "radius"),
        ("optimizer.lr", "peek", "peak"),
    ]:
        message = refusal(changed(f"{path}.{key}".lstrip("."), 1))
        assert f"'{key}'" in message and f"did you mean '{close}'" in message
        assert message.startswith(f"config.{path} " if path else "config ")
    assert "valid are clip, lr, momentum, weight_decay" in refusal(changed("optimizer.zzzzzz", 1))
    for path, kind, close in [
        ("method", "method.doen", "method.done"),
        ("model", "model.smallcnn", "model.small_cnn"),
        ("data", "dat", "data"),
    ]:
        message = refusal(changed(path, {"kind": kind}))
        assert f"config.{path}" in message and f"did you mean '{close}'" in message


def test_wrong_values_are_refused_with_their_place():
    for path, value, message in [
        ("epochs", "ten", "config.epochs must be of type int"),
        ("epochs", 2.5, "config.epochs must be of type int"),
        ("epochs", True, "config.epochs must be of type int"),
        ("seed", None, "config.seed must be of type int"),
        ("name", 3, "config.name must be of type str"),
        ("method.eta", True, "config.method.eta must be of type float"),
        ("method.eta", [0.9], "config.method.eta must be of type float"),
        ("method.cap", "five", "not a number"),
        ("method.implicit", "exakt", "did you mean 'exact'"),
        ("method.temperature.values", 10.0, "config.method.temperature.values must be a list"),
        ("method.temperature.values", [10.0, True, 0.1], "config.method.temperature.values[1] must be of type float"),
        ("method", "done", 'config.method must be an object with a "kind"'),
        ("method", {"eta": 0.9}, 'config.method must be an object with a "kind"'),
        ("method", {"kind": "attack.pgd"}, "config.method must be a Method, but attack.pgd is not one"),
        ("model", {"kind": "schedule.constant"}, "config.model must be a Model"),
        ("optimizer", {"kind": "validation"}, "config.optimizer must be a OptimizerConfig"),
        ("method.attack.threat.radius", 8, "epsilon must lie in (0, 1]"),
        ("method.attack.steps", -1, "steps >= 0"),
    ]:
        assert message in refusal(changed(path, value)), path
    for value in (None, 3, "run", [], {}, {"kind": 7}):
        assert 'must be an object with a "kind"' in refusal(value)


def test_numbers_may_be_written_as_text_or_fractions():
    for text, value in [("8/255", 8 / 255), ("1/3", 1 / 3), ("0.03", 0.03), ("1e-6", 1e-6)]:
        assert parse_number(text) == value
        assert from_json(changed("method.attack.threat.radius", text)).method.attack.threat == LinfBall(value)
    for text in ("8/0", "eight", "", "8//255", "__import__('os')"):
        with pytest.raises(UsageError, match="not a number"):
            parse_number(text)


def test_every_digit_of_a_float_survives_whole_numbers_become_floats_and_none_stays():
    run = recipe("digits.done_pgd")
    method = replace(run.method, temperature=Piecewise((1 / 3, math.pi), (2 / 7,)), eta=0.1 + 0.2)
    assert from_json(json.loads(json.dumps(to_json(replace(run, method=method))))).method == method
    cap = from_json(changed("method.cap", 5)).method.cap
    assert type(cap) is float and cap == 5
    assert from_json(changed("method.cap", None)).method.cap is None


def test_a_missing_field_takes_its_default_or_is_named():
    tree = to_json(recipe(NAME))
    del tree["batch_size"]
    assert from_json(tree).batch_size == 128
    del tree["method"]
    assert "config (run) lacks the field 'method'" in refusal(tree)


def test_kinds_are_looked_up_in_tables_and_nothing_is_imported(tmp_path, monkeypatch):
    for kind in ("os.system", "builtins.eval", "subprocess.Popen", "doubly.config.run.Run", "type", "__class__"):
        assert "unknown kind" in refusal({"kind": kind, "command": "touch /tmp/owned"})
    (tmp_path / "trap.py").write_text("open('sprung', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = from_json(changed("model", {"kind": "model.user", "function": "trap:build"}))
    assert run.model == UntrustedModel("trap:build")
    assert not (tmp_path / "sprung").exists() and "trap" not in sys.modules


def test_what_json_cannot_hold_is_refused():
    class Stranger(DONE):
        pass

    with pytest.raises(UsageError, match="Stranger cannot be saved"):
        to_json(Stranger())
    run = recipe("digits.fast_bat")
    with pytest.raises(UsageError, match="JSON has no such number: write a large one"):
        to_json(replace(run, method=replace(run.method, curvature=math.inf)))


def test_the_first_difference_is_named():
    one, other = to_json(recipe(NAME)), changed("method.attack.steps", 7)
    assert first_difference(one, one) is None
    assert first_difference(one, other) == f"method.attack.steps: {one['method']['attack']['steps']} -> 7"
    assert first_difference({"a": 1}, {}) == "a: 1 -> None"


def test_parts_of_a_run_are_replaced_by_dotted_paths():
    run = recipe(NAME)
    result = with_changes(run, {"epochs": 3, "method.attack.steps": 4, "optimizer": "optimizer.adam"})
    assert (result.epochs, result.method.attack.steps, result.optimizer) == (3, 4, Adam())
    assert with_change(run, "epochs", run.epochs) == run
    for path, message in [
        ("epoch", "'epoch': the run has no 'epoch': did you mean 'epochs'?"),
        ("method.attack.stepz", "method.attack has no 'stepz': did you mean 'steps'?"),
        ("epochs.more", "epochs has no 'more'"),
        ("method.kind", "method has no 'kind'"),
    ]:
        with pytest.raises(UsageError) as error:
            with_change(run, path, 1)
        assert message in str(error.value)


def test_suggestions_for_unknown_words():
    assert suggestion("epoch", ["epochs", "seed"]) == ": did you mean 'epochs'?"
    assert suggestion("zzz", ["b", "a"]) == ": valid are a, b"
    assert suggestion("zzz", [str(k) for k in range(61)]) == ": there are 61, and `doubly list` shows them"
    assert suggestion("zzz", []) == ""
