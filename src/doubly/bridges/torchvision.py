"""Models of torchvision with their default weights, read weights-only. Not run here: see docs/bridges.md."""

from typing import Any

from doubly.bridges.models import FoundModel, attempt, library_of


def find(name: str) -> FoundModel:
    """Load a pretrained classifier of torchvision; mean, std and size are those of its transforms."""
    title, models = f"torchvision:{name}", library_of("torchvision").models
    weights = attempt(
        title, lambda: models.get_model_weights(name).DEFAULT, "check the name with torchvision.models.list_models()"
    )
    labels = tuple(weights.meta["categories"])

    def load() -> Any:
        model = models.get_model(name, weights=None, num_classes=len(labels))
        model.load_state_dict(weights.get_state_dict(progress=False, check_hash=True, weights_only=True))
        return model.eval()

    model = attempt(
        title, load, "check the network, or fetch the weights elsewhere into ~/.cache/torch/hub/checkpoints"
    )
    transforms = weights.transforms()
    size = int(transforms.crop_size[0])
    mean, std = (tuple(float(value) for value in values) for values in (transforms.mean, transforms.std))
    return FoundModel(title, model, len(labels), labels, (size, size), mean, std)
