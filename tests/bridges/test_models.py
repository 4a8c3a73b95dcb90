"""Models by name: transformers for real where it is installed, the other libraries as stand-ins of the same shape."""

import json
import sys
from collections import namedtuple
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from doubly.bridges.models import FoundModel, ResizedModel, find_model
from doubly.cli import sources
from doubly.config.serialize import from_json, to_json
from doubly.config.user_code import UntrustedModel, UserModel
from doubly.errors import UsageError
from doubly.models.weights import load_weights

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


class Net(nn.Module):
    """Logits that are the mean of each channel and 0."""

    def __init__(self, classes=4):
        super().__init__()
        self.num_classes, self.head = classes, nn.Linear(3, classes)
        self.pretrained_cfg = {"input_size": (3, 8, 8), "mean": MEAN, "std": STD, "label_names": list("abcd")}

    def forward(self, x):
        assert x.shape[-2:] == (8, 8)
        return self.head(x.mean((2, 3)))


def stand_in(library, state, monkeypatch):
    """Put a package of the documented interface in the place of a library."""

    def made(*names, **settings):
        if "nothing" in (*names, settings.get("model_name")):
            raise RuntimeError("Unknown model\nwith details")
        net = Net()
        net.load_state_dict(state)
        return net

    Transforms = namedtuple("Transforms", "crop_size mean std")
    weights = SimpleNamespace(
        meta={"categories": list("abcd")},
        transforms=lambda: Transforms([8], MEAN, STD),
        get_state_dict=lambda progress, check_hash, weights_only: state if weights_only else 1 / 0,
    )
    module = ModuleType(library)
    module.create_model = module.load_model = made
    module.models = SimpleNamespace(
        get_model_weights=lambda name: SimpleNamespace(DEFAULT=weights) if name != "nothing" else {}[name],
        get_model=lambda name, weights, num_classes: Net(num_classes),
    )
    monkeypatch.setitem(sys.modules, library, module)


def test_each_library_is_called_as_documented_and_normalizes_and_resizes(monkeypatch):
    torch.manual_seed(0)
    net, x = Net(), torch.rand(2, 3, 8, 8)
    normalized = net((x - torch.tensor(MEAN).reshape(3, 1, 1)) / torch.tensor(STD).reshape(3, 1, 1))
    for title, expected, words in (
        ("timm:resnet18", normalized, "4 classes in the order a, b, c, d, 8 × 8 pixels, mean 0.5, 0.4, 0.3, std 0.2"),
        ("torchvision:resnet18", normalized, "4 classes in the order a, b, c, d, 8 × 8 pixels, mean 0.5, 0.4, 0.3"),
        (
            "robustbench:cifar10/L2/Someone2020",
            net(x),
            "10 classes, labels not named, any size, takes images in [0, 1]",
        ),
    ):
        library = title.partition(":")[0]
        stand_in(library, net.state_dict(), monkeypatch)
        found = find_model(title)
        assert found.sentence == f"{title}: Net, {words}" or found.sentence.startswith(f"{title}: Net, {words}")
        assert torch.allclose(found.network()(x), expected, atol=1e-6)
        with pytest.raises(UsageError, match=rf"{library}:nothing cannot be loaded \(\w+Error: .*\): check the n"):
            find_model(f"{library}:nothing")
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(
            UsageError, match=rf"needs the package {library}, which is not .* pip install doubly\[{library}"
        ):
            find_model(title)
    assert ResizedModel(net, size=(8, 8))(torch.rand(2, 3, 20, 12)).shape == (2, 4)
    stand_in("timm", net.state_dict(), monkeypatch)
    built = UserModel("timm:resnet18", mean=(0.0,), std=(1.0,)).build(3, 4, [], [])  # given numbers replace the found
    assert torch.allclose(built(x), net(x)) and built.state_dict().keys() == net.state_dict().keys()


def test_models_that_do_not_fit_the_data_are_refused_in_a_sentence():
    found = FoundModel("timm:x", Net(), 4, ("a", "b", "c", "Old_Dog"), (8, 8), MEAN, STD)
    found.check_data(3, 4, ("A", "b", "c", "old dog"))
    found.check_data(3, 4, ("0", "1", "2", "3"))  # numbers say nothing about the order
    for call, sentence in (
        (lambda: found.check_data(1, 4), r"takes images with 3 channel\(s\) and the data has 1: convert"),
        (lambda: found.check_data(3, 10), r"has 4 classes and the data 10: give a model trained on these classes, or"),
        (lambda: found.check_data(3, 4, ("b", "a", "c", "old dog")), r"another order .* class 0 is 'b' and not 'a'"),
        (lambda: find_model("keras:x"), r"a model by name is written hf:NAME, timm:NAME"),
        (lambda: find_model("hf:./nowhere"), r"there is no folder ./nowhere: give one that save_pretrained wrote"),
    ):
        with pytest.raises(UsageError, match=sentence):
            call()


