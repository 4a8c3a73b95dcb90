"""DONE in the loops of others: scikit-learn, and Lightning and the Trainer of Hugging Face where they are installed."""

import logging
import warnings
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from doubly import DONE, PGD, LinfBall, evaluate
from doubly.bridges.sklearn import RobustClassifier

features, labels = load_digits(return_X_y=True)
x, y = torch.tensor(features / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
threat = LinfBall(0.1)
method = DONE(PGD(threat, steps=3), cap=5.0)


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def lightning_model():
    import lightning.pytorch as pl

    from doubly.bridges.lightning import RobustModule

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = RobustModule(network(), method, lambda parameters: torch.optim.Adam(parameters, lr=5e-3))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=128, shuffle=True)
    pl.Trainer(max_epochs=10, accelerator="cpu", **quiet).fit(module, loader)
    return module.model


def hugging_face_model():
    from transformers import ResNetConfig, ResNetForImageClassification, TrainingArguments

    from doubly.bridges.hf_trainer import RobustTrainer

    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=10, **sizes))
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(x[:1200], y[:1200], strict=True)]
    with TemporaryDirectory() as folder:
        options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        settings = TrainingArguments(
            folder, num_train_epochs=5, per_device_train_batch_size=64, learning_rate=5e-3, **options
        )
        RobustTrainer(model, settings, train_dataset=rows, method=method).train()
    return model


def show(name, result):
    print(f"{name}: clean {result.sa:.1%}, under attack {result.ra_pgd:.1%}, weakest classes {result.ra_tail_30:.1%}")


classifier = RobustClassifier(method, epsilon=0.1, epochs=10).fit(features[:1200], labels[:1200])
show("scikit-learn", classifier.evaluate(features[1200:], labels[1200:], attacks=["pgd"]))
for name, packages, build in (
    ("lightning", ["lightning"], lightning_model),
    ("transformers", ["transformers", "accelerate"], hugging_face_model),
):
    if not all(map(find_spec, packages)):
        print(f"{name} is not installed: pip install 'doubly[{name}]'")
        continue
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # they are talkative
        warnings.simplefilter("ignore")
        model = build()
    show(name, evaluate(model, (x[1200:], y[1200:]), threat, attacks=["pgd"], trust=False))
