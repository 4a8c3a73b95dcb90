"""Facts about published datasets: where their files come from, their checksums, and how many images they have."""

from collections.abc import Mapping
from typing import NamedTuple


class Download(NamedTuple):
    """A file to download."""

    url: str
    md5: str
    into: str = "."  # folder inside the root; archives are unpacked there
    unpacked: str | None = None  # file or folder, inside the root, that an archive contains; None for a plain file

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.url.rpartition("/")[2]


class Published(NamedTuple):
    """A published dataset."""

    name: str
    train: int  # number of training images
    test: int  # number of test images
    downloads: tuple[Download, ...]
    md5: Mapping[str, str]  # checksums of the files that are read, by name
    classes: int = 10
    shape: tuple[int, int, int] = (3, 32, 32)


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_SVHN = "http://ufldl.stanford.edu/housenumbers"
_ERDA = "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

_SVHN_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def _files(base: str, md5: Mapping[str, str], into: str) -> tuple[Download, ...]:
    return tuple(Download(f"{base}/{name}", digest, into) for name, digest in md5.items())


PUBLISHED: dict[str, Published] = {
    "cifar10": Published(
        "cifar10",
        50_000,
        10_000,
        (
            Download(
                f"{_TORONTO}/cifar-10-python.tar.gz",
                "c58f30108f718f92721af3b95e74349a",
                unpacked="cifar-10-batches-py",
            ),
        ),
        {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
            "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
        },
    ),
    "cifar100": Published(
        "cifar100",
        50_000,
        10_000,
        (
            Download(
                f"{_TORONTO}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", unpacked="cifar-100-python"
            ),
        ),
        {
            "train": "16019d7e3df5f24257cddd939b257f8d",
            "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
            "meta": "7973b15100ade9c7d40fb424638fde48",
        },
        classes=100,
    ),
    "svhn": Published("svhn", 73_257, 26_032, _files(_SVHN, _SVHN_MD5, "svhn"), _SVHN_MD5),
    "stl10": Published(
        "stl10",
        5_000,
        8_000,
        (
            Download(
                "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
                "91f7769df0f17e558f3565bffb0c7dfb",
                unpacked="stl10_binary",
            ),
        ),
        {
            "train_X.bin": "918c2871b30a85fa023e0c44e0bee87f",
            "train_y.bin": "5a34089d4802c674881badbb80307741",
            "test_X.bin": "7f263ba9f9e0b06b93213547f721ac82",
            "test_y.bin": "36f9794fa4beb8a2c72628de14fa638e",
        },
        shape=(3, 96, 96),
    ),
    "gtsrb": Published(
        "gtsrb",
        39_209,
        12_630,
        (
            Download(
                f"{_ERDA}/GTSRB_Final_Training_Images.zip",
                "f33fd80ac59bff73c82d25ab499e03a3",
                "gtsrb",
                "gtsrb/GTSRB/Final_Training",
            ),
            Download(
                f"{_ERDA}/GTSRB_Final_Test_Images.zip",
                "c7e4e6327067d32654124b0fe9e82185",
                "gtsrb",
                "gtsrb/GTSRB/Final_Test",
            ),
            Download(
                f"{_ERDA}/GTSRB_Final_Test_GT.zip",
                "fe31e9c9270bbcd7b84b7f21a9d9d9e5",
                "gtsrb",
                "gtsrb/GT-final_test.csv",
            ),
        ),
        {},  # its archives have checksums, the images in them do not
        classes=43,
    ),
    "mnist": Published("mnist", 60_000, 10_000, _files(_MNIST, _MNIST_MD5, "mnist"), _MNIST_MD5, shape=(1, 28, 28)),
    "fashion_mnist": Published(
        "fashion_mnist",
        60_000,
        10_000,
        _files(_FASHION, _FASHION_MD5, "fashion_mnist"),
        _FASHION_MD5,
        shape=(1, 28, 28),
    ),
}
