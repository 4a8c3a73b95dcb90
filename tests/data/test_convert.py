import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, default_collate

from doubly.data import Images, as_images
from doubly.errors import UsageError


def test_images_pairs_and_datasets_become_the_same_images():
    x, y = torch.rand(6, 3, 4, 5), torch.arange(6) % 3
    images = Images.of(x, y)
    assert as_images(images) is images
    pairs, subset = list(zip(x, y.tolist(), strict=True)), SubsetRandomSampler([0])
    dicts = [{"image": image, "label": label} for image, label in pairs]
    assert len(as_images(DataLoader(TensorDataset(x, y), sampler=subset))) == 1  # not all of its dataset
    for form in (
        (x, y),
        [x, y],
        (x.numpy(), y.numpy()),
        TensorDataset(x, y),
        pairs,
        dicts,
        DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True),  # in the order of the dataset
        DataLoader(dicts, batch_size=2),
        DataLoader(pairs, batch_size=3, collate_fn=lambda batch: default_collate(batch)),
    ):
        assert torch.equal(as_images(form).x, x) and torch.equal(as_images(form).y, y)


def test_what_is_no_set_of_images_is_refused():
    x, y = torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    for data, message in (
        ([{"picture": x[0], "label": 0}], "has the keys picture, label: name the image one of image, img"),
        ([x[0]], r"an item of a dataset is a pair \(image, label\) or a dict, got Tensor"),
        (iter([(x, y)]), "a map-style dataset, got"),
        (None, "got NoneType"),
        ((x, y[:2]), "4 images and 2 labels"),
        ((x + 1, y), "divide gray levels"),
        ((np.zeros((4, 1, 2, 2), np.int32), y), "int32"),
    ):
        with pytest.raises(UsageError, match=message):
            as_images(data)
