from dataclasses import replace

import pytest

from doubly.attacks import FGSM, PGD
from doubly.bilevel import FirstThen, GradientStep, SignStep
from doubly.errors import UsageError
from doubly.methods import AT, Standard
from doubly.recipes import recipe
from doubly.threat import L2Ball, LinfBall
from doubly.training.warm_up import warmed

RUN = replace(recipe("digits.at"), warm_up=0.2)


def test_epsilon_and_step_grow_in_a_straight_line_to_their_values():
    attack = RUN.method.attack
    for progress, share in ((0.05, 0.25), (0.1, 0.5), (0.15, 0.75)):
        small = warmed(RUN, progress).attack
        assert small.threat.radius == pytest.approx(share * attack.threat.radius)
        assert small.rule.size == pytest.approx(share * attack.rule.size)
        assert replace(small, threat=attack.threat, rule=attack.rule) == attack
    assert warmed(RUN, 0.2) is RUN.method and warmed(RUN, 0.9) is RUN.method


def test_it_begins_above_zero_and_is_off_by_default():
    assert warmed(RUN, 0.0).attack.threat.radius > 0
    assert warmed(recipe("digits.at"), 0.0) == recipe("digits.at").method


def test_every_attack_can_be_shortened():
    assert PGD(L2Ball(1.0), rule=SignStep(0.1)).scaled(0.5) == PGD(L2Ball(0.5), rule=SignStep(0.05))
    assert FGSM(LinfBall(0.2)).scaled(0.5) == FGSM(LinfBall(0.1))
    both = PGD(LinfBall(0.2), rule=FirstThen(SignStep(0.1), GradientStep(4.0)))
    assert both.scaled(0.5).rule == FirstThen(SignStep(0.05), GradientStep(2.0))


def test_a_method_without_attack_stays_as_it_is():
    run = replace(RUN, method=Standard())
    assert warmed(run, 0.0) == Standard()


def test_wrapped_methods_are_reached():
    from doubly.methods import METHODS

    wrapper = METHODS["awp"](AT(PGD(LinfBall(0.2))))
    assert warmed(replace(RUN, method=wrapper), 0.1).method.attack.threat.radius == pytest.approx(0.1)


def test_a_share_of_one_or_more_is_refused():
    with pytest.raises(UsageError, match="warm_up is a share"):
        replace(RUN, warm_up=1.0)
