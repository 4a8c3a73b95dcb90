import pytest

from doubly.report.protocol import attack_name, brief, describe, flatten

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
    assert describe(NESTED) == "PGD-20 (threat linf, radius 0.0313725, seed 0)"
    assert describe({"attack": "FGSM"}) == "FGSM"


def test_names_are_dotted_and_checksums_short():
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}}) == {"a.b.c": 1, "a.d": [2]}
    assert brief("data_sha256", "0123456789") == "data_sha256 01234567"
