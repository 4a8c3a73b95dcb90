import pytest

from doubly.attacks.autoattack import STANDARD, AutoAttack
from doubly.evaluation.autoattack.eta import Remaining

ATTACK = AutoAttack(parts=("apgd-ce", "square"), iterations=10, queries=70)  # 30 and 70 passes of each image


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Clock()


def test_the_work_of_each_attack_is_counted_in_passes():
    found = Remaining(AutoAttack(), 10, 1).work
    assert found == {"apgd-ce": 300, "apgd-t": 2700, "fab-t": 3600, "square": 5000}
    assert list(found) == list(STANDARD)
    assert Remaining(AutoAttack(), 4, 1).work == {"apgd-ce": 300, "apgd-t": 900, "fab-t": 1200, "square": 5000}


def test_nothing_is_said_before_anything_is_known(time):
    clock = Remaining(ATTACK, 10, 20, time)
    assert clock.seconds() is None
    clock.enter(10, 10, list(ATTACK.parts))
    time.now += 3
    assert clock.seconds() is None


@pytest.mark.parametrize(("rows", "graph"), [(300, False), (100, True)])
def test_a_gradient_counts_as_three_passes(rows, graph, time):
    clock = Remaining(ATTACK, 10, 10, time)
    clock.enter(10, 10, list(ATTACK.parts))
    clock.add(rows, graph)
    time.now += 3
    assert clock.seconds() == pytest.approx(7)  # 300 of 1000 passes took 3 s


def test_the_images_that_fell_take_no_more_time(time):
    clock = Remaining(ATTACK, 10, 10, time)
    clock.enter(10, 10, list(ATTACK.parts))
    clock.add(300, False)
    time.now += 3
    clock.ended(5)
    assert clock.seconds() == pytest.approx(3.5)
    clock.add(350, False)
    time.now += 3.5
    assert clock.seconds() == pytest.approx(0)
    clock.ended(2)
    assert clock.seconds() == 0


def test_chunks_to_come_are_taken_to_stand_as_those_so_far(time):
    clock = Remaining(ATTACK, 10, 40, time)
    clock.enter(10, 10, list(ATTACK.parts))
    clock.add(1000, False)
    time.now += 10
    clock.ended(8)
    clock.ended(4)
    assert clock.seconds() == pytest.approx(30 * 0.4 * 100 * 0.01)
    clock.enter(10, 6, list(ATTACK.parts))
    assert clock.seconds() == pytest.approx((6 * 100 + 20 * 0.5 * 100) * 0.01)


def test_chunks_of_an_earlier_process_take_no_time_but_tell_how_many_stand(time):
    clock = Remaining(ATTACK, 10, 30, time)
    clock.enter(10, 5, [])
    clock.enter(10, 10, ["square"])
    clock.add(100, False)
    time.now += 1
    assert clock.seconds() == pytest.approx((10 * 70 - 100 + 10 * 0.75 * 100) * 0.01)


def test_more_passes_than_were_foreseen_are_no_debt(time):
    clock = Remaining(ATTACK, 10, 10, time)
    clock.enter(10, 1, ["square"])
    clock.add(1000, False)
    time.now += 1
    assert clock.seconds() == 0
