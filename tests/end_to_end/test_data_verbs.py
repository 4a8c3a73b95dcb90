"""doubly data fetch | inspect | imbalance, and runs on the images that a file names. The only server is our own."""

import functools
import json
import math
import re
import runpy
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from doubly.checkpoints.load import load_run
from doubly.cli.data import VERBS
from doubly.data import Digits, ExponentialImbalance, StepImbalance, load_splits
from doubly.data.download.dataset_files import md5
from doubly.data.download.published import PUBLISHED
from doubly.training.setup import prepare

write = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "data" / "originals.py")))
QUICK = [
    *("--epochs", "1", "--threads", "1", "--model.width", "2", "--device", "cpu"),
    *("--method.attack.steps", "1", "--validation.attack.steps", "1", "--validation.size", "40"),
]


def named(value):
    return " ".join(value) if isinstance(value, list) else ""


def one_sentence(err):
    assert err.count("\n") == 1 and err.startswith("doubly: ") and "Traceback" not in err, err
    return err


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def rows(out):
    """{class: (train, test)} of the table that was printed."""
    found = re.findall(r"│ (\S+) +│ ([\d,]+) +│ ([\d,]+) +│", out)
    return {name: tuple(int(count.replace(",", "")) for count in counts) for name, *counts in found}


def cells(path, height, width, classes, columns):
    """The images on a contact sheet, [class][place] -> (height, width, 3) bytes."""
    with Image.open(path) as sheet:
        assert sheet.format == "PNG"
        pixels = np.asarray(sheet.convert("RGB"))
    assert pixels.shape[0] == 2 + classes * (height + 2)
    left = pixels.shape[1] - columns * (width + 2)
    assert 10 < left < 200  # the captions
    tops = [2 + k * (height + 2) for k in range(classes)]
    lefts = [left + k * (width + 2) for k in range(columns)]
    return [[pixels[y : y + height, x : x + width] for x in lefts] for y in tops]


def ids_in(path):
    """The images that a file keeps, sorted."""
    kept = json.loads(Path(path).read_text())["kept"]
    return sorted(i for ids in kept.values() for i in ids)


@pytest.fixture
def digits():
    return Digits().load().train


@pytest.fixture
def mirror(tmp_path_factory, monkeypatch):
    """The address of a folder with a small MNIST of the right checksums, its parts, and what was asked for there."""
    monkeypatch.setenv("NO_PROXY", "*")
    folder = tmp_path_factory.mktemp("mirror")
    random = np.random.default_rng(0)
    y = np.concatenate([np.arange(10).repeat(3), [0, 0, 7]])
    parts = [(random.integers(0, 256, (len(part), 1, 28, 28), np.uint8), part) for part in (y, np.arange(10))]
    write.mnist(folder, *parts)
    asked = []

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *line): ...

        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder / "mnist")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", folder=folder, parts=parts, asked=asked)
        server.shutdown()
        thread.join()


@pytest.fixture
def small_mnist(mirror, monkeypatch):
    """From now on its files are the published ones; their number of images is not."""
    whole = PUBLISHED["mnist"]
    digests = {name: md5(mirror.folder / "mnist" / name) for name in whole.md5}
    downloads = tuple(item._replace(md5=digests[item.name]) for item in whole.downloads)
    monkeypatch.setitem(PUBLISHED, "mnist", whole._replace(downloads=downloads, md5=digests))


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_counts_digits(here, tmp_path, digits):
    code, out, err = here("data", "inspect", "digits")
    assert (code, err) == (0, "")
    splits = Digits().load()
    expected = {str(k): (int((splits.train.y == k).sum()), int((splits.test.y == k).sum())) for k in range(10)}
    assert rows(out) == expected | {"all": (len(splits.train), len(splits.test))}
    values = digits.x.numpy() / 255
    assert f"1x8x8 bytes; training mean {values.mean():.4f}, standard deviation {values.std():.4f}" in out
    assert "published" not in out
    assert "wrote digits.png" in out and files(tmp_path) == {"digits.png"}


@pytest.mark.parametrize("columns", [1, 5])
def test_the_sheet_shows_the_first_images_of_each_class(here, digits, columns):
    assert here("data", "inspect", "digits", "--output", "sheet.png", "--columns", columns)[0] == 0
    for label, row in enumerate(cells("sheet.png", 48, 48, 10, columns)):
        for cell, image in zip(row, digits.x[digits.y == label][:columns].numpy(), strict=True):
            enlarged = np.kron(image[0], np.ones((6, 6), np.uint8))
            assert (cell == enlarged[..., None]).all()


