"""Image classifiers of transformers: from a folder of `save_pretrained`, or from the Hub."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from doubly.bridges.models import FoundModel, attempt, library_of
from doubly.errors import UsageError

ADVICE = "check the name and the network, or save it elsewhere with save_pretrained(folder) and give hf:./folder"


def find(name: str) -> FoundModel:
    """Load a model of transformers; only safetensors are read, and no code from the Hub is run."""
    title, folder = f"hf:{name}", Path(name)
    if name.startswith((".", "/", "~")) and not folder.expanduser().is_dir():
        raise UsageError(f"{title}: there is no folder {name}: give one that save_pretrained wrote, or hf:ORG/NAME")
    path = str(folder.expanduser()) if folder.expanduser().is_dir() else name
    transformers = library_of("hf")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports each of five attempts
    settings = {"trust_remote_code": False, "local_files_only": path != name or folder.is_dir()}
    model, info = attempt(
        title,
        lambda: transformers.AutoModelForImageClassification.from_pretrained(
            # Fused attention has no second derivatives, which DONE and repair take.
            path,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
            **settings,
        ),
        ADVICE,
    )
    if missing := sorted(info.get("missing_keys") or ()) + sorted(
        str(key) for key in info.get("mismatched_keys") or ()
    ):
        raise UsageError(
            f"{title} has no weights for {len(missing)} of its tensors ({', '.join(missing[:3])}), which would be "
            "random: give a model that was trained to classify images"
        )
    processor = _processor(title, path, settings)
    mean, std = _statistics(processor)
    labels = tuple(str(label) for _, label in sorted(model.config.id2label.items(), key=lambda item: int(item[0])))
    return FoundModel(
        title,
        model.eval(),
        int(model.config.num_labels),
        () if labels == tuple(f"LABEL_{index}" for index in range(len(labels))) else labels,
        _size(processor, model.config),
        mean,
        std,
        int(getattr(model.config, "num_channels", 0) or 3),
    )


def _processor(title: str, path: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.image_processing_utils import BaseImageProcessor

    found = attempt(
        title,
        lambda: BaseImageProcessor.get_image_processor_dict(path, local_files_only=settings["local_files_only"]),
        "its preprocessor_config.json says mean, std and size: save the image processor beside the model",
    )
    return dict(found[0])


def _statistics(processor: Mapping[str, Any]) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return mean and std of pixels in [0, 1] that equal rescaling and normalization of gray levels."""
    factor = 255 * float(processor.get("rescale_factor") or 1 / 255) if processor.get("do_rescale", True) else 255.0
    offset = 1.0 if processor.get("rescale_offset") else 0.0
    if processor.get("do_normalize", True) and processor.get("image_mean") is not None:
        means, stds = (list(processor[key]) for key in ("image_mean", "image_std"))
    elif factor == 1.0 and offset == 0:
        return None, None
    else:
        means, stds = [0.0], [1.0]
    return tuple((mean + offset) / factor for mean in means), tuple(std / factor for std in stds)


def _size(processor: Mapping[str, Any], config: Any) -> tuple[int, int] | None:
    """Return height and width that the network sees: of the crop, else of the resized image."""
    for key, flag in (("crop_size", "do_center_crop"), ("size", "do_resize")):
        size = processor.get(key) if processor.get(flag, key == "size") else None
        if isinstance(size, int):
            return size, size
        if isinstance(size, Mapping):
            if "height" in size:
                return int(size["height"]), int(size["width"])
            if "shortest_edge" in size:
                return int(size["shortest_edge"]), int(size["shortest_edge"])
    size = getattr(config, "image_size", None)
    return None if size is None else (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
