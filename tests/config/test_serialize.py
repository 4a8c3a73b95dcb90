import json
import math
import sys
from dataclasses import replace

import pytest

from doubly.config import Run
from doubly.config.serialize import KINDS, difference, fraction, from_json, to_json
from doubly.config.user_code import OwnModel
from doubly.errors import UsageError
from doubly.methods import DONE
from doubly.recipes import RECIPES, recipe
from doubly.schedules import Piecewise
from doubly.threat import LinfBall


def tree(name="digits.imbalanced.done_pgd"):
    return to_json(recipe(name))


def changed(path, value, name="digits.imbalanced.done_pgd"):
    """The JSON of a recipe with the part at the dotted path replaced."""
    whole = tree(name)
    *parents, last = path.split(".")
    node = whole
    for parent in parents:
        node = node[parent]
    node[last] = value
    return whole


def refusal(value) -> str:
    with pytest.raises(UsageError) as problem:
        from_json(value)
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_a_file(name):
    run = recipe(name)
    text = json.dumps(to_json(run), allow_nan=False)
    assert from_json(json.loads(text)) == run
    assert json.dumps(to_json(from_json(json.loads(text)))) == text


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_named(kind):
    needed = {"run", "data"}  # these have fields without a default
    if kind not in needed:
        assert type(from_json({"kind": kind})) is KINDS[kind]


@pytest.mark.parametrize("name", RECIPES)
def test_every_node_says_its_kind_and_hides_nothing(name):
    def walk(node):
        if isinstance(node, dict):
            assert node["kind"] in KINDS
            assert set(node) - {"kind"} == set(KINDS[node["kind"]].__dataclass_fields__)
            for value in node.values():
                walk(value)

    walk(tree(name))


@pytest.mark.parametrize(
    ("path", "key", "suggestion"),
    [
        ("", "epoch", "epochs"),
        ("method", "temprature", "temperature"),
        ("method.attack", "step", "steps"),
        ("method.attack.threat", "raduis", "radius"),
        ("optimizer.lr", "peek", "peak"),
    ],
)
def test_an_unknown_key_names_the_place_and_the_nearest_valid_one(path, key, suggestion):
    text = refusal(changed(f"{path}.{key}".lstrip("."), 1))
    assert f"'{key}'" in text and f"did you mean '{suggestion}'" in text
    assert text.startswith(f"config.{path} " if path else "config ")


def test_a_key_like_nothing_gets_the_list():
    text = refusal(changed("optimizer.zzzzzz", 1))
    assert "valid are clip, lr, momentum, weight_decay" in text


@pytest.mark.parametrize(
    ("path", "kind", "suggestion"),
    [("method", "method.doen", "method.done"), ("model", "model.smallcnn", "model.small_cnn"), ("data", "dat", "data")],
)
def test_an_unknown_kind_names_the_nearest(path, kind, suggestion):
    text = refusal(changed(path, {"kind": kind}))
    assert f"config.{path}" in text and f"did you mean '{suggestion}'" in text


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
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
        ("method.temperature.values", [10.0, True, 0.1], r"config.method.temperature.values[1] must be of type float"),
        ("method", "done", 'config.method must be an object with a "kind"'),
        ("method", {"eta": 0.9}, 'config.method must be an object with a "kind"'),
        ("method", {"kind": "attack.pgd"}, "config.method must be a Method, but attack.pgd is none"),
        ("model", {"kind": "schedule.constant"}, "config.model must be a Model"),
        ("optimizer", {"kind": "validation"}, "config.optimizer must be a SGD"),
        ("method.attack.threat.radius", 8, "epsilon must lie in (0, 1]"),
        ("method.attack.steps", -1, "steps >= 0"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_its_place(path, value, said):
    assert said in refusal(changed(path, value))


@pytest.mark.parametrize("value", [None, 3, "run", [], {}, {"kind": 7}])
def test_what_is_no_tree_is_refused(value):
    assert 'must be an object with a "kind"' in refusal(value)


@pytest.mark.parametrize(("text", "value"), [("8/255", 8 / 255), ("1/3", 1 / 3), ("0.03", 0.03), ("1e-6", 1e-6)])
def test_numbers_may_be_written_as_text(text, value):
    assert fraction(text) == value
    assert from_json(changed("method.attack.threat.radius", text)).method.attack.threat == LinfBall(value)


@pytest.mark.parametrize("text", ["8/0", "eight", "", "8//255", "__import__('os')"])
def test_text_that_is_no_number_is_refused(text):
    with pytest.raises(UsageError, match="not a number"):
        fraction(text)


def test_whole_numbers_become_floats_and_none_stays():
    run = from_json(changed("method.cap", 5))
    assert type(run.method.cap) is float and run.method.cap == 5
    assert from_json(changed("method.cap", None)).method.cap is None


def test_a_missing_field_takes_its_default_or_is_named():
    short = tree()
    del short["batch"]
    assert from_json(short).batch == 128
    del short["method"]
    assert "config (run) lacks the field 'method'" in refusal(short)


def test_every_digit_of_a_float_survives():
    run = recipe("digits.done_pgd")
    method = replace(run.method, temperature=Piecewise((1 / 3, math.pi), (2 / 7,)), eta=0.1 + 0.2)
    again = from_json(json.loads(json.dumps(to_json(replace(run, method=method)))))
    assert again.method == method


@pytest.mark.parametrize(
    "kind", ["os.system", "builtins.eval", "subprocess.Popen", "doubly.config.run.Run", "type", "__class__"]
)
def test_a_kind_is_looked_up_in_a_table_and_nowhere_else(kind):
    assert "unknown kind" in refusal({"kind": kind, "command": "touch /tmp/owned"})


def test_reading_a_config_imports_nothing_that_it_names(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("open('sprung', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = from_json(changed("model", {"kind": "own_model", "function": "trap:build"}))
    assert run.model == OwnModel("trap:build")
    assert not (tmp_path / "sprung").exists() and "trap" not in sys.modules


def test_a_value_outside_the_tables_says_what_to_do():
    class Stranger(DONE):
        pass

    with pytest.raises(UsageError, match="Stranger cannot be saved"):
        to_json(Stranger())


def test_difference_names_the_first_field():
    one, other = tree(), changed("method.attack.steps", 7)
    assert difference(one, one) is None
    assert difference(one, other) == f"method.attack.steps: {one['method']['attack']['steps']} -> 7"
    assert difference({"a": 1}, {}) == "a: 1 -> None"


def test_the_tree_is_a_run():
    assert isinstance(from_json(tree()), Run)


def test_an_infinite_number_is_refused_with_the_fix():
    run = recipe("digits.fast_bat")
    with pytest.raises(UsageError, match="JSON has no such number: write a large one"):
        to_json(replace(run, method=replace(run.method, curvature=float("inf"))))
