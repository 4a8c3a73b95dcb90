import os
import signal
import threading

import pytest

from doubly.errors import Interrupted
from doubly.jobs.signals import deferred_signals, interrupt_on_signals, interruption, stop_on_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def send(number):
    os.kill(os.getpid(), number)


def test_a_signal_is_a_request_and_belongs_to_one_context():
    for number in SIGNALS:
        with stop_on_signals() as request:
            assert not request()
            send(number)
            assert request() and request.number == number == interruption(request).number
        with stop_on_signals() as later:
            assert request() and not later()


def test_a_second_signal_ends_at_once():
    with pytest.raises(KeyboardInterrupt), stop_on_signals():
        send(signal.SIGTERM)
        send(signal.SIGTERM)


def test_interruption_carries_the_number_of_the_signal():
    for number in SIGNALS:
        with pytest.raises(Interrupted, match="the same command continues") as error, interrupt_on_signals():
            send(number)
        assert error.value.number == number


def test_deferred_signals_come_after_the_critical_part():
    with stop_on_signals() as request:
        with deferred_signals():
            send(signal.SIGTERM)
            assert not request()
        assert request()


def test_handlers_are_restored_also_after_an_error():
    before = [signal.getsignal(number) for number in SIGNALS]
    for context in (stop_on_signals, interrupt_on_signals, deferred_signals):
        with pytest.raises(KeyError), context():
            assert [signal.getsignal(number) for number in SIGNALS] != before
            raise KeyError
        assert [signal.getsignal(number) for number in SIGNALS] == before


def test_other_threads_than_the_main_one_get_no_signals():
    requests = []

    def work():
        with stop_on_signals() as request, interrupt_on_signals(), deferred_signals():
            requests.append(request())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert requests == [False]
