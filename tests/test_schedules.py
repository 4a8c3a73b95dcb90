import pytest

from doubly.errors import UsageError
from doubly.schedules import SCHEDULES, Constant, Cyclic, Piecewise, Schedule


def test_every_schedule_is_listed():
    assert set(SCHEDULES.values()) == {Constant, Piecewise, Cyclic}
    assert all(isinstance(kind(), Schedule) for kind in SCHEDULES.values())


def test_constant():
    assert [Constant(0.3).at(p) for p in (0.0, 0.5, 0.99)] == [0.3] * 3


def test_the_paper_s_temperature_over_sixty_epochs():
    schedule = Piecewise((10.0, 1.0, 0.1), (2 / 3, 5 / 6))
    found = [schedule.at(epoch / 60) for epoch in range(60)]
    assert found == [10.0] * 40 + [1.0] * 10 + [0.1] * 10


def test_the_paper_s_temperature_scaled_to_twenty_five_epochs():
    schedule = Piecewise((10.0, 1.0, 0.1), (2 / 3, 5 / 6))
    assert [schedule.at(epoch / 25) for epoch in range(25)] == [10.0] * 17 + [1.0] * 4 + [0.1] * 4


@pytest.mark.parametrize(
    ("values", "boundaries"),
    [
        ((1.0, 2.0), ()),
        ((1.0,), (0.5,)),
        ((1.0, 2.0, 3.0), (0.7, 0.5)),
        ((1.0, 2.0, 3.0), (0.5, 0.5)),
        ((1.0, 2.0), (0.0,)),
        ((1.0, 2.0), (1.0,)),
        ((1.0, 2.0), (40.0,)),
    ],
)
def test_a_stage_that_is_never_reached_is_refused(values, boundaries):
    with pytest.raises(UsageError, match="boundaries"):
        Piecewise(values, boundaries)


def test_cyclic_rises_to_the_peak_and_falls_to_zero():
    schedule = Cyclic(0.2, 0.4)
    assert [schedule.at(p) for p in (0.0, 0.2, 0.4, 0.7, 1.0)] == pytest.approx([0.0, 0.1, 0.2, 0.1, 0.0])
    assert max(schedule.at(k / 1000) for k in range(1000)) == pytest.approx(0.2)


@pytest.mark.parametrize("turn", [0.0, 1.0, -0.5, 24.0])
def test_cyclic_turns_inside_training(turn):
    with pytest.raises(UsageError, match="turn"):
        Cyclic(0.2, turn)
