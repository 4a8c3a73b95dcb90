import pytest
import torch

from doubly.data import Augmentation, Images, PadCropFlip
from doubly.data.loader import batches, steps_per_epoch
from doubly.errors import UsageError


def numbered(n=23, classes=3):
    """Image i is filled with i, so that a batch shows which rows it has."""
    x = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 1, 4, 4)
    return Images(
        x.contiguous(), torch.arange(n) % classes, tuple(str(k) for k in range(classes)), torch.arange(n) + 100
    )


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for p, q in zip(one, other, strict=True) for a, b in zip(p, q, strict=True)
    )


PROBABILITIES = (None, torch.tensor([0.2, 0.3, 0.5]))


def test_one_epoch_shows_each_image_once_and_keeps_the_last_batch():
    images = numbered()
    epoch = list(batches(images, 5, seed=0, epoch=0))
    assert [len(batch.y) for batch in epoch] == [5, 5, 5, 5, 3]
    assert steps_per_epoch(23, 5) == 5 and steps_per_epoch(20, 5) == 4
    ids = torch.cat([batch.ids for batch in epoch])
    assert torch.equal(ids.sort().values, images.ids)
    assert not torch.equal(ids, images.ids)
    for batch in epoch:
        assert batch.x.dtype is torch.float32
        assert torch.equal(batch.x[:, 0, 0, 0], (batch.ids - 100).float() / 255)
        assert torch.equal(batch.y, (batch.ids - 100) % 3)


def test_the_order_follows_from_seed_and_epoch():
    def ids(seed, epoch):
        return torch.cat([batch.ids for batch in batches(numbered(), 5, seed, epoch)]).tolist()

    assert ids(0, 0) == ids(0, 0)
    assert len({tuple(ids(seed, epoch)) for seed in range(2) for epoch in range(3)}) == 6


def test_a_later_start_gives_the_remaining_batches():
    for probabilities in PROBABILITIES:
        options = {"augment": PadCropFlip(1), "probabilities": probabilities}
        epoch = list(batches(numbered(), 5, 0, 2, **options))
        for start in range(7):
            assert equal(list(batches(numbered(), 5, 0, 2, start=start, **options)), epoch[start:])


def test_augmentation_changes_from_step_to_step_and_gets_stored_pixels_if_it_moves_them():
    equal_images = Images.of(torch.rand(1, 1, 6, 6).expand(8, 1, 6, 6), [0] * 8)
    one, other = batches(equal_images, 4, 0, 0, augment=PadCropFlip(2))
    assert not torch.equal(one.x, other.x)

    class Recorder(Augmentation):
        def __call__(self, x, generator):
            types.append(x.dtype)
            return x

    types = []
    for moves in (False, True):
        Recorder.moves_pixels = moves
        (batch,) = batches(numbered(), 23, 0, 0, augment=Recorder())
        assert torch.equal(batch.x[:, 0, 0, 0], (batch.ids - 100).float() / 255)
    assert types == [torch.float32, torch.uint8]


def test_channels_last_changes_the_memory_format_alone():
    images = Images.of(torch.rand(4, 3, 5, 5), [0, 1, 0, 1])
    for augment in (None, PadCropFlip(1)):
        (plain,) = batches(images, 4, 0, 0, augment=augment)
        (last,) = batches(images, 4, 0, 0, augment=augment, channels_last=True)
        assert last.x.is_contiguous(memory_format=torch.channels_last) and plain.x.is_contiguous()
        assert torch.equal(last.x, plain.x)
        assert augment is not None or torch.equal(plain.x, images.x[plain.ids])  # floats are not scaled


def test_probabilities_choose_the_class_and_then_any_image():
    images = Images.of(torch.zeros(3000, 1, 1, 1, dtype=torch.uint8), [0] * 2900 + [1] * 90 + [2] * 10)
    epoch = list(batches(images, 256, 0, 0, probabilities=torch.tensor([0.0, 0.5, 0.5])))
    y, ids = (torch.cat([batch[part] for batch in epoch]) for part in (1, 2))
    assert len(y) == 3000
    assert torch.bincount(y, minlength=3)[0] == 0
    assert (y == 1).float().mean().item() == pytest.approx(0.5, abs=0.04)
    assert torch.equal(images.y[ids], y)
    counts = torch.bincount(ids[y == 2] - 2990)
    assert len(counts) == 10 and counts.min() > 90 and counts.max() < 220  # 150 each
    assert len(ids[y == 1].unique()) == 90


def test_the_parts_of_two_processes_are_the_global_batches():
    for n in (24, 23, 21, 20, 1):
        for probabilities in PROBABILITIES if n >= 3 else (None,):
            images = numbered(max(n, 3)).subset(range(n))
            options = {"augment": PadCropFlip(1), "probabilities": probabilities}
            single = list(batches(images, 4, 0, 0, **options))
            ranks = [list(batches(images, 4, 0, 0, rank=rank, world_size=2, **options)) for rank in range(2)]
            assert len(ranks[0]) == len(ranks[1]) == steps_per_epoch(n, 4, world_size=2)
            for step, (left, right) in enumerate(zip(*ranks, strict=True)):
                assert len(left.y) == len(right.y) > 0
                joined = [torch.cat(parts) for parts in zip(left, right, strict=True)]
                assert torch.equal(joined[2], single[step].ids[: len(joined[2])])
                if len(joined[2]) == len(single[step].ids):
                    assert equal([joined], [single[step]])
            assert sum(len(batch.y) for rank in ranks for batch in rank) == n - n % 2


def test_one_left_over_image_is_no_batch_and_is_another_one_each_epoch():
    images = numbered(9)
    one, other = (torch.cat([batch.ids for batch in batches(images, 4, 0, epoch)]) for epoch in (0, 1))
    assert len(one) == len(other) == 8 == 4 * steps_per_epoch(9, 4)
    all_ids = set(images.ids.tolist())
    assert all_ids - set(one.tolist()) != all_ids - set(other.tolist())
    assert [len(batch.y) for batch in batches(numbered(10), 4, 0, 0)] == [4, 4, 2]
    assert [len(batch.y) for batch in batches(numbered(3).subset([0]), 4, 0, 0)] == [1]


def test_batches_and_probabilities_that_are_refused_at_once():
    fewer = numbered(9).subset([0, 1, 3, 4])  # without class 2
    for call, message in (
        (lambda: batches(numbered(), 5, 0, 0, world_size=2), "global batch of 5 .* multiple of 2"),
        (lambda: batches(numbered(), 0, 0, 0), "global batch of 0"),
        (lambda: batches(fewer, 2, 0, 0, probabilities=torch.tensor([0.5, 0.5])), "3 class probabilities"),
        (lambda: batches(fewer, 2, 0, 0, probabilities=torch.tensor([0.2, 0.3, 0.5])), "without images"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