def test_a_sheet_has_twelve_columns(here):
    assert here("data", "inspect", "digits")[0] == 0
    assert all((row[11] > 0).any() and (row[11] < 255).any() for row in cells("digits.png", 48, 48, 10, 12))


def test_a_sheet_of_colors_and_of_a_class_with_few_images(here):
    x = np.random.default_rng(0).integers(0, 256, (7, 3, 40, 60), np.uint8)
    y = np.array([0, 1, 0, 1, 0, 1, 1])
    np.savez("data.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], classes=np.array(["red", "blue"]))
    code, out, _ = here("data", "inspect", "arrays", "--columns", "4")
    assert code == 0 and rows(out) == {"red": (3, 1), "blue": (4, 1), "all": (7, 2)}
    means = " ".join(f"{value:.4f}" for value in (x / 255).mean((0, 2, 3)))
    assert f"3x40x60 bytes; training mean {means}," in out
    red, blue = cells("arrays.png", 40, 60, 2, 4)
    for row, label in ((red, 0), (blue, 1)):
        for cell, image in zip(row, x[y == label], strict=False):
            assert (cell == image.transpose(1, 2, 0)).all()
    assert (red[3] == 255).all()  # there is no fourth


def test_inspect_shows_what_a_recipe_makes_of_its_data(here, tmp_path, digits):
    code, out, err = here("data", "inspect", "digits.imbalanced.at")
    assert (code, err) == (0, "") and files(tmp_path) == {"digits.imbalanced.at.png"}
    counts = [count // 5 if k < 5 else count for k, count in enumerate(torch.bincount(digits.y).tolist())]
    assert [train for name, (train, _) in rows(out).items() if name != "all"] == counts
    assert rows(out)["all"] == (sum(counts), 360)
    kept = digits.subset(StepImbalance(0.2).keep(digits.y, 10))
    sheet = cells("digits.imbalanced.at.png", 48, 48, 10, 12)
    for label in (0, 9):
        first = kept.x[kept.y == label][0, 0].numpy()
        assert (sheet[label][0][3::6, 3::6, 0] == first).all()


def test_a_field_of_the_dataset_can_be_changed(here):
    code, out, _ = here("data", "inspect", "digits", "--set", "folds=3", "--set=fold=2")
    test = Digits(2, 3).load().test
    assert code == 0 and rows(out)["all"] == (1797 - len(test), len(test))


# --- imbalance -------------------------------------------------------------------------------------------------------


def test_imbalance_writes_a_file_for_each_ratio(here, tmp_path, digits):
    words = ["--ratio", "0.1", "0.2", "0.5", "--profile", "exponential", "--seed", "1", "--output", "deep/kept"]
    code, out, err = here("data", "imbalance", "digits", *words)
    assert (code, err) == (0, "")
    paths = [f"deep/kept/digits-exponential-{ratio}-s1.json" for ratio in (0.1, 0.2, 0.5)]
    assert files(tmp_path) == set(paths)
    sizes = torch.bincount(digits.y).tolist()
    for ratio, path, line in zip((0.1, 0.2, 0.5), paths, out.splitlines(), strict=True):
        found = json.loads(Path(path).read_text())
        expected = [math.floor(size * ratio ** ((9 - k) / 9) + 1e-9) for k, size in enumerate(sizes)]
        assert [len(ids) for ids in found["kept"].values()] == expected and list(found["kept"]) == list(digits.classes)
        kept = digits.subset(ExponentialImbalance(ratio, 1).keep(digits.y, 10))
        assert ids_in(path) == kept.ids.tolist()
        label_of = dict(zip(digits.ids.tolist(), digits.y.tolist(), strict=True))
        assert all({label_of[i] for i in ids} == {k} for k, ids in enumerate(found["kept"].values()))
        assert found["dataset"] == {"kind": "dataset.digits", "fold": 0, "folds": 5}
        assert found["imbalance"] == {"kind": "imbalance.exponential", "ratio": ratio, "seed": 1}
        counts = " ".join(map(str, expected))
        assert line == f"{path}: {sum(expected):,} of {len(digits):,} images stay, by class {counts}"


def test_imbalance_is_a_step_if_nothing_is_said(here, tmp_path, digits):
    assert here("data", "imbalance", "digits", "--ratio", "1/5")[0] == 0
    assert files(tmp_path) == {"digits-step-0.2-s0.json"}
    assert ids_in("digits-step-0.2-s0.json") == digits.ids[StepImbalance(0.2).keep(digits.y, 10)].tolist()


def test_imbalance_of_a_recipe_and_of_another_fold(here):
    assert here("data", "imbalance", "digits.at", "--ratio", "0.5", "--set", "fold=3")[0] == 0
    file, train = Path("digits.at-step-0.5-s0.json"), Digits(3).load().train
    assert ids_in(file) == train.ids[StepImbalance(0.5).keep(train.y, 10)].tolist()
    assert json.loads(file.read_text())["dataset"]["fold"] == 3


# --- runs on the images of a file ------------------------------------------------------------------------------------


def train(here, output, imbalance, *words):
    change = f"data.imbalance={json.dumps(imbalance)}"
    code, _, err = here("train", "digits.at", *QUICK, "--set", change, "--output", output, *words)
    assert code == 0, err


def weights(output):
    return (Path(output) / "checkpoints" / "last" / "model.safetensors").read_bytes()


def trained_on(output):
    """The ids of the images that a run is trained on, and of its validation."""
    run = load_run(Path(output))
    found = prepare(run, load_splits(run.data), torch.device("cpu"))
    return set(found.train.ids.tolist()), set(found.validation.ids.tolist())


@pytest.fixture
def kept(here):
    words = ["--ratio", "0.2", "--profile", "exponential", "--seed", "1", "--output", "kept"]
    assert here("data", "imbalance", "digits", *words)[0] == 0
    file = "kept/digits-exponential-0.2-s1.json"
    return file, set(ids_in(file))


def test_a_run_on_the_kept_images_is_the_run_on_the_imbalance(here, kept):
    file, ids = kept
    train(here, "a", {"kind": "imbalance.selected", "file": file})
    train(here, "b", {"kind": "imbalance.exponential", "ratio": 0.2, "seed": 1})
    train(here, "c", {"kind": "imbalance.exponential", "ratio": 0.2, "seed": 2})
    assert trained_on("a")[0] == trained_on("b")[0] == ids
    assert weights("a") == weights("b") != weights("c")
    config = json.loads(Path("a/config.json").read_text())
    assert config["data"]["imbalance"] == {"kind": "imbalance.selected", "file": file}
    code, out, _ = here("data", "inspect", "digits.at", "--output", "sheet.png")
    assert code == 0 and rows(out)["all"][0] == 1437  # the recipe itself is as it was


def test_kept_images_that_are_held_out_are_not_trained_on(here, kept):
    file, ids = kept
    train(here, "a", {"kind": "imbalance.selected", "file": file}, "--data.holdout", "0.2")
    train(here, "all", {"kind": "imbalance.balanced"}, "--data.holdout", "0.2")
    mine, validation = trained_on("a")
    not_held, probe_of_all = trained_on("all")
    assert mine == ids & not_held and mine < ids
    assert validation == probe_of_all and not validation & not_held

    # A file that names these images alone makes the same run.
    found = json.loads(Path(file).read_text())
    found["kept"] = {name: [i for i in part if i in not_held] for name, part in found["kept"].items()}
    Path("rest.json").write_text(json.dumps(found))
    train(here, "b", {"kind": "imbalance.selected", "file": "rest.json"}, "--data.holdout", "0.2")
    assert weights("a") == weights("b") != weights("all")


def other_labels(found):
    found["kept"]["0"], found["kept"]["1"] = found["kept"]["1"], found["kept"]["0"]


def other_size(found):
    found["kept"]["9"].append(1797)


def fewer_classes(found):
    del found["kept"]["9"]


def empty_class(found):
    found["kept"]["9"] = []


def no_list(found):
    del found["kept"]


def no_numbers(found):
    found["kept"]["9"] = ["nine"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (other_labels, "was made for other data"),
        (other_size, "was made for other data"),
        (fewer_classes, "was made for other data"),
        (empty_class, "leaves no image of class 9"),
        (no_list, "lists no selected images"),
        (no_numbers, "lists no selected images"),
    ],
)
def test_a_file_of_kept_images_that_does_not_fit(here, tmp_path, kept, spoil, said):
    found = json.loads(Path(kept[0]).read_text())
    spoil(found)
    Path("spoilt.json").write_text(json.dumps(found))
    before = files(tmp_path)
    change = 'data.imbalance={"kind": "imbalance.selected", "file": "spoilt.json"}'
    code, _, err = here("train", "digits.at", *QUICK, "--set", change, "--output", "run")
    assert code == 2 and f"spoilt.json {said}" in one_sentence(err)
    assert files(tmp_path) - {"run/.lock"} == before


def test_a_file_of_kept_images_that_is_missing(here, tmp_path):
    change = 'data.imbalance={"kind": "imbalance.selected", "file": "nowhere.json"}'
    code, _, err = here("train", "digits.at", *QUICK, "--set", change, "--output", "run")
    assert code == 2 and "there is no file nowhere.json of selected images" in one_sentence(err)
    assert files(tmp_path) <= {"run/.lock"}


# --- fetch -----------------------------------------------------------------------------------------------------------


def test_fetched_files_can_be_inspected(here, mirror, small_mnist):
    code, out, err = here("data", "fetch", "mnist", "--data-root", "data", "--mirror", mirror.url)
    assert (code, err) == (0, "")
    names = PUBLISHED["mnist"].md5
    assert files(Path("data")) == {f"mnist/{name}" for name in names}
    assert sorted(mirror.asked) == sorted(f"/{name}" for name in names)
    for name in names:
        assert f"data/mnist/{name} is there now" in out
        assert Path("data/mnist", name).read_bytes() == (mirror.folder / "mnist" / name).read_bytes()
    assert out.splitlines()[-1] == "now: doubly data inspect mnist --data-root data"

    code, out, err = here("data", "inspect", "mnist", "--data-root", "data", "--columns", "3")
    assert (code, err) == (0, "")
    assert rows(out) == {str(k): (3 + 2 * (k == 0) + (k == 7), 1) for k in range(10)} | {"all": (33, 10)}
    assert "33 of the 60,000 published training images; 10 of the 10,000 published test images" in out
    x, y = mirror.parts[0]
    sheet = cells("mnist.png", 28, 28, 10, 3)
    assert (sheet[7][2] == x[y == 7][2, 0][..., None]).all()


def test_a_second_fetch_makes_no_request(here, mirror, small_mnist):
    words = ["data", "fetch", "mnist", "--data-root", "data", "--mirror", mirror.url]
    assert here(*words)[0] == 0
    mirror.asked.clear()
    for more in ([], ["--offline"]):
        code, out, _ = here(*words, *more)
        assert code == 0 and out.count("is there already") == 4
    assert mirror.asked == []


def test_the_cache_is_used_if_no_folder_is_named(here, mirror, small_mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "cache"))
    assert here("data", "fetch", "mnist", "--mirror", mirror.url)[0] == 0
    assert len(files(tmp_path / "cache" / "mnist")) == 4
    assert here("data", "inspect", "mnist")[0] == 0
    assert files(tmp_path) - {"mnist.png"} == {f"cache/mnist/{name}" for name in PUBLISHED["mnist"].md5}


