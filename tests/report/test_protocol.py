import pytest

from doubly.report.protocol import attack_name, brief, describe, flatten, fraction

NESTED = {
    "attack": {"kind": "attack.pgd", "threat": {"kind": "threat.linf", "radius": 8 / 255}, "steps": 20},
    "seed": 0,
}


@pytest.mark.parametrize(
    ("protocol", "name"),
    [
        (NESTED, "PGD-20"),
        ({"attack": "PGD", "steps": 10}, "PGD-10"),
        ({"attack": {"kind": "attack.fgsm"}}, "FGSM"),
        ({}, "ATTACK"),
    ],
)
def test_the_attack_has_a_name(protocol, name):
    assert attack_name(protocol) == name


def test_one_line_says_everything():
    assert describe(NESTED) == "PGD-20, ℓ∞, ε = 8/255 (seed 0)"
    assert describe({"attack": "FGSM"}) == "FGSM"
    whole = {**NESTED["attack"], "rule": {"kind": "step.sign", "size": 2 / 255}, "start": "uniform", "restarts": 2}
    words = "PGD-20, ℓ∞, ε = 8/255, step ε/4, uniform start, 2 restarts"
    assert describe({"attack": {**whole, "loss": {"kind": "loss.cross_entropy"}, "attack_mode": "eval"}}) == words
    unusual = {**whole, "loss": {"kind": "loss.margin"}, "rule": {"kind": "step.adam", "size": 0.0123}}
    other = "PGD-20, ℓ∞, ε = 8/255, step 0.0123, uniform start, 2 restarts (rule adam, loss margin)"
    assert describe({"attack": unusual}) == other


@pytest.mark.parametrize(("value", "text"), [(8 / 255, "8/255"), (0.15, "0.15"), (0.0, "0"), (1.0, "255/255")])
def test_what_people_type_is_shown_as_typed(value, text):
    assert fraction(value) == text


def test_names_are_dotted_and_checksums_short():
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}}) == {"a.b.c": 1, "a.d": [2]}
    assert brief("data_sha256", "0123456789") == "data_sha256 01234567"
