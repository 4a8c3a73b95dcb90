import os
import signal
import threading

import pytest

from doubly.jobs.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request(number):
    with stop_on_signals() as request:
        assert not request()
        os.kill(os.getpid(), number)
        assert request() and request.number == number


def test_a_second_signal_ends_at_once():
    with pytest.raises(KeyboardInterrupt), stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


def test_the_handlers_come_back_also_after_an_error():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(KeyError), stop_on_signals():
        assert [signal.getsignal(number) for number in numbers] != before
        raise KeyError
    assert [signal.getsignal(number) for number in numbers] == before


def test_outside_the_main_thread_nothing_is_asked_and_nothing_fails():
    found = []

    def work():
        with stop_on_signals() as request:
            found.append(request())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_requests_do_not_share_their_answer():
    with stop_on_signals() as first:
        os.kill(os.getpid(), signal.SIGINT)
    with stop_on_signals() as second:
        assert first() and not second()