def test_files_of_another_checksum_are_not_taken(here, mirror, tmp_path):
    code, _, err = here("data", "fetch", "mnist", "--data-root", "data", "--mirror", mirror.url)
    assert code == 2 and PUBLISHED["mnist"].downloads[0].md5 in one_sentence(err)
    assert files(tmp_path) == set()


def test_a_mirror_that_has_not_the_files(here, mirror, tmp_path):
    code, _, err = here("data", "fetch", "cifar10", "--data-root", "data", "--mirror", mirror.url)
    assert code == 2 and "404" in one_sentence(err) and "put it into data" in err
    assert files(tmp_path) == set()


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "digts"], "there is no dataset, recipe, folder or file 'digts': did you mean 'digits'?"),
        (["inspect", "digits.imbalanced.don_pgd"], "did you mean 'digits.imbalanced.done_pgd'?"),
        (["imbalance", "digts", "--ratio", "0.2"], "did you mean 'digits'?"),
        (["fetch", "cifar11"], "did you mean 'cifar10"),
        (["fetch", "digits"], "there is nothing to fetch for 'digits'"),
        (["fetch", "folder"], "there is nothing to fetch for 'folder'"),
        (["fetch", "zzz"], "valid are cifar10, cifar100,"),
        (["inspct", "digits"], "there is no verb 'data inspct': valid are fetch, inspect, imbalance"),
        (["inspect", "digits", "--columns", "0"], "columns must be at least 1, got 0"),
        (["inspect", "digits", "--columns", "-3"], "columns must be at least 1, got -3"),
        (["inspect", "digits", "--set", "fold=9"], "fold=9 of folds=5"),
        (["inspect", "digits", "--set", "flod=1"], "did you mean 'fold'?"),
        (["inspect", "digits", "--set", "fold"], "--set is written PATH=KIND or PATH=JSON"),
        (["inspect", "digits", "--set"], "--set needs a value"),
        (["imbalance", "digits", "--ratio", "0"], "ratio in (0, 1] of the images of a class, got 0"),
        (["imbalance", "digits", "--ratio", "0.2", "1.5"], "got 1.5"),
        (["imbalance", "digits", "--ratio", "-0.1"], "got -0.1"),
        (["imbalance", "digits", "--ratio", "nan"], "got nan"),
        (["imbalance", "digits", "--ratio"], "give at least one --ratio"),
        (["imbalance", "digits", "--ratio", "1/500", "--profile", "exponential"], "leaves no image of class 0"),
        (["inspect", "mnist", "--data-root", "void"], "/void`"),
        (["inspect", "cifar10.at", "--data-root", "void"], "/void`"),
        (["imbalance", "svhn", "--ratio", "0.2", "--data-root", "void"], "/void`"),
        (["inspect", "folder", "--data-root", "void"], "/void: name it"),
        (["inspect", "arrays"], "there is no file data.npz"),
        (["fetch", "mnist", "--offline", "--data-root", "void"], "/t10k-labels-idx1-ubyte.gz into void/mnist"),
    ],
    ids=named,
)
def test_input_that_can_be_mended(here, tmp_path, words, said):
    code, out, err = here("data", *words)
    assert code == 2 and said in one_sentence(err) and out == ""
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fetch"], "dataset"),
        (["inspect"], "dataset or recipe"),
        (["imbalance", "digits"], "--ratio"),
        (["imbalance", "digits", "--ratio", "few"], "few"),
        (["imbalance", "digits", "--ratio", "0.2", "--profile", "stairs"], "stairs"),
        (["inspect", "digits", "--column", "3"], "--columns"),
    ],
    ids=named,
)
def test_words_that_are_missing_or_unknown_are_explained(here, tmp_path, words, said):
    code, out, err = here("data", *words)
    assert code == 2 and said in err and "Traceback" not in err and out == ""
    assert files(tmp_path) == set()


