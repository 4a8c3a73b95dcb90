from doubly.report.protocol import attack_name, describe, describe_setting, flatten

NESTED = {
    "attack": {"kind": "attack.pgd", "threat": {"kind": "threat.linf", "radius": 8 / 255}, "steps": 20},
    "seed": 0,
}


def test_the_attack_has_a_name():
    for protocol, name in [
        (NESTED, "PGD-20"),
        ({"attack": "PGD", "steps": 10}, "PGD-10"),
        ({"attack": {"kind": "attack.fgsm"}}, "FGSM"),
        ({}, "ATTACK"),
    ]:
        assert attack_name(protocol) == name


def test_one_line_holds_every_setting():
    assert describe(NESTED) == "PGD-20, ℓ∞, ε = 8/255 (seed 0)"
    assert describe({"attack": "FGSM"}) == "FGSM"
    for kind, name in (("threat.l1", "ℓ1"), ("threat.l2", "ℓ2"), ("threat.patch", "patch")):
        assert describe({"attack": {"kind": "attack.pgd", "threat": {"kind": kind}}}) == f"PGD, {name}"
    complete = {**NESTED["attack"], "rule": {"kind": "step.sign", "size": 2 / 255}, "start": "uniform", "restarts": 2}
    words = "PGD-20, ℓ∞, ε = 8/255, step ε/4, uniform start, 2 restarts"
    assert describe({"attack": {**complete, "loss": {"kind": "loss.cross_entropy"}, "attack_mode": "eval"}}) == words
    unusual = {**complete, "loss": {"kind": "loss.margin"}, "rule": {"kind": "step.adam", "size": 0.0123}}
    other = "PGD-20, ℓ∞, ε = 8/255, step 0.0123, uniform start, 2 restarts (rule adam, loss margin)"
    assert describe({"attack": unusual}) == other


def test_names_are_dotted_and_checksums_short():
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}}) == {"a.b.c": 1, "a.d": [2]}
    assert describe_setting("data_sha256", "0123456789") == "data_sha256 01234567"
