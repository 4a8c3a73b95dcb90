"""The settings of an evaluation."""

import pytest

from doubly.errors import UsageError
from doubly.evaluation.config import EvalConfig


def test_only_a_part_of_the_chunks_is_a_shard():
    assert EvalConfig(shard=(1, 2)).sharded and not EvalConfig().sharded


def test_refusals():
    for settings, message in (
        ({"images": 0}, "images must be at least 1, got 0"),
        ({"autoattack_images": -1}, "autoattack_images must be at least 1"),
        ({"curve_images": 0}, "curve_images must be at least 1"),
        ({"trust_images": 0}, "trust_images must be at least 1"),
        ({"max_examples": 0}, "max_examples must be at least 1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"autoattack_chunk_size": 0}, "autoattack_chunk_size must be at least 1"),
        ({"skip_images": -1}, "skip_images must be at least 0"),
        ({"tail_share": 0.0}, "tail_share is a share"),
        ({"tail_share": 30}, "tail_share is a share"),
        ({"weights_r": (1.0, 0.0)}, "weights_r are positive"),
        ({"shard": (2, 2)}, "0 <= k < n, got 2 of 2"),
        ({"tail_rounding": "up"}, "tail_rounding is one of round, floor, ceil, got 'up'"),
        ({"save_examples": "jpg"}, "save_examples is one of png, npz"),
        ({"weights_normalize": "none"}, "weights_normalize is one of batch, all, mean_one"),
    ):
        with pytest.raises(UsageError, match=message):
            EvalConfig(**settings)
