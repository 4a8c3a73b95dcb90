import pytest
import torch

from doubly.errors import UsageError
from doubly.models import Normalize


def test_normalizes_each_channel_and_stores_its_numbers():
    layer = Normalize((0.5, 0.2), (0.25, 2.0))
    x = torch.tensor([1.0, 0.6]).view(1, 2, 1, 1)
    assert torch.allclose(layer(x).flatten(), torch.tensor([2.0, 0.2]))
    assert set(layer.state_dict()) == {"mean", "std"}
    assert not list(layer.parameters())


def test_numbers_and_images_that_do_not_fit_are_refused():
    nan, infinity = float("nan"), float("inf")
    for mean, std in (
        *(((0.5,), (0.0,)), ((0.5,), (-1.0,)), ((0.5,), (nan,)), ((infinity,), (1.0,))),
        *(((0.5,), (1.0, 1.0)), ((), ())),
    ):
        with pytest.raises(UsageError, match="standard deviation"):
            Normalize(mean, std)
    with pytest.raises(UsageError, match="built for 3 channels"):
        Normalize((0.5,) * 3, (0.5,) * 3)(torch.rand(2, 1, 8, 8))
