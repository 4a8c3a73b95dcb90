"""The estimated time to the end of AutoAttack, with a clock made by hand."""

import pytest

from doubly.attacks.autoattack import STANDARD, AutoAttack
from doubly.callbacks import Callback
from doubly.evaluation.autoattack.eta import Progress, RemainingTime, passes_per_image

ATTACK = AutoAttack(parts=("apgd-ce", "square"), iterations=10, queries=70)  # 30 and 70 passes of each image


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_work_of_each_attack_is_counted_in_passes():
    result = passes_per_image(AutoAttack(), 10)
    assert result == {"apgd-ce": 300, "apgd-t": 2700, "fab-t": 3600, "square": 5000} and list(result) == list(STANDARD)
    assert passes_per_image(AutoAttack(), 4) == {"apgd-ce": 300, "apgd-t": 900, "fab-t": 1200, "square": 5000}


def test_nothing_is_estimated_before_the_first_pass(clock):
    remaining = RemainingTime(ATTACK, 10, 20, clock)
    assert remaining.seconds() is None
    remaining.start_chunk(10, 10, ATTACK.parts)
    clock.now += 3
    assert remaining.seconds() is None


def test_a_gradient_counts_as_three_passes(clock):
    for rows, graph in ((300, False), (100, True)):
        remaining = RemainingTime(ATTACK, 10, 10, clock)
        remaining.start_chunk(10, 10, ATTACK.parts)
        remaining.count_pass(rows, graph)
        clock.now += 3
        assert remaining.seconds() == pytest.approx(7)  # 300 of 1000 passes took 3 s


def test_broken_images_take_no_more_time(clock):
    remaining = RemainingTime(ATTACK, 10, 10, clock)
    remaining.start_chunk(10, 10, ATTACK.parts)
    remaining.count_pass(300, False)
    clock.now += 3
    remaining.end_attack(5)
    assert remaining.seconds() == pytest.approx(3.5)
    remaining.count_pass(350, False)
    clock.now += 3.5
    assert remaining.seconds() == pytest.approx(0)
    remaining.end_attack(2)
    assert remaining.seconds() == 0


def test_later_chunks_are_expected_to_be_as_robust_as_those_so_far(clock):
    remaining = RemainingTime(ATTACK, 10, 40, clock)
    remaining.start_chunk(10, 10, ATTACK.parts)
    remaining.count_pass(1000, False)
    clock.now += 10
    remaining.end_attack(8)
    remaining.end_attack(4)
    assert remaining.seconds() == pytest.approx(30 * 0.4 * 100 * 0.01)
    remaining.start_chunk(10, 6, ATTACK.parts)
    assert remaining.seconds() == pytest.approx((6 * 100 + 20 * 0.5 * 100) * 0.01)


def test_chunks_of_an_earlier_process_take_no_time_but_say_how_many_images_are_robust(clock):
    remaining = RemainingTime(ATTACK, 10, 30, clock)
    remaining.start_chunk(10, 5, [])
    remaining.start_chunk(10, 10, ["square"])
    remaining.count_pass(100, False)
    clock.now += 1
    assert remaining.seconds() == pytest.approx((10 * 70 - 100 + 10 * 0.75 * 100) * 0.01)


def test_more_passes_than_expected_do_not_make_it_negative(clock):
    remaining = RemainingTime(ATTACK, 10, 10, clock)
    remaining.start_chunk(10, 1, ["square"])
    remaining.count_pass(1000, False)
    clock.now += 1
    assert remaining.seconds() == 0


def test_the_callback_is_told_about_once_a_second_and_after_each_attack(clock):
    calls = []

    class Recorder(Callback):
        def on_time_left(self, seconds):
            calls.append(("left", clock.now, seconds))

        def on_attack(self, chunk, chunks, part, robust, seconds_left):
            calls.append((chunk, chunks, part, robust, seconds_left))

    progress = Progress(RemainingTime(ATTACK, 10, 10, clock), Recorder())
    progress.start_chunk(10, 10, ATTACK.parts)
    for _ in range(5):
        clock.now += 0.5
        progress.count_pass(50, False)
    progress.end_attack(0, 1, "apgd-ce", 5)
    assert calls == [("left", 101.5, pytest.approx(8.5)), (0, 1, "apgd-ce", 5, pytest.approx(3.5))]
