import pickle
import zipfile

import pytest
import safetensors.torch
import torch
from torch import nn

from doubly import reading
from doubly.errors import UsageError
from doubly.models.weights import fill_model, load_weights

FILES = ("weights.pt", "weights.safetensors")


def network(classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))


def refused(call, *arguments):
    """Return the message."""
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_are_read_in_every_plain_form(tmp_path):
    source = network().state_dict()
    safetensors.torch.save_file(source, tmp_path / "weights.safetensors")
    torch.save({"state_dict": source, "epoch": 3}, tmp_path / "wrapped.pth")
    for name, prefix in (("plain.pt", ""), ("parallel.pt", "module."), ("compiled.pt", "_orig_mod.")):
        torch.save({prefix + key: value for key, value in source.items()}, tmp_path / name)
    for path in tmp_path.iterdir():
        load_weights(model := network(), path)
        assert all(torch.equal(model.state_dict()[key], value) for key, value in source.items()), path.name


def test_a_part_called_module_keeps_its_name(tmp_path):
    source, target = (nn.ModuleDict({"module": nn.Linear(2, 2)}) for _ in range(2))
    fill_model(target, source.state_dict(), tmp_path)
    assert torch.equal(source["module"].weight, target["module"].weight)


class Trap:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_is_refused_and_not_executed(tmp_path):
    for write in (pickle.dump, torch.save):
        for name in FILES:
            with (tmp_path / name).open("wb") as stream:
                write({"1.weight": Trap(tmp_path / "sprung")}, stream)
            message = refused(load_weights, network(), tmp_path / name)
            assert "cannot be read as weights" in message and name in message
            assert not (tmp_path / "sprung").exists()
    torch.save(network(), tmp_path / "network.pt")
    assert "plain state dict" in refused(load_weights, network(), tmp_path / "network.pt")


def test_missing_damaged_and_other_files_are_refused(tmp_path):
    for name in FILES:
        assert "there is no weights file" in refused(load_weights, network(), tmp_path / name)
        for content in (b"", b"not weights", b"PK\x03\x04broken"):
            (tmp_path / name).write_bytes(content)
            assert "cannot be read as weights" in refused(load_weights, network(), tmp_path / name)
    for value in ([1, 2], {"epoch": 3}, torch.ones(3)):
        torch.save(value, tmp_path / "weights.pt")
        assert "holds no state dict" in refused(load_weights, network(), tmp_path / "weights.pt")


def test_names_and_shapes_that_do_not_fit_are_named_and_change_nothing(tmp_path):
    model = network()
    before = model[1].weight.detach().clone()
    for tensors, text in (
        (network(5).state_dict(), "'1.weight' is (5, 16) in the file and (3, 16) in the model"),
        ({"1.weight": before}, "'1.bias' is missing in the file"),
        ({**model.state_dict(), "2.weight": before}, "'2.weight' is (3, 16) in the file and missing in the model"),
    ):
        assert text in refused(fill_model, model, tensors, tmp_path / "weights")
    assert torch.equal(model[1].weight, before)


def test_tensors_without_a_name_of_text_complex_ones_and_bombs_are_refused(tmp_path, monkeypatch):
    good, path = network().state_dict(), tmp_path / "weights.pt"
    for tensors, sentence in [
        ({0: torch.zeros(1), **good}, "names a tensor 0, and names are text"),
        ({**good, "1.bias": torch.zeros(3, dtype=torch.complex64)}, "complex numbers in '1.bias'"),
        ({**good, "1.bias": torch.zeros(3).to_sparse()}, "layout torch.sparse_coo in '1.bias'"),
        ({**good, "1.bias": 1j}, "holds no state dict"),
        ({"state_dict": {1: torch.zeros(1)}}, "names a tensor 1"),
    ]:
        torch.save(tensors, path)
        assert sentence in refused(load_weights, network(), path), sentence
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data/0", bytes(2**22))
    monkeypatch.setattr(reading, "MAX_UNPACKED_BYTES", 2**20)
    assert "weights.pt would become 4 MiB" in refused(load_weights, network(), path)
