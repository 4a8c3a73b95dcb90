import pickle
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

from doubly.config.user_code import GivenData, GivenModel, OwnModel, as_images, fill, load_weights
from doubly.data import Images
from doubly.errors import UsageError

MODULE = """
import torch
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

def demanding(depth, classes):
    return plain()

number = 3
"""


def network(out=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, out))


def build(function, weights=None, classes=5):
    return OwnModel(function, weights).build(1, classes, [0.5], [0.5])


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with somebody's module, which is where we are; its name is new each time, since Python caches."""
    name = f"own_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def refusal(call, *arguments) -> str:
    with pytest.raises(UsageError) as problem:
        call(*arguments)
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize(("function", "out"), [("plain", 3), ("sized", 5), ("Network", 5)])
def test_the_number_of_classes_is_given_to_those_who_take_it(own, function, out):
    parameters = list(build(f"{own}:{function}").parameters())
    assert parameters[-1].shape == (out,)


def test_the_search_path_is_left_as_it_was(own):
    before = list(sys.path)
    build(f"{own}:plain")
    refusal(build, "nothing_of_this_name:plain")
    assert sys.path == before


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("plain", "package.module:function"),
        ("nothing_of_this_name:plain", "nothing_of_this_name"),
        ("{own}:nothing", "nothing"),
        ("{own}:wrong", "must return an nn.Module, got str"),
        ("{own}:number", "cannot be called"),
        ("{own}:demanding", "missing a required argument: 'depth'"),
    ],
)
def test_what_builds_no_network_is_one_sentence(own, function, said):
    assert said in refusal(build, function.format(own=own))


@pytest.mark.parametrize("file", ["weights.safetensors", "weights.pt", "wrapped.pth", "parallel.pt", "compiled.pt"])
def test_weights_are_read_in_every_plain_form(own, tmp_path, file):
    source = network().state_dict()
    if file.endswith("safetensors"):
        safetensors.torch.save_file(source, tmp_path / file)
    else:
        prefix = {"parallel.pt": "module.", "compiled.pt": "_orig_mod."}.get(file, "")
        named = {prefix + name: value for name, value in source.items()}
        torch.save({"state_dict": named, "epoch": 3} if file == "wrapped.pth" else named, tmp_path / file)
    loaded = build(f"{own}:plain", str(tmp_path / file)).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in source.items())


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("writer", [pickle.dump, torch.save], ids=["pickle", "torch"])
@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_malicious_pickle_executes_nothing(tmp_path, writer, name):
    with (tmp_path / name).open("wb") as stream:
        writer({"1.weight": Trap(tmp_path / "sprung")}, stream)
    text = refusal(load_weights, network(), tmp_path / name)
    assert "cannot be read as weights" in text and name in text
    assert not (tmp_path / "sprung").exists()


def test_a_whole_pickled_network_is_refused_with_the_way_out(tmp_path):
    torch.save(network(), tmp_path / "whole.pt")
    assert "plain state dict" in refusal(load_weights, network(), tmp_path / "whole.pt")


@pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04broken"])
@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_damaged_weights_are_one_sentence(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    assert "cannot be read as weights" in refusal(load_weights, network(), tmp_path / name)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_missing_weights_are_one_sentence(tmp_path, name):
    assert "there is no weights file" in refusal(load_weights, network(), tmp_path / name)


@pytest.mark.parametrize("value", [[1, 2], {"epoch": 3}, torch.ones(3)])
def test_a_file_without_state_dict_is_one_sentence(tmp_path, value):
    torch.save(value, tmp_path / "weights.pt")
    assert "holds no state dict" in refusal(load_weights, network(), tmp_path / "weights.pt")


def test_shapes_and_names_that_do_not_fit_are_named(tmp_path):
    model, path = network(), tmp_path / "w"
    before = model[1].weight.detach().clone()
    text = refusal(fill, model, network(5).state_dict(), path)
    assert "'1.weight' is (5, 16) in the file and (3, 16) in the model" in text
    assert "'1.bias' is missing in the file" in refusal(fill, model, {"1.weight": before}, path)
    extra = {**model.state_dict(), "2.weight": before}
    assert "'2.weight' is (3, 16) in the file and missing in the model" in refusal(fill, model, extra, path)
    assert torch.equal(model[1].weight, before)


def test_a_network_with_a_part_called_module_is_filled_too(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    source, target = Wrapper(), Wrapper()
    fill(target, source.state_dict(), tmp_path)
    assert torch.equal(source.module.weight, target.module.weight)


def test_what_was_handed_in_cannot_be_rebuilt_and_says_so():
    assert "--model package.module:function" in refusal(GivenModel().build, 1, 2, [0.0], [1.0])
    assert "from Python" in refusal(GivenData().load, None)


def test_data_in_any_form_become_images():
    x, y = torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 1, 0])
    images = Images.of(x, y)
    assert as_images(images) is images
    for form in ((x, y), (x.numpy(), y.numpy()), list(zip(x, y, strict=True))):
        assert torch.equal(as_images(form).x, x) and torch.equal(as_images(form).y, y)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (torch.rand(4, 1, 2, 2) + 0.5, [0, 1, 1, 0], r"in \[0,1\]"),
        (torch.rand(4, 1, 2, 2) - 0.9, [0, 1, 1, 0], r"in \[0,1\]"),
        (torch.full((4, 1, 2, 2), float("nan")), [0, 1, 1, 0], r"in \[0,1\]"),
        (torch.ones(4, 1, 2, 2, dtype=torch.int64), [0, 1, 1, 0], "uint8 or floats"),
        (torch.rand(4, 1, 2, 2), [0, -1, 1, 0], "from -1"),
        (torch.rand(4, 1, 2, 2), [0, 1], "equally many"),
        (torch.rand(4, 1, 2, 2), [0.0, 1.0, 1.0, 0.0], "one integer per image"),
    ],
)
def test_data_that_are_wrong_are_one_sentence(x, y, said):
    with pytest.raises(UsageError, match=said):
        as_images((x, torch.tensor(y)))
