from functools import partial

import pytest
import torch

from doubly import __version__
from doubly.attacks.mode import twin
from doubly.cli import doctor


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """The compiler itself takes seconds; test_forward.py asks it."""
    monkeypatch.setattr(doctor, "twin", partial(twin, backend="eager"))
    monkeypatch.setattr(doctor, "can_compile", lambda device: True)


def findings():
    return {name: (text, fine) for name, text, fine in doctor.examine(True)}


def test_a_sound_installation_is_found_sound():
    found = findings()
    assert all(fine for _, fine in found.values()), found
    assert found["doubly"][0] == __version__ and found["torch"][0] == torch.__version__
    assert found["threads"][0] == str(torch.get_num_threads())
    for check in ("implicit gradient", "first-order term", "attack", "compiled attack", "checkpoint"):
        assert found[check][0].startswith("ok")


def test_the_global_generator_is_untouched():
    before = torch.get_rng_state()
    findings()
    assert torch.equal(before, torch.get_rng_state())


def test_a_wrong_implicit_gradient_is_noticed(monkeypatch):
    cid = doctor.cid
    monkeypatch.setattr(doctor, "cid", lambda *a, **k: cid(*a, **k)._replace(scalar=1.001 * cid(*a, **k).loss))
    text, fine = findings()["implicit gradient"]
    assert not fine and text.startswith("WRONG")


def test_an_attack_that_leaves_the_box_is_noticed(monkeypatch):
    class TooFar(doctor.PGD):
        def __call__(self, *arguments):
            return 1.01 * super().__call__(*arguments)

    monkeypatch.setattr(doctor, "PGD", TooFar)
    assert not findings()["attack"][1]


def test_a_checkpoint_that_changes_is_noticed(monkeypatch):
    load = doctor.checkpoint.load
    monkeypatch.setattr(doctor.checkpoint, "load", lambda path: ({"model": {"tensor": torch.ones(10)}}, load(path)[1]))
    assert not findings()["checkpoint"][1]


def test_a_compiler_that_is_wrong_is_noticed_and_one_that_is_missing_is_said(monkeypatch):
    def wrong(graph, examples):
        return lambda *given: tuple(1.01 * part for part in graph.forward(*given))

    monkeypatch.setattr(doctor, "twin", partial(twin, backend=wrong))
    text, fine = findings()["compiled attack"]
    assert not fine and "differs by" in text
    monkeypatch.setattr(doctor, "can_compile", lambda device: False)
    text, fine = findings()["compiled attack"]
    assert fine and "no C++ compiler" in text
