"""Writers of small datasets in their original formats. A part is (x, y): uint8 x (N, C, H, W), y from 0."""

import csv
import gzip
import io
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy.io import savemat

THINGS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FINE = [f"fine_{k}" for k in range(100)]
COARSE = [f"coarse_{k}" for k in range(20)]


class Frame(NamedTuple):
    """One GTSRB image; a track is several photographs of one sign."""

    pixels: np.ndarray  # (3, H, W)
    label: int
    track: int = 0
    number: int = 0


def part(seed, n, shape=(3, 32, 32), classes=10):
    """Random images, so that no two axes look alike; the labels begin with the lowest and the highest."""
    random = np.random.default_rng(seed)
    y = random.integers(classes, size=n)
    y[:2] = 0, classes - 1
    return random.integers(256, size=(n, *shape), dtype=np.uint8), y


def sign(seed, label, track=0, number=0, size=(32, 32)):
    return Frame(np.random.default_rng(seed).integers(256, size=(3, *size), dtype=np.uint8), label, track, number)


def opcodes(value):
    """Return the pickle opcodes that Python 2 wrote for a value at protocol 2; bytes are its strings."""
    match value:
        case dict():
            return b"}(" + b"".join(opcodes(part) for pair in value.items() for part in pair) + b"u"
        case list():
            return b"](" + b"".join(map(opcodes, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(opcodes, value)) + b"t"
        case bytes():
            short = len(value) < 256
            return (b"U" if short else b"T") + len(value).to_bytes(1 if short else 4, "little") + value
        case None:
            return b"N"
        case int():
            return b"J" + value.to_bytes(4, "little", signed=True)
        case np.ndarray():
            return array(value.shape, b"u1", opcodes(value.tobytes()))
    raise TypeError(value)


def array(shape, code, raw, dtype_state=(3, b"|", None, None, None, -1, -1, 0)):
    """Return the opcodes of an array as numpy wrote it in 2009; `raw` are the opcodes of its content."""
    head = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + opcodes((0,)) + opcodes(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + opcodes((code, 0, 1)) + b"R" + opcodes(dtype_state) + b"b"
    return head + b"(" + opcodes(1) + opcodes(tuple(shape)) + dtype + b"\x89" + raw + b"tb"


def pickled(value):
    return b"\x80\x02" + opcodes(value) + b"."


def cifar_batch(path, part, title, labels=b"labels", **more):
    x, y = part
    batch = {b"batch_label": title, labels: [int(k) for k in y], b"data": x.reshape(len(x), -1)}
    path.write_bytes(pickled(batch | {key.encode(): value for key, value in more.items()}))


def cifar10_python(root, batches, test, names=THINGS):
    folder = _folder(root, "cifar-10-batches-py")
    for number, part in enumerate(batches, 1):
        cifar_batch(folder / f"data_batch_{number}", part, f"training batch {number} of 5".encode(), filenames=[b"a"])
    cifar_batch(folder / "test_batch", test, b"testing batch 1 of 1", filenames=[b"b"])
    meta = {b"num_cases_per_batch": 10000, b"label_names": [name.encode() for name in names], b"num_vis": 3072}
    (folder / "batches.meta").write_bytes(pickled(meta))


def cifar10_binary(root, batches, test, names=THINGS):
    folder = _folder(root, "cifar-10-batches-bin")
    for number, part in enumerate(batches, 1):
        (folder / f"data_batch_{number}.bin").write_bytes(_records(*part))
    (folder / "test_batch.bin").write_bytes(_records(*test))
    (folder / "batches.meta.txt").write_text("\n".join(names) + "\n\n")


def cifar100_python(root, train, test, names=FINE):
    folder = _folder(root, "cifar-100-python")
    for name, part, title in (("train", train, b"training batch 1 of 1"), ("test", test, b"testing batch 1 of 1")):
        coarse = [int(k) // 5 for k in part[1]]
        cifar_batch(folder / name, part, title, b"fine_labels", coarse_labels=coarse, filenames=[b"c"])
    meta = {b"fine_label_names": names, b"coarse_label_names": COARSE}
    (folder / "meta").write_bytes(pickled({key: [name.encode() for name in value] for key, value in meta.items()}))


def cifar100_binary(root, train, test, names=FINE):
    folder = _folder(root, "cifar-100-binary")
    for name, (x, y) in (("train", train), ("test", test)):
        (folder / f"{name}.bin").write_bytes(_records(x, y // 5, y))
    (folder / "fine_label_names.txt").write_text("\n".join(names) + "\n")
    (folder / "coarse_label_names.txt").write_text("\n".join(COARSE) + "\n")


def svhn(root, train, test, compressed=True):
    folder = _folder(root, "svhn")
    for name, (x, y) in (("train", train), ("test", test)):
        labels = np.where(y == 0, 10, y).astype(np.uint8)[:, None]
        matrices = {"X": x.transpose(2, 3, 1, 0), "y": labels}
        savemat(folder / f"{name}_32x32.mat", matrices, do_compression=compressed)


def stl10(root, train, test, names=None):
    folder = _folder(root, "stl10_binary")
    for name, (x, y) in (("train", train), ("test", test)):
        (folder / f"{name}_X.bin").write_bytes(x.transpose(0, 1, 3, 2).tobytes())
        (folder / f"{name}_y.bin").write_bytes((y + 1).astype(np.uint8).tobytes())
    if names:
        (folder / "class_names.txt").write_text("\n".join(names) + "\n")


def gtsrb_original(root, train, test):
    """Write PPM images and tables with semicolons; the test labels come in a separate archive."""
    folder = _folder(root, "gtsrb/GTSRB/Final_Training/Images")
    for label in range(43):
        frames = [frame for frame in train if frame.label == label]
        names = [f"{frame.track:05d}_{frame.number:05d}.ppm" for frame in frames]
        _signs(folder / f"{label:05d}", f"GT-{label:05d}.csv", frames, names)
    names = [f"{number:05d}.ppm" for number in range(len(test))]
    images = _folder(root, "gtsrb/GTSRB/Final_Test/Images")
    _signs(images, "GT-final_test.csv", test, names)
    (images / "GT-final_test.csv").rename(root / "gtsrb" / "GT-final_test.csv")


def gtsrb_mirror(root, train, test):
    """Write PNG images and two tables, as mirrors of the dataset have them."""
    folder = _folder(root, "gtsrb")
    paths = [f"Train/{f.label}/{f.label:05d}_{f.track:05d}_{f.number:05d}.png" for f in train]
    for name, frames, places in (
        ("Train.csv", train, paths),
        ("Test.csv", test, [f"Test/{number:05d}.png" for number in range(len(test))]),
    ):
        for frame, place in zip(frames, places, strict=True):
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(frame.pixels.transpose(1, 2, 0)).save(folder / place)
        _table(folder / name, frames, places, "Path", last=True, delimiter=",")


def mnist(root, train, test, zipped=True, folder="mnist"):
    for name, (x, y) in (("train", train), ("t10k", test)):
        for kind, values in (("images-idx3", x[:, 0]), ("labels-idx1", y)):
            path = _folder(root, folder) / f"{name}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(idx(values), mtime=0) if zipped else idx(values))


def idx(values):
    shape = b"".join(length.to_bytes(4, "big") for length in values.shape)
    return bytes((0, 0, 8, values.ndim)) + shape + values.astype(np.uint8).tobytes()


def _folder(root, name):
    folder = Path(root) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _records(x, *labels):
    columns = [np.asarray(y, np.uint8)[:, None] for y in labels]
    return np.concatenate([*columns, x.reshape(len(x), -1)], axis=1).tobytes()


def _signs(folder, table, frames, names):
    folder.mkdir(exist_ok=True)
    for frame, name in zip(frames, names, strict=True):
        _, height, width = frame.pixels.shape
        head = f"P6\n{width} {height}\n255\n".encode()
        (folder / name).write_bytes(head + frame.pixels.transpose(1, 2, 0).tobytes())
    _table(folder / table, frames, names, "Filename", last=False, delimiter=";")


def _table(path, frames, names, column, last, delimiter):
    """Write a table of images; the name of the file is the first column of the authors, the last of mirrors."""
    measures = ["Width", "Height", "Roi.X1", "Roi.Y1", "Roi.X2", "Roi.Y2", "ClassId"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow([*measures, column] if last else [column, *measures])
        for frame, name in zip(frames, names, strict=True):
            _, height, width = frame.pixels.shape
            row = [width, height, 5, 5, width - 5, height - 5, frame.label]
            writer.writerow([*row, name] if last else [name, *row])


def tar_shard(path, x, y, **more):
    """Write images and labels as WebDataset does: KEY.png and KEY.cls; `more` are further members by name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    members = {name.replace("__", "."): content for name, content in more.items()}
    for number, (image, label) in enumerate(zip(x, y, strict=True)):
        picture = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(picture, "png")
        members |= {f"{number:04d}.png": picture.getvalue(), f"{number:04d}.cls": str(label).encode()}
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
