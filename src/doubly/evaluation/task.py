"""The input of one evaluation (network, images, attacks, settings), and the resources that its steps share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from doubly.callbacks import Callback
from doubly.data import Images
from doubly.data.holdout import stratified_subset
from doubly.distributed import Communicator
from doubly.errors import UsageError
from doubly.evaluation.attacks import SelectedAttacks
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.memory import MicrobatchLimit
from doubly.threat import Threat


@dataclass(frozen=True, eq=False)
class EvalTask:
    """The network and images to evaluate, and how.

    Attributes:
        model: The network; it is left as it was found.
        images: The images.
        attacks: The attacks.
        threat: The threat that they share.
        config: The settings.
        validation: Other images, on which the classes of the tail are selected as well.
        protocol: Further fields of the protocol in evaluation.json.
        extra: Further fields of evaluation.json itself.
    """

    model: nn.Module
    images: Images
    attacks: SelectedAttacks
    threat: Threat
    config: EvalConfig
    validation: Images | None = None
    protocol: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weaknesses(self) -> list[str]:
        """Sentences about attacks whose settings make them weak; pgd and margin have the same."""
        return list(dict.fromkeys(attack.weakness for attack in self.attacks.attacks.values() if attack.weakness))


@dataclass(frozen=True, eq=False)
class Resources:
    """Processes, callback and memory limit that the steps of an evaluation share.

    Attributes:
        communicator: The processes that share the work.
        callback: Called as the evaluation proceeds.
        limit: How many images fit into memory at a time.
    """

    communicator: Communicator
    callback: Callback
    limit: MicrobatchLimit


def select_images(images: Images, count: int | None, skip: int = 0) -> Images:
    """Return a part of the images that is always the same.

    Args:
        images: The images.
        count: Most images to return, in the proportions of the classes; None returns all.
        skip: Number of images at the beginning to leave out before.

    Raises:
        UsageError: If none are left.
    """
    if skip >= len(images):
        raise UsageError(f"skip_images leaves out {skip:,} of {len(images):,} images, so that none are left: lower it")
    images = images.subset(torch.arange(skip, len(images))) if skip else images
    if count is None or count >= len(images):
        return images
    return images.subset(stratified_subset(images.y, count, seed=0))
