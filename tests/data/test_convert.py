import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from doubly.data import Images, as_images
from doubly.errors import UsageError


def test_images_pairs_and_datasets_become_the_same_images():
    x, y = torch.rand(6, 3, 4, 5), torch.arange(6) % 3
    images = Images.of(x, y)
    assert as_images(images) is images
    for form in ((x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), list(zip(x, y.tolist(), strict=True))):
        assert torch.equal(as_images(form).x, x) and torch.equal(as_images(form).y, y)


def test_what_is_no_set_of_images_is_refused():
    x, y = torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    for data, message in (
        (DataLoader(TensorDataset(x, y)), "DataLoader: of a DataLoader pass its dataset"),
        (iter([(x, y)]), "a map-style dataset, got"),
        (None, "got NoneType"),
        ((x, y[:2]), "4 images and 2 labels"),
        ((x + 1, y), "divide gray levels"),
        ((np.zeros((4, 1, 2, 2), np.int32), y), "int32"),
    ):
        with pytest.raises(UsageError, match=message):
            as_images(data)
