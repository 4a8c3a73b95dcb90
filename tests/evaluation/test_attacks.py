from dataclasses import replace

import pytest

from doubly.attacks import FGSM, PGD
from doubly.attacks.autoattack import QUICK, STANDARD, AutoAttack
from doubly.bilevel import NormalizedStep, SignStep
from doubly.errors import UsageError
from doubly.evaluation.attacks import NAMES, chosen, pgd20
from doubly.losses import CrossEntropy, LogitMargin
from doubly.threat import L2Ball, LinfBall

BASE = pgd20(LinfBall(0.1))


class Mine:
    def __call__(self, model, x, y, generator):
        return 0 * x


class _Hidden(Mine): ...


@pytest.mark.parametrize(
    ("threat", "rule"),
    [(LinfBall(8 / 255), SignStep(2 / 255)), (LinfBall(0.3), SignStep(0.075)), (L2Ball(0.5), NormalizedStep(0.125))],
)
def test_pgd_is_that_of_the_paper(threat, rule):
    found = pgd20(threat)
    assert (found.threat, found.steps, found.start, found.restarts) == (threat, 20, "uniform", 1)
    assert type(found.rule) is type(rule) and found.rule.size == pytest.approx(rule.size)
    assert found.loss == CrossEntropy()


@pytest.mark.parametrize("threat", [LinfBall(0.1), L2Ball(0.2)])
def test_names_stand_for_attacks_within_the_same_ball(threat):
    pgd = pgd20(threat)
    plain, ensemble = chosen(["margin", "autoattack", "pgd"], pgd)
    assert plain == {"margin": replace(pgd, loss=LogitMargin()), "pgd": pgd} and list(plain) == ["margin", "pgd"]
    assert ensemble == AutoAttack(threat) and ensemble.parts == STANDARD and ensemble.label == "RA-AA"
    assert chosen(["quick"], pgd) == ({}, AutoAttack(threat, QUICK))
    assert chosen([], pgd) == chosen({}, pgd) == ({}, None)


def test_attacks_that_are_handed_in_get_names():
    margin, other = replace(BASE, loss=LogitMargin()), replace(BASE, steps=3)
    own = Mine()
    plain, _ = chosen([BASE, margin, other, FGSM(), own, replace(other, steps=4)], BASE)
    assert list(plain) == ["pgd", "margin", "pgd_2", "fgsm", "mine", "pgd_5"]
    assert plain["pgd_2"] is other and plain["mine"] is own


def test_a_mapping_names_its_attacks():
    aa, own = AutoAttack(L2Ball(0.3), QUICK), Mine()
    assert chosen({"weak": FGSM(), "x_2": own, "any": aa}, BASE) == ({"weak": FGSM(), "x_2": own}, aa)


@pytest.mark.parametrize(
    ("attacks", "said"),
    [
        (["fab"], f"no attack 'fab': use {', '.join(NAMES)}"),
        (["PGD"], "no attack 'PGD'"),
        ([""], "no attack ''"),
        (["pgd", "pgd"], "'pgd' cannot name an attack: use a new name"),
        ([BASE, "pgd"], "'pgd' cannot name"),
        (["autoattack", "quick"], "runs AutoAttack once: give autoattack or quick, not both"),
        ([AutoAttack(), "autoattack"], "AutoAttack once"),
        ([3], "3 is no attack"),
        ([None], "None is no attack"),
        ([LinfBall()], "is no attack"),
        ([_Hidden()], "'_hidden' cannot name"),
        ({"clean": BASE}, "'clean' cannot name"),
        ({"y": BASE}, "'y' cannot name"),
        ({"ids": BASE}, "'ids' cannot name"),
        ({"autoattack": BASE}, "'autoattack' cannot name"),
        ({"quick": BASE}, "'quick' cannot name"),
        ({"Upper": BASE}, "'Upper' cannot name"),
        ({"../escape": BASE}, "cannot name"),
        ({"a b": BASE}, "cannot name"),
        ({"pgd\n": BASE}, "cannot name"),
        ({"after_training": BASE}, "cannot name"),
        ({"last_losses": BASE}, "cannot name"),
        ({"last_margins": BASE}, "cannot name"),
        ({"weights": BASE}, "cannot name"),
    ],
)
def test_what_cannot_be_chosen_is_one_sentence(attacks, said):
    with pytest.raises(UsageError, match=said):
        chosen(attacks, BASE)


@pytest.mark.parametrize("name", ["aa", "tail_30", "share", "rounding", "file", "allow_pickle"])
def test_a_name_that_the_evaluation_needs_itself_is_refused(name):
    with pytest.raises(UsageError, match="cannot name"):
        chosen({name: BASE}, BASE)


@pytest.mark.parametrize("attacks", [{"pgd": None}, {"mine": 3}, [PGD], PGD], ids=str)
def test_what_is_no_attack_is_one_sentence_in_any_form(attacks):
    with pytest.raises(UsageError, match="attack"):
        chosen(attacks, BASE)


def test_one_name_is_not_taken_for_its_letters():
    try:
        assert list(chosen("pgd", BASE)[0]) == ["pgd"]
    except UsageError as problem:
        assert "'p'" not in str(problem)
