import pytest

from doubly.errors import UsageError
from doubly.schedules import SCHEDULES, Constant, Cyclic, Piecewise, Schedule


def test_every_schedule_is_listed():
    assert set(SCHEDULES.values()) == {Constant, Piecewise, Cyclic}
    assert all(isinstance(kind(), Schedule) for kind in SCHEDULES.values())


def test_constant_is_the_same_throughout():
    assert [Constant(0.3).at(p) for p in (0.0, 0.5, 0.99)] == [0.3] * 3


def test_the_temperature_of_the_paper_over_sixty_and_over_twenty_five_epochs():
    schedule = Piecewise((10.0, 1.0, 0.1), (2 / 3, 5 / 6))
    assert [schedule.at(epoch / 60) for epoch in range(60)] == [10.0] * 40 + [1.0] * 10 + [0.1] * 10
    assert [schedule.at(epoch / 25) for epoch in range(25)] == [10.0] * 17 + [1.0] * 4 + [0.1] * 4


def test_cyclic_rises_to_the_peak_and_falls_to_zero():
    schedule = Cyclic(0.2, 0.4)
    assert [schedule.at(p) for p in (0.0, 0.2, 0.4, 0.7, 1.0)] == pytest.approx([0.0, 0.1, 0.2, 0.1, 0.0])
    assert max(schedule.at(k / 1000) for k in range(1000)) == pytest.approx(0.2)


def test_the_values_a_schedule_takes():
    assert Constant(0.3).values_taken() == (0.3,) and Piecewise().values_taken() == (0.1, 0.01, 0.001)
    assert Cyclic(0.2).values_taken() == [Cyclic(0.2).at(percent / 100) for percent in range(100)]


def test_refused_settings():
    for values, boundaries in [
        ((1.0, 2.0), ()),
        ((1.0,), (0.5,)),
        ((1.0, 2.0, 3.0), (0.7, 0.5)),
        ((1.0, 2.0, 3.0), (0.5, 0.5)),
        ((1.0, 2.0), (0.0,)),
        ((1.0, 2.0), (1.0,)),
        ((1.0, 2.0), (40.0,)),
    ]:
        with pytest.raises(UsageError, match="boundaries"):
            Piecewise(values, boundaries)
    for turn in (0.0, 1.0, -0.5, 24.0):
        with pytest.raises(UsageError, match="turn"):
            Cyclic(0.2, turn)
