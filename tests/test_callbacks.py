"""Callbacks and lists of them; that training calls them is tested in training/test_loop.py."""

import inspect

import pytest

from doubly.callbacks import Callback, CallbackList

METHODS = {
    name: len(inspect.signature(method).parameters) - 1
    for name, method in inspect.getmembers(Callback, inspect.isfunction)
    if not name.startswith("_")
}


def recorder(name, calls):
    """Return a callback that appends (name, method, arguments) of each call."""

    def record(method):
        return lambda self, *arguments: calls.append((name, method, arguments))

    return type("Recorder", (Callback,), {method: record(method) for method in METHODS})()


def test_a_list_passes_every_call_on_in_order():
    calls = []
    callbacks = CallbackList(recorder(name, calls) for name in ("first", "second"))
    for method, count in METHODS.items():
        calls.clear()
        arguments = tuple(range(count))
        getattr(callbacks, method)(*arguments)
        assert calls == [("first", method, arguments), ("second", method, arguments)]


def test_every_method_does_nothing_by_default():
    for method, count in METHODS.items():
        assert getattr(CallbackList([Callback()]), method)(*range(count)) is None


def test_an_error_while_closing_does_not_keep_the_others_open():
    class Failing(Callback):
        def close(self):
            raise OSError("disk is full")

    calls = []
    with pytest.raises(OSError, match="disk is full"):
        CallbackList([recorder("first", calls), Failing(), recorder("last", calls)]).close()
    assert [name for name, _, _ in calls] == ["first", "last"]
