"""Images from files on disk are the images that would be in memory, and a broken cache never passes for a whole one."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubly.data import ImageFolder, PadCropFlip
from doubly.data.loader import batches
from doubly.data.mapped_pixels import MappedPixels
from doubly.data.sources import shards
from doubly.data.sources.decoding import decode_images
from doubly.data.sources.shards import MAX_UNUSED_DAYS, open_shards
from doubly.errors import UsageError

BYTES = 3 * 5 * 6  # of one picture
PER_SHARD = 4


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "MAX_SHARD_BYTES", PER_SHARD * BYTES + 7)  # 7 bytes are less than another picture
    monkeypatch.setattr("doubly.data.sources.folder.decode_images", by_threes)


def by_threes(files, size, fit):
    """Chunks that end elsewhere than the shards do."""
    return decode_images(files, size, fit, chunk=3)


def on_disk(root, **options):
    return ImageFolder(memory=0.0, **options).load(root).train


def in_memory(root, **options):
    return ImageFolder(memory=1.0, **options).load(root).train


def equal_batches(one, other, **options):
    first, second = (list(batches(images, 5, seed=1, epoch=2, **options)) for images in (one, other))
    return len(first) == len(second) > 0 and all(
        torch.equal(a, b) and a.dtype is b.dtype and a.stride() == b.stride()
        for p, q in zip(first, second, strict=True)
        for a, b in zip(p, q, strict=True)
    )


def refused(call, *texts):
    with pytest.raises(UsageError) as caught:
        call()
    for text in texts:
        assert str(text) in str(caught.value)


def test_images_on_disk_are_those_in_memory(root):
    inside, outside = in_memory(root), on_disk(root)
    assert isinstance(inside.x, torch.Tensor) and isinstance(outside.x, MappedPixels)
    assert [len(shard) for shard in outside.x.shards] == [PER_SHARD] * 6
    assert outside.x.shape == inside.x.shape and outside.x.dtype is torch.uint8 and outside.x.ndim == 4
    assert outside.x.numel() == inside.x.numel() and len(outside.x) == len(outside) == 24
    assert torch.equal(outside.x[:], inside.x) and torch.equal(outside.y, inside.y)
    assert torch.equal(outside.ids, inside.ids) and outside.classes == inside.classes
    assert outside.sha256() == inside.sha256() and outside.fingerprint() == inside.fingerprint()
    assert outside.channel_statistics() == inside.channel_statistics()
    unsplit = [ImageFolder("train", memory=memory).load(root) for memory in (1.0, 0.0)]
    for one, other in ((unsplit[0].train, unsplit[1].train), (unsplit[0].test, unsplit[1].test)):
        assert isinstance(other.x, MappedPixels) and one.sha256() == other.sha256() and torch.equal(one.ids, other.ids)


def test_batches_from_disk_are_those_from_memory(root):
    inside, outside, some = in_memory(root), on_disk(root), [20, 3, 4, 5, 19, 8, 9, 0, 23, 11, 12, 13]
    for augment in (None, PadCropFlip(1)):
        for probabilities in (None, torch.tensor([0.6, 0.3, 0.1])):
            for start, channels_last in ((0, False), (0, True), (2, False)):
                options = {"augment": augment, "probabilities": probabilities}
                options |= {"start": start, "channels_last": channels_last}
                assert equal_batches(inside, outside.to("cpu"), **options)
                assert equal_batches(inside.subset(some), outside.subset(some), **options)


def test_subsets_read_nothing_and_are_those_in_memory(root):
    inside, outside = in_memory(root), on_disk(root)
    mask = torch.arange(24) % 3 == 1
    for index in ([23, 0, 7, 7, 8], [], mask, mask.numpy(), torch.zeros(24, dtype=torch.bool), [-1, 2]):
        one, other = inside.subset(index), outside.subset(index)
        assert all(a is b for a, b in zip(other.x.shards, outside.x.shards, strict=True))
        assert torch.equal(other.x[:], one.x) and torch.equal(other.ids, one.ids) and torch.equal(other.y, one.y)
        assert other.sha256() == one.sha256() and other.x.shape == one.x.shape
        assert torch.equal(other.pixels(slice(None)), one.pixels(slice(None)))
    one, other = (images.subset(mask).subset([6, 1, 2]).subset([True, False, True]) for images in (inside, outside))
    assert other.ids.tolist() == one.ids.tolist() == [19, 7] and torch.equal(other.x[:], one.x)


def test_changing_what_was_read_changes_nothing_on_disk(root):
    images = on_disk(root)
    before = images.sha256()
    images.x[:4].zero_()
    images.x[torch.tensor([5])].zero_()
    assert images.sha256() == before == on_disk(root).sha256()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")
def test_the_shards_are_mapped_and_not_loaded(root, cache):
    images = on_disk(root)
    files = sorted((cache / "shards").glob("*/*.bin"))
    assert len(files) == 6 + 2 and len(images.x.shards) == 6
    # The test set of that load is gone, and with it its mapping.
    assert sum(str(path) in Path("/proc/self/maps").read_text() for path in files) >= 6


positions = st.integers(-8, 7)


@given(
    st.integers(1, 9),
    st.one_of(
        st.lists(positions, max_size=12).map(lambda rows: torch.tensor(rows, dtype=torch.int64)),
        st.lists(st.booleans(), min_size=8, max_size=8).map(torch.tensor),
        st.builds(slice, st.none() | positions, st.none() | positions, st.none() | st.integers(1, 3)),
    ),
)
@settings(max_examples=50)
def test_shards_are_indexed_like_one_tensor(length, index):
    x = torch.arange(8 * 4, dtype=torch.uint8).view(8, 1, 2, 2)
    pixels = MappedPixels.of(x.split(length))
    assert torch.equal(pixels[index], x[index])
    if isinstance(index, torch.Tensor):
        part = pixels.subset(index)
        assert torch.equal(part[:], x[index]) and part.shape == x[index].shape and len(part) == len(x[index])
        assert torch.equal(part[1:3], x[index][1:3]) and part.numel() == x[index].numel()


def test_shards_are_written_once(root, monkeypatch, cache):
    expected = on_disk(root).sha256()
    assert len(list((cache / "shards").iterdir())) == 2
    stamps = {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")}

    def forbidden(*arguments):
        raise AssertionError("it was built before: nothing is decoded")

    monkeypatch.setattr("doubly.data.sources.decoding.decode_image", forbidden)
    assert on_disk(root).sha256() == expected
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")} == stamps


def test_shards_are_written_again_after_a_change_of_the_files(root, cache, save, noise):
    path = root / "train" / "cow" / "4.png"

    def rewrite():
        save(path, noise("other"))

    def touch():
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))

    def replace_with_the_same_time():
        stamp = path.stat().st_mtime_ns
        save(path, noise("third"), dpi=(72, 72))  # a few bytes more
        os.utime(path, ns=(stamp, stamp))

    def add():
        save(root / "train" / "cow" / "9.png", noise("added"))

    def move():
        path.rename(root / "train" / "ant" / "x.png")

    def remove():
        (root / "train" / "ant" / "x.png").unlink()

    on_disk(root)
    for change in (rewrite, touch, replace_with_the_same_time, add, move, remove):
        built = set((cache / "shards").iterdir())
        change()
        assert on_disk(root).sha256() == in_memory(root).sha256()
        assert len(set((cache / "shards").iterdir()) - built) == 1  # the test set has not changed


def test_sizes_fits_and_folders_have_their_own_shards(root, tmp_path, monkeypatch, save, noise):
    for options in ({}, {"size": 4}, {"size": 5}, {"size": 4, "fit": "stretch"}, {"size": 4}):
        assert on_disk(root, **options).sha256() == in_memory(root, **options).sha256()
    for project in ("one", "other"):
        for label in ("a", "b"):
            for number in range(5):
                # As from an archive: equal times; and files without compression are equally large.
                save(path := tmp_path / project / "d" / label / f"{number}.ppm", noise(project, label, number))
                os.utime(path, (1e9, 1e9))
        monkeypatch.chdir(tmp_path / project)
        for folder in (None, tmp_path / project):
            assert on_disk(folder, path="d").sha256() == in_memory(folder, path="d").sha256()


def test_an_interrupted_build_leaves_nothing_that_looks_complete(root, monkeypatch, cache):
    written = []

    def interrupted(files, size, fit):
        for number, chunk in enumerate(by_threes(files, size, fit)):
            if number == 4:
                written.append(len(list(cache.rglob("*.bin"))))
                raise problem
            yield chunk

    for problem in (RuntimeError, KeyboardInterrupt, SystemExit, MemoryError):
        with monkeypatch.context() as patch:
            patch.setattr("doubly.data.sources.folder.decode_images", interrupted)
            with pytest.raises(problem):
                on_disk(root)
        assert written.pop() > 0  # it was in the middle
        assert list((cache / "shards").iterdir()) == []
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        problem = KeyboardInterrupt
        patch.setattr("doubly.data.sources.folder.decode_images", interrupted)
        patch.setattr(shards.shutil, "rmtree", lambda *arguments, **options: None)  # killed: no time to clean up
        on_disk(root)
    (leftover,) = (cache / "shards").iterdir()
    assert list(leftover.glob("*.bin"))
    (leftover / "00009.bin").write_bytes(bytes(BYTES))  # from a longer set
    assert on_disk(root).sha256() == in_memory(root).sha256()
    assert not leftover.exists()


def test_an_unreadable_picture_is_named_and_leaves_nothing(root, cache):
    path = root / "train" / "cow" / "4.png"
    path.write_bytes(b"")
    refused(lambda: on_disk(root), path)
    assert list((cache / "shards").iterdir()) == []


def test_damaged_shards_are_refused_and_can_be_deleted(root, cache):
    expected = on_disk(root).sha256()
    (folder,) = (path for path in (cache / "shards").iterdir() if (path / "00005.bin").exists())
    good = {path: path.read_bytes() for path in folder.iterdir()}

    def change(name, content):
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)

    shard = good[folder / "00000.bin"]
    contents = (shard[:-1], shard[:-BYTES], shard[: -2 * BYTES - 1], shard + bytes(BYTES), b"", None)
    damages = [{name: content} for name in ("00000.bin", "00002.bin", "00005.bin") for content in contents]
    damages += [{"shape": content} for content in (b"", b"3 5 x", b"3 0 6", None)]
    damages += [{"00001.bin": shard[:-BYTES], "00003.bin": shard + bytes(BYTES)}]  # which adds up to nothing
    damages += [{f"{number:05d}.bin": None for number in range(6)}]
    for damage in damages:
        for name, content in damage.items():
            change(name, content)
        refused(lambda: on_disk(root), folder, "damaged", "delete it")
        for path, content in good.items():
            path.write_bytes(content)
    shutil.rmtree(folder)
    assert on_disk(root).sha256() == expected


def test_shards_of_any_length(tmp_path, monkeypatch):
    for count in (1, 3, 4, 5, 8, 11):
        for limit in (1, BYTES, 4 * BYTES, 5 * BYTES - 1, 2**20):
            monkeypatch.setattr(shards, "MAX_SHARD_BYTES", limit)
            x = torch.randint(0, 256, (count, 3, 5, 6), dtype=torch.uint8)
            folder = tmp_path / "new" / f"{count}-{limit}"
            pixels = open_shards(folder, (part.numpy() for part in x.split(3)), count)
            assert torch.equal(pixels[:], x) and len(pixels.shards) == -(-count // max(1, limit // BYTES))
            assert torch.equal(open_shards(folder, iter(()), count)[:], x)


def test_two_processes_may_write_the_same_shards(tmp_path):
    """As the ranks of one training do: the second writes all of them while the first is at work."""
    x = torch.randint(0, 256, (11, 3, 5, 6), dtype=torch.uint8)
    for pause in (1, 4):

        def slow(folder=tmp_path / str(pause), pause=pause):
            for number, chunk in enumerate(x.split(3), start=1):
                yield chunk.numpy()
                if number == pause:
                    assert torch.equal(open_shards(folder, (part.numpy() for part in x.split(3)), 11)[:], x)

        assert torch.equal(open_shards(tmp_path / str(pause), slow(), 11)[:], x)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4"]


def test_the_environment_names_the_cache(root, monkeypatch, tmp_path):
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "elsewhere"))
    on_disk(root)
    in_memory(root)
    assert len(list((tmp_path / "elsewhere" / "shards").iterdir())) == 2 and not (tmp_path / "cache").exists()
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "file"))
    refused(lambda: on_disk(root), tmp_path / "file", "DOUBLY_CACHE")


def test_a_disk_that_fills_up_is_one_sentence(root, monkeypatch, cache):
    def full(folder, chunks):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "_write_shards", full)
    refused(lambda: on_disk(root), cache / "shards", "no room", "DOUBLY_CACHE")
    assert list((cache / "shards").iterdir()) == []


def test_shards_that_are_not_used_for_long_are_removed(root, cache):
    def names():
        return {path.name for path in (cache / "shards").iterdir()}

    long_ago = time.time() - (MAX_UNUSED_DAYS + 1) * 86400
    on_disk(root, size=4)
    old = names()
    (cache / "shards" / "notes").mkdir()
    for path in (cache / "shards").iterdir():
        os.utime(path, (long_ago, long_ago))
    on_disk(root, size=4)  # which is a use
    on_disk(root, size=5)
    assert names() > old | {"notes"}
    for name in old:
        os.utime(cache / "shards" / name, (long_ago, long_ago))
    on_disk(root, size=6)
    assert not names() & old and "notes" in names()
