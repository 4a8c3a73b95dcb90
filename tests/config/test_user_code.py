"""Networks of the user, named on the command line. Loading weights is tested in models/test_weights.py."""

import sys

import pytest
import torch
from torch import nn

from doubly.config.user_code import InMemoryData, InMemoryModel, UserModel
from doubly.errors import UsageError

MODULE = """
from torch import nn

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

def sized(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))

class Network(nn.Module):
    def __init__(self, classes=2):
        super().__init__()
        self.head = nn.Linear(16, classes)

def wrong():
    return "a network"

def failing():
    raise KeyError("no such layer")

def demanding(depth, classes):
    return plain()

number = 3
"""


def build(function, weights=None):
    return UserModel(function, weights).build(1, 5, [0.5], [0.5])


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into the working directory; its name is new each time, since Python caches modules."""
    name = f"user_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    return name


def test_the_number_of_classes_is_passed_to_functions_that_take_it(module):
    for function, outputs in [("plain", 3), ("sized", 5), ("Network", 5)]:
        assert list(build(f"{module}:{function}").parameters())[-1].shape == (outputs,)


def test_weights_are_loaded_and_can_be_left_out(module, tmp_path):
    source = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    model = UserModel(f"{module}:plain", str(tmp_path / "weights.pt"))
    assert torch.equal(model.build(1, 3, [0.5], [0.5])[1].weight, source[1].weight)
    assert model.without_initial_weights() == UserModel(f"{module}:plain")


def test_what_builds_no_network_is_refused_in_one_sentence_and_the_search_path_is_restored(module):
    before = list(sys.path)
    for function, message in [
        ("plain", "package.module:function"),
        ("nothing_of_this_name:plain", "nothing_of_this_name"),
        (f"{module}_broken:plain", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        (f"{module}:nothing", "nothing"),
        (f"{module}:wrong", "must return an nn.Module, got str"),
        (f"{module}:number", "cannot be called"),
        (f"{module}:demanding", "missing a required argument: 'depth'"),
        (f"{module}:failing", "raised KeyError: 'no such layer'"),
    ]:
        with pytest.raises(UsageError) as error:
            build(function)
        assert message in str(error.value) and "\n" not in str(error.value)
    assert sys.path == before


def test_what_was_handed_in_from_python_cannot_be_rebuilt():
    with pytest.raises(UsageError, match=r"--model package\.module:function"):
        InMemoryModel().build(1, 2, [0.0], [1.0])
    with pytest.raises(UsageError, match="from Python"):
        InMemoryData().load(None)
