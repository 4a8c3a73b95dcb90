import numpy as np
import torch

from doubly.data import Images
from doubly.data.contact_sheet import GAP, contact_sheet


def test_a_row_per_class_shows_its_first_images():
    x = torch.randint(0, 256, (7, 3, 50, 60), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = Images.of(x, [0, 1, 0, 1, 0, 0, 1], ["ant", "bee"])
    sheet = np.asarray(contact_sheet(images, columns=3))
    assert sheet.shape[0] == GAP + 2 * (50 + GAP)
    left = sheet.shape[1] - 3 * (60 + GAP)
    for label, place, row in ((0, 0, 0), (0, 2, 4), (1, 1, 3)):
        top, start = GAP + label * (50 + GAP), left + place * (60 + GAP)
        assert (sheet[top : top + 50, start : start + 60] == x[row].permute(1, 2, 0).numpy()).all()


def test_tiny_gray_images_are_enlarged():
    images = Images.of(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 8, 8), [0, 1])
    sheet = np.asarray(contact_sheet(images))
    assert sheet.shape[0] == GAP + 2 * (48 + GAP)
    assert (sheet[GAP : GAP + 48, -48 - GAP : -GAP] == 0).all()
