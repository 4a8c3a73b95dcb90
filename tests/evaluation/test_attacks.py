"""The attacks of an evaluation, by name or as given."""

from dataclasses import replace

import pytest

from doubly.attacks import ATTACKS, FGSM, NFGSM, PGD
from doubly.attacks.autoattack import QUICK, STANDARD, AutoAttack
from doubly.bilevel import NormalizedStep, SignStep
from doubly.errors import UsageError
from doubly.evaluation.attacks import attack_names, describe_attacks, reference_pgd, select_attacks, shared_threat
from doubly.losses import CrossEntropy, LogitMargin
from doubly.threat import L2Ball, LinfBall

REFERENCE = reference_pgd(LinfBall(0.1))


class Mine:
    def __call__(self, model, x, y, generator):
        return 0 * x


class _Hidden(Mine): ...


def test_pgd_is_that_of_the_paper():
    for threat, rule in (
        (LinfBall(8 / 255), SignStep(2 / 255)),
        (LinfBall(0.3), SignStep(0.075)),
        (L2Ball(0.5), NormalizedStep(0.125)),
    ):
        result = reference_pgd(threat)
        assert (result.threat, result.steps, result.start, result.restarts) == (threat, 20, "uniform", 1)
        assert type(result.rule) is type(rule) and result.rule.size == pytest.approx(rule.size)
        assert result.loss == CrossEntropy()


def test_names_are_attacks_within_the_threat_of_the_reference():
    for threat in (LinfBall(0.1), L2Ball(0.2)):
        pgd = reference_pgd(threat)
        attacks, ensemble = select_attacks(["margin", "autoattack", "pgd", "fgsm"], pgd)
        assert attacks == {"margin": replace(pgd, loss=LogitMargin()), "pgd": pgd, "fgsm": FGSM(threat)}
        assert list(attacks) == ["margin", "pgd", "fgsm"]
        assert ensemble == AutoAttack(threat) and ensemble.parts == STANDARD and ensemble.label == "RA-AA"
        assert select_attacks("quick", pgd, seed=3) == ({}, AutoAttack(threat, QUICK, seed=3))
        assert select_attacks([], pgd) == select_attacks({}, pgd) == ({}, None)


def test_every_attack_in_the_table_that_stays_inside_has_a_name():
    names = [name for name, kind in ATTACKS.items() if kind.stays_inside]
    assert attack_names() == [*names, "autoattack", "quick"]
    assert list(select_attacks(names, REFERENCE).attacks) == names


def test_attacks_without_a_name_get_one():
    margin, other, own = replace(REFERENCE, loss=LogitMargin()), replace(REFERENCE, steps=3), Mine()
    attacks = select_attacks([REFERENCE, margin, other, FGSM(), own, replace(other, steps=4)], REFERENCE).attacks
    assert list(attacks) == ["pgd", "margin", "pgd_2", "fgsm", "mine", "pgd_5"]
    assert attacks["pgd_2"] is other and attacks["mine"].function is own
    assert attacks["mine"].threat == LinfBall(0.1)
    named = select_attacks({"weak": FGSM(), "any": AutoAttack(L2Ball(0.3), QUICK)}, REFERENCE)
    assert named == ({"weak": FGSM()}, AutoAttack(L2Ball(0.3), QUICK))
    assert list(select_attacks(other, REFERENCE).attacks) == ["pgd"]


def test_the_threat_is_the_argument_or_that_of_the_attacks():
    assert shared_threat(["pgd"], None) == LinfBall() and shared_threat("pgd", L2Ball(0.2)) == L2Ball(0.2)
    assert shared_threat(["pgd", PGD(L2Ball(0.2))], None) == L2Ball(0.2)
    for attacks, threat in (([PGD(LinfBall(0.1))], LinfBall(0.2)), ([FGSM(L2Ball(0.1)), AutoAttack()], None)):
        with pytest.raises(UsageError, match="an evaluation has one threat, got"):
            shared_threat(attacks, threat)


def test_the_protocol_describes_the_attacks_that_do_not_follow_from_pgd():
    pgd, margin = REFERENCE, replace(REFERENCE, loss=LogitMargin())
    assert list(describe_attacks({"pgd": pgd, "margin": margin})) == ["attack"]
    result = describe_attacks({"pgd": pgd, "margin": replace(margin, steps=3), "mine": select_mine()})
    assert result["attack"]["steps"] == 20 and result["attacks"]["margin"]["steps"] == 3
    assert result["attacks"]["mine"]["kind"].endswith("Mine")
    assert describe_attacks({}) == {}


def select_mine():
    return select_attacks([Mine()], REFERENCE).attacks["mine"]


def test_refusals():
    reserved = ("clean", "y", "ids", "weights", "aa", "tail_30", "share", "rounding", "file", "allow_pickle")
    malformed = ("Upper", "../escape", "a b", "pgd\n", "after_training", "last_losses", "last_margins")
    for attacks, message in (
        (["pdg"], "no attack 'pdg': did you mean 'pgd'"),
        (["PGD"], "no attack 'PGD': valid are autoattack, fgsm, margin, pgd, quick"),
        ([""], "no attack ''"),
        (["pgd", "pgd"], "'pgd' cannot name an attack: use a new name"),
        ([REFERENCE, "pgd"], "'pgd' cannot name"),
        (["autoattack", "quick"], "runs AutoAttack once: give autoattack or quick, not both"),
        ([AutoAttack(), "autoattack"], "AutoAttack once"),
        (["n_fgsm"], "n_fgsm leaves the ball"),
        ([NFGSM()], "NFGSM leaves the ball"),
        ([3], "3 is no attack"),
        ([None], "None is no attack"),
        ([LinfBall()], "is no attack"),
        ([PGD], "is no attack"),
        (PGD, "is no attack"),
        ({"pgd": None}, "None is no attack"),
        ([_Hidden()], "'_hidden' cannot name"),
        *(({name: REFERENCE}, "cannot name") for name in (*reserved, *malformed, "autoattack", "quick")),
    ):
        with pytest.raises(UsageError, match=message):
            select_attacks(attacks, REFERENCE)