def test_one_ratio_that_empties_a_class_stops_all(here, tmp_path):
    code, _, err = here("data", "imbalance", "digits", "--ratio", "0.5", "1/500", "--profile", "exponential")
    assert code == 2 and "leaves no image of class 0" in one_sentence(err)
    assert files(tmp_path) == set()


def test_a_dataset_that_needs_no_files_is_not_taken_for_a_slip(here):
    _, _, err = here("data", "fetch", "digits")
    assert "did you mean" not in err


@pytest.mark.parametrize("name", ["sheet", "sheet.docx"])
def test_a_sheet_in_no_format_of_images(here, tmp_path, name):
    code, _, err = here("data", "inspect", "digits", "--output", name)
    assert code == 2 and name in one_sentence(err) and files(tmp_path) == set()


def test_a_sheet_in_a_folder_that_is_not_there(here, tmp_path):
    code, _, err = here("data", "inspect", "digits", "--output", "void/sheet.png")
    assert code == 2 and "void/sheet.png" in one_sentence(err) and files(tmp_path) == set()


def test_a_file_where_the_folder_should_be(here, tmp_path):
    Path("thesis.tex").write_text("precious")
    code, _, err = here("data", "imbalance", "digits", "--ratio", "0.2", "--output", "thesis.tex")
    assert code == 2 and "thesis.tex" in one_sentence(err)
    assert files(tmp_path) == {"thesis.tex"} and Path("thesis.tex").read_text() == "precious"


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(here, tmp_path, verb, flag):
    code, out, err = here("data", verb, flag)
    assert (code, err) == (0, "") and f"usage: doubly data {verb}" in out and "--data-root" in out
    assert files(tmp_path) == set()


@pytest.mark.parametrize(("words", "code"), [([], 2), (["-h"], 0), (["--help"], 0)], ids=str)
def test_the_verbs_are_listed(here, words, code):
    found, out, err = here("data", *words)
    assert (found, err) == (code, "") and all(re.search(rf"^{verb} ", out, re.M) for verb in VERBS)
