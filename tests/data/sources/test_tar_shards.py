"""Tar files as WebDataset writes them: patterns, splits, and what is refused."""

import io
import tarfile

import numpy as np
import pytest
import torch

import dataset_writers as write
from doubly.cli.sources import source_of
from doubly.data import TarShards
from doubly.errors import UsageError


def images(seed, n, size=6):
    return np.random.default_rng(seed).integers(256, size=(n, 3, size, size), dtype=np.uint8), np.arange(n) % 3


def test_patterns_and_folders_give_the_images_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = [images(k, 6) for k in range(3)]
    for k, part in enumerate(parts):
        write.tar_shard(tmp_path / "shards" / f"{k:03d}.tar", *part, note__json=b"{}", readme__txt=b"passed over")
    source = source_of("shards/{000..002}.tar", None)
    splits = source.load(None)
    assert isinstance(source, TarShards) and (len(splits.train), len(splits.test)) == (14, 4)  # 6 of a class: 1.2
    x, ids = torch.cat([splits.train.x[:], splits.test.x[:]]), torch.cat([splits.train.ids, splits.test.ids])
    assert np.array_equal(x[ids.argsort()].numpy(), np.concatenate([part[0] for part in parts]))
    assert source_of("shards", None).load(None).test.sha256() == splits.test.sha256()
    assert len(source_of("shards/{000..001}.tar", None).load(None).train) < len(splits.train)
    assert len(source_of("shards/000.tar", None).load(None).train) < len(splits.train)
    write.tar_shard(tmp_path / "shards" / "val-0.tar", *images(9, 3))
    named = TarShards("shards", size=4, classes=("a", "b", "c")).load(None)
    assert len(named.train) == 18 and len(named.test) == 3 and named.test.classes == ("a", "b", "c")
    assert named.train.x.shape[1:] == (3, 4, 4)


def test_damaged_and_hostile_shards_are_refused_in_a_sentence(tmp_path):
    x, y = images(0, 6)
    bomb = tarfile.TarInfo("0.png")
    bomb.size = 2**50
    cases = [
        (
            lambda file: write.tar_shard(file, x, ["one"] * 6),
            r"the label 'one' for '0000': a .cls file holds one whole",
        ),
        (lambda file: write.tar_shard(file, x, [-1] * 6), r"the label '-1'"),
        (lambda file: write.tar_shard(file, x, [10**8] * 6), r"the label '100000000'"),
        (lambda file: write.tar_shard(file, x, y, odd__png=b"PNG"), r"has no label \(.cls\) for the sample 'odd'"),
        (lambda file: write.tar_shard(file, x, y, odd__cls=b"1"), r"has no image for the sample 'odd'"),
        (lambda file: write.tar_shard(file, x, y, odd__cls=b"1" * 99), r"'odd.cls' is larger than 20 bytes"),
        (lambda file: write.tar_shard(file, x, y, odd__cls=b"1", odd__png=b"no"), r"odd cannot be read as an image"),
        (lambda file: write.tar_shard(file, x[:0], y[:0], a__txt=b""), r"has no images KEY.jpg with labels KEY.cls"),
        (lambda file: file.write_bytes(b"damaged" * 200), r"cannot be read as a tar file"),
        (lambda file: file.write_bytes(bomb.tobuf() + bytes(512)), r"cannot be read as a tar file \(unexpected end"),
    ]
    file = tmp_path / "a.tar"
    for damage, sentence in cases:
        damage(file)
        with pytest.raises(UsageError, match=sentence):
            TarShards("a.tar").load(tmp_path)
    write.tar_shard(tmp_path / "b.tar", *images(0, 6, 8))
    write.tar_shard(file, x, y)
    with tarfile.open(tmp_path / "link.tar", "w") as shard:  # links are passed over, whatever they name
        for name in ("0.png", "0.cls"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            shard.addfile(member, io.BytesIO())
    (tmp_path / "empty").mkdir()
    for call, sentence in (
        (lambda: TarShards(".").load(tmp_path), r"an image of 8x8 pixels among others of 6x6: give the size"),
        (lambda: TarShards("link.tar").load(tmp_path), r"has no images KEY.jpg"),
        (lambda: TarShards("empty").load(tmp_path), r"empty has no .tar files"),
        (lambda: TarShards("{0..3}.tar").load(tmp_path), r"there is no file .*0.tar of the 4 that"),
        (lambda: TarShards("{3..0}.tar").load(tmp_path), r"names files from 3 to 0: write the smaller number first"),
        (lambda: TarShards("a.tar", classes=("a", "b")).load(tmp_path), r"has the label 2 and there are 2 classes"),
        (lambda: TarShards(size=0), r"size is a number of pixels above 0"),
        (lambda: TarShards(test_share=1.0), r"test_share lies inside"),
    ):
        with pytest.raises(UsageError, match=sentence):
            call()
