"""Evaluate an image classifier of transformers by name: a small ViT is made, saved and loaded as `hf:FOLDER`."""

import json
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from doubly import LinfBall, evaluate
from doubly.bridges.models import find_model, library_of
from doubly.errors import UsageError


def save_model(folder: Path, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train a ViT on digits for a moment, and save it with its preprocessing, as models on the Hub are."""
    transformers = library_of("hf")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    names = {"id2label": {k: str(k) for k in range(10)}, "label2id": {str(k): k for k in range(10)}}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **sizes, **names)
    model = transformers.ViTForImageClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model((x - 0.3) / 0.35).logits, y).backward()
        optimizer.step()
    model.save_pretrained(folder)
    processor = {"do_normalize": True, "image_mean": [0.3], "image_std": [0.35], "size": {"height": 8, "width": 8}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
try:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), x[:600], y[:600])
        found = find_model(f"hf:{folder}")
    print(found.sentence.replace(folder, "vit"))
    found.check_data(channels=1, classes=10)
    print(evaluate(found.network(), (x[1200:1400], y[1200:1400]), LinfBall(0.05), trust=False))
except UsageError as error:  # transformers is not installed
    print(error)
