"""Train a small network, write it as a graph, and run the graph without doubly: in ONNX Runtime, or by torch.export."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits

from doubly.bridges.graphs import export_graph
from doubly.config.serialize import with_changes
from doubly.recipes import recipe
from doubly.training.loop import train_run

images = torch.tensor(load_digits().images).float()[:300, None] / 16
labels = torch.tensor(load_digits().target)[:300]

with TemporaryDirectory() as folder:
    run = Path(folder) / "run"
    train_run(with_changes(recipe("digits.at"), {"epochs": 3, "method.attack.steps": 2, "model.width": 8}), run)
    if all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        import onnxruntime

        exported = export_graph(run, Path(folder) / "digits.onnx", "onnx")
        session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
        logits = torch.tensor(session.run(None, {"images": images.numpy()})[0])
        print(f"onnxruntime {onnxruntime.__version__}: ", end="")
    else:
        exported = export_graph(run, Path(folder) / "digits.pt2", "torch_export")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about itself
            logits = torch.export.load(exported.path).module()(images)
        print("torch.export (for ONNX: pip install 'doubly[onnx]'): ", end="")
    accuracy = (logits.argmax(1) == labels).float().mean()
    print(f"accuracy {accuracy:.1%}, logits within {exported.difference:.0e} of the network on {exported.images}")
