import pytest
import torch

from doubly.errors import UsageError
from doubly.models import Normalize


def test_normalises_each_channel_and_stores_its_numbers():
    layer = Normalize((0.5, 0.2), (0.25, 2.0))
    x = torch.tensor([1.0, 0.6]).view(1, 2, 1, 1)
    assert torch.allclose(layer(x).flatten(), torch.tensor([2.0, 0.2]))
    assert set(layer.state_dict()) == {"mean", "std"}
    assert not list(layer.parameters())


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.5,), (0.0,)),
        ((0.5,), (-1.0,)),
        ((0.5,), (float("nan"),)),
        ((float("inf"),), (1.0,)),
        ((0.5,), (1.0, 1.0)),
        ((), ()),
    ],
)
def test_refuses_numbers_that_cannot_normalize(mean, std):
    with pytest.raises(UsageError, match="standard deviation"):
        Normalize(mean, std)


def test_refuses_gray_images_for_a_color_model():
    with pytest.raises(UsageError, match="built for 3 channels"):
        Normalize((0.5,) * 3, (0.5,) * 3)(torch.rand(2, 1, 8, 8))
