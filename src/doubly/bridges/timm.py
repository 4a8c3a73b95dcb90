"""Models of timm, with the mean, std and input size of their `pretrained_cfg`. Not run here: see docs/bridges.md."""

from doubly.bridges.models import FoundModel, attempt, library_of


def find(name: str) -> FoundModel:
    """Load a pretrained model of timm."""
    title, timm = f"timm:{name}", library_of("timm")
    advice = "check the name with timm.list_models(pretrained=True), and the network"
    model = attempt(title, lambda: timm.create_model(name, pretrained=True), advice).eval()
    settings = dict(model.pretrained_cfg)
    channels, height, width = settings["input_size"]
    labels = settings.get("label_names") or ()
    mean, std = (tuple(float(value) for value in settings[key]) for key in ("mean", "std"))
    return FoundModel(
        title, model, int(model.num_classes), tuple(labels), (int(height), int(width)), mean, std, int(channels)
    )