def test_a_configuration_of_a_stranger_loads_no_model_by_name():
    loaded = from_json(json.loads(json.dumps(to_json(UserModel("hf:org/name")))))
    assert isinstance(loaded, UntrustedModel)
    with pytest.raises(UsageError, match="'hf:org/name', which is not run because a file asks for it"):
        loaded.build(3, 10, [], [])
    assert sources.source_folder_name("hf:./some/vit", None).startswith("hf-some-vit-")


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path_factory.mktemp("hf") / "vit"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    names = {"id2label": {k: f"digit {k}" for k in range(10)}, "label2id": {f"digit {k}": k for k in range(10)}}
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **sizes, **names)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    processor = {"do_normalize": True, "image_mean": [0.3], "image_std": [0.35], "size": {"height": 8, "width": 8}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.mark.filterwarnings("ignore")
def test_transformers_models_are_read_from_a_folder(vit, cli, monkeypatch):
    import transformers

    found = find_model(f"hf:{vit}")
    assert found.sentence.endswith(
        "vit: ViTForImageClassification, 10 classes in the order digit 0, digit 1, digit 2, digit 3, digit 4, …, "
        "8 × 8 pixels, mean 0.3, std 0.35"
    )
    x = torch.rand(3, 1, 8, 8)
    theirs = transformers.ViTForImageClassification.from_pretrained(vit).eval()
    assert torch.allclose(found.network().eval()(x), theirs((x - 0.3) / 0.35).logits, atol=1e-5)
    common = ("--data", "digits", "--images", 20, "--attacks", "fgsm", "--no-trust")
    code, out, err = cli("evaluate", "--model", f"hf:{vit}", *common, "--output", vit.parent / "out")
    assert code == 0 and "10 classes in the order digit 0" in err and "RA-fgsm" in out
    for name, change, sentence in (
        (
            "pickled",
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "cannot be loaded",
        ),
        (
            "headless",
            lambda folder: _without(folder, "classifier.bias"),
            r"no weights for 1 of its tensors \(classifier.bi",
        ),
        ("bare", lambda folder: (folder / "preprocessor_config.json").unlink(), "save the image processor beside"),
        ("code", lambda folder: _ask_for_code(folder), "cannot be loaded"),
    ):
        copy = vit.parent / name
        copy.mkdir()
        for file in vit.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        change(copy)
        with pytest.raises(UsageError, match=sentence):
            find_model(f"hf:{copy}")
    monkeypatch.setattr(transformers.AutoModelForImageClassification, "from_pretrained", _offline)
    with pytest.raises(
        UsageError, match=r"cannot be loaded \(OSError: We couldn't connect\): check the name and the netw"
    ):
        find_model("hf:org/name")


def _offline(*arguments, **settings):
    assert settings["use_safetensors"] and settings["trust_remote_code"] is False
    raise OSError("We couldn't connect.\nMore")


def _without(folder, name):
    import safetensors.torch

    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors[name]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _ask_for_code(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoModelForImageClassification": "evil.Net", "AutoConfig": "evil.C"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('code was run')")


def test_foreign_checkpoints_are_unwrapped_or_refused_with_what_does_not_fit(tmp_path):
    torch.manual_seed(0)
    net, state = nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), nn.Sequential(nn.Flatten(), nn.Linear(2, 2)).state_dict()

    def prefixed(prefix):
        return {f"{prefix}{name}": t for name, t in state.items()}

    normalizer = {
        "module.normalizer.new_mean": torch.tensor([[[0.5]]]),
        "module.normalizer.new_std": torch.tensor([[[0.2]]]),
    }
    robustness = prefixed("module.model.") | prefixed("module.attacker.model.") | normalizer
    numbers = {
        "n_classes": torch.tensor(2),
        "mean": torch.zeros(1, 1),
        "std": torch.ones(1, 1),
        "eps": torch.tensor(0.03),
    }
    for content in (
        state,
        {"net": state, "acc": 91.2, "epoch": 3},
        {"model": prefixed("module."), "optimizer": {"state": {}}},
        {"model": {"state_dict": prefixed("_orig_mod.module.")}},
        {"model_state_dict": prefixed("net.")},
        {"rmodel": prefixed("model.") | numbers, "record_info": {}},
        {"rmodel": prefixed("model.module.") | numbers},
        {"model": robustness, "epoch": 1},
        {"state_dict": prefixed("module.model.")},
    ):
        nn.init.zeros_(net[1].weight)
        torch.save(content, tmp_path / "net.pt")
        found = load_weights(net, tmp_path / "net.pt")
        assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())
        assert (found is not None) == (content.get("model") is robustness)
    torch.save({"model": robustness}, tmp_path / "net.pt")
    assert [value for (value,) in load_weights(net, tmp_path / "net.pt")] == pytest.approx([0.5, 0.2])
    wrapped = nn.ModuleDict({"model": net})  # the network of ours has the prefix
    torch.save(state, tmp_path / "net.pt")
    load_weights(wrapped, tmp_path / "net.pt")
    other = {"1.weight": torch.zeros(3, 2), **{f"head.{k}": torch.zeros(1) for k in range(5)}}
    listed = (
        r"'1.weight' is \(3, 2\) in the file and \(2, 2\) in the model; of all tensors 1 missing in the file "
        r"\(1.bias\), 5 only in the file \(head.0, head.1, head.2, …\), 1 of another shape \(1.weight\); give the"
    )
    cases = [
        ({"state_dict": other}, listed),
        ({"1.weight": state["1.weight"]}, r"'1.bias' is missing in the file and \(2,\) in the model; give the weights"),
        ({"epoch": 3, "acc": 0.5}, r"holds no state dict \(epoch, acc\): save model.state_dict"),
    ]
    for content, sentence in cases:
        torch.save(content, tmp_path / "net.pt")
        with pytest.raises(UsageError, match=sentence):
            load_weights(net, tmp_path / "net.pt")
    (tmp_path / "net.onnx").write_bytes(b"\x08\x07")
    with pytest.raises(UsageError, match="is an ONNX file, which holds a graph and no state dict: give the weights of"):
        load_weights(net, tmp_path / "net.onnx")
