"""Models of RobustBench, which normalize inside and take images in [0, 1]. Not run here: see docs/bridges.md."""

from doubly.bridges.models import FoundModel, attempt, library_of
from doubly.errors import UsageError

DATASETS = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
THREATS = ("Linf", "L2", "corruptions")


def find(name: str) -> FoundModel:
    """Load a model of RobustBench: NAME of cifar10 and Linf, or DATASET/THREAT/NAME."""
    title, library = f"robustbench:{name}", library_of("robustbench")
    dataset, threat, model_name = name.split("/") if name.count("/") == 2 else ("cifar10", "Linf", name)
    if dataset not in DATASETS or threat not in THREATS:
        raise UsageError(
            f"{title} is written robustbench:NAME or robustbench:DATASET/THREAT/NAME with a dataset of "
            f"{', '.join(DATASETS)} and a threat of {', '.join(THREATS)}"
        )
    advice = "check the name in the table of RobustBench, its dataset and threat, and the network"
    model = attempt(
        title, lambda: library.load_model(model_name=model_name, dataset=dataset, threat_model=threat), advice
    )
    return FoundModel(title, model.eval(), DATASETS[dataset])
