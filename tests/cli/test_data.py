"""doubly data fetch | inspect | imbalance, and runs on the images that a file names. The only server is our own."""

import functools
import json
import math
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import dataset_writers as write
from doubly.checkpoints.load import load_run
from doubly.data import Digits, ExponentialImbalance, StepImbalance, load_splits
from doubly.data.download.dataset_files import md5
from doubly.data.download.published import PUBLISHED
from doubly.training.setup import prepare_data

QUICK = [
    *("--epochs", "1", "--threads", "1", "--model.width", "2", "--device", "cpu"),
    *("--method.attack.steps", "1", "--validation.attack.steps", "1", "--validation.size", "40"),
]


def is_one_sentence(err):
    return err.count("\n") == 1 and err.startswith("doubly: ")


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def counts(out):
    """Return {class: (train, test)} of the printed table."""
    rows = re.findall(r"│ (\S+) +│ ([\d,]+) +│ ([\d,]+) +│", out)
    return {name: tuple(int(count.replace(",", "")) for count in numbers) for name, *numbers in rows}


def cells(path, height, width, classes, columns):
    """Return the images on a contact sheet, [class][place] -> (height, width, 3) bytes."""
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
    """Return the images that a file names, sorted."""
    selected = json.loads(Path(path).read_text())["kept"]
    return sorted(i for ids in selected.values() for i in ids)


@pytest.fixture
def digits():
    return Digits().load().train


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_counts_the_images_and_draws_the_first_of_each_class(cli, tmp_path, digits):
    code, out, err = cli("data", "inspect", "digits")
    assert (code, err) == (0, "") and "wrote" not in out and files(tmp_path) == set()  # a picture only if asked for
    code, out, err = cli("data", "inspect", "digits", "--columns", 5, "--picture", "digits.png")
    assert (code, err) == (0, "") and "published" not in out
    splits = Digits().load()
    expected = {str(k): (int((splits.train.y == k).sum()), int((splits.test.y == k).sum())) for k in range(10)}
    assert counts(out) == expected | {"all": (len(splits.train), len(splits.test))}
    values = digits.x.numpy() / 255
    assert f"1x8x8 bytes; training mean {values.mean():.4f}, standard deviation {values.std():.4f}" in out
    assert "wrote digits.png" in out and files(tmp_path) == {"digits.png"}
    for label, row in enumerate(cells("digits.png", 48, 48, 10, 5)):
        for cell, image in zip(row, digits.x[digits.y == label][:5].numpy(), strict=True):
            assert (cell == np.kron(image[0], np.ones((6, 6), np.uint8))[..., None]).all()


def test_inspect_reads_a_file_of_color_images_with_any_class_names(cli):
    x = np.random.default_rng(0).integers(0, 256, (7, 3, 40, 60), np.uint8)
    y = np.array([0, 1, 0, 1, 0, 1, 1])
    np.savez("data.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2], classes=np.array(["red", "[blue]"]))
    code, out, _ = cli("data", "inspect", "arrays", "--columns", "4", "--output", "arrays.png")
    assert code == 0 and counts(out) == {"red": (3, 1), "[blue]": (4, 1), "all": (7, 2)}
    means = " ".join(f"{value:.4f}" for value in (x / 255).mean((0, 2, 3)))
    assert f"3x40x60 bytes; training mean {means}," in out
    red, blue = cells("arrays.png", 40, 60, 2, 4)
    for row, label in ((red, 0), (blue, 1)):
        for cell, image in zip(row, x[y == label], strict=False):
            assert (cell == image.transpose(1, 2, 0)).all()
    assert (red[3] == 255).all()  # there is no fourth


def test_inspect_shows_what_a_recipe_or_a_changed_field_makes_of_the_data(cli, tmp_path, digits):
    code, out, err = cli("data", "inspect", "digits.imbalanced.at", "--picture", "sheet.png")
    assert (code, err) == (0, "") and files(tmp_path) == {"sheet.png"}
    sizes = [count // 5 if k < 5 else count for k, count in enumerate(torch.bincount(digits.y).tolist())]
    assert [train for name, (train, _) in counts(out).items() if name != "all"] == sizes
    assert counts(out)["all"] == (sum(sizes), 360)
    subset = digits.subset(StepImbalance(0.2).keep(digits.y, 10))
    sheet = cells("sheet.png", 48, 48, 10, 12)
    for label in (0, 9):
        assert (sheet[label][0][3::6, 3::6, 0] == subset.x[subset.y == label][0, 0].numpy()).all()
    code, out, _ = cli("data", "inspect", "digits", "--set", "folds=3", "--set=fold=2")
    test = Digits(2, 3).load().test
    assert code == 0 and counts(out)["all"] == (1797 - len(test), len(test))


# --- imbalance -------------------------------------------------------------------------------------------------------


def test_imbalance_writes_a_file_for_each_ratio(cli, tmp_path, digits):
    words = ["--ratio", "0.1", "0.2", "0.5", "--profile", "exponential", "--seed", "1", "--output", "deep/kept"]
    code, out, err = cli("data", "imbalance", "digits", *words)
    assert (code, err) == (0, "")
    paths = [f"deep/kept/digits-exponential-{ratio}-s1.json" for ratio in (0.1, 0.2, 0.5)]
    assert files(tmp_path) == set(paths)
    sizes = torch.bincount(digits.y).tolist()
    label_of = dict(zip(digits.ids.tolist(), digits.y.tolist(), strict=True))
    for ratio, path, line in zip((0.1, 0.2, 0.5), paths, out.splitlines(), strict=True):
        content = json.loads(Path(path).read_text())
        selected, expected = (
            content["kept"],
            [math.floor(size * ratio ** ((9 - k) / 9) + 1e-9) for k, size in enumerate(sizes)],
        )
        assert [len(ids) for ids in selected.values()] == expected and list(selected) == list(digits.classes)
        assert ids_in(path) == digits.subset(ExponentialImbalance(ratio, 1).keep(digits.y, 10)).ids.tolist()
        assert all({label_of[i] for i in ids} == {k} for k, ids in enumerate(selected.values()))
        assert content["dataset"] == {"kind": "dataset.digits", "fold": 0, "folds": 5}
        assert content["imbalance"] == {"kind": "imbalance.exponential", "ratio": ratio, "seed": 1}
        by_class = " ".join(map(str, expected))
        assert line == f"{path}: {sum(expected):,} of {len(digits):,} images are kept, by class {by_class}"


def test_imbalance_is_a_step_by_default_and_takes_recipes_and_changed_fields(cli, digits):
    assert cli("data", "imbalance", "digits", "--ratio", "1/5")[0] == 0
    assert ids_in("digits-step-0.2-s0.json") == digits.ids[StepImbalance(0.2).keep(digits.y, 10)].tolist()
    assert cli("data", "imbalance", "digits.at", "--ratio", "0.5", "--set", "fold=3")[0] == 0
    path, train = Path("digits.at-step-0.5-s0.json"), Digits(3).load().train
    assert ids_in(path) == train.ids[StepImbalance(0.5).keep(train.y, 10)].tolist()
    assert json.loads(path.read_text())["dataset"]["fold"] == 3


# --- runs on the images of a file ------------------------------------------------------------------------------------


@pytest.fixture
def train(cli):
    def call(output, imbalance, *words):
        change = f"data.imbalance={json.dumps(imbalance)}"
        return cli("train", "digits.at", *QUICK, "--set", change, "--output", output, *words)

    return call


@pytest.fixture
def selected(cli):
    """Return a file of selected images, and their ids."""
    words = ["--ratio", "0.2", "--profile", "exponential", "--seed", "1", "--output", "kept"]
    assert cli("data", "imbalance", "digits", *words)[0] == 0
    path = "kept/digits-exponential-0.2-s1.json"
    return path, set(ids_in(path))


def weights(output):
    return (Path(output) / "checkpoints" / "last" / "model.safetensors").read_bytes()


def ids_of(output):
    """Return the ids of the images that a run is trained on, and of its validation."""
    run = load_run(Path(output))
    data = prepare_data(run, load_splits(run.data), torch.device("cpu"))
    return set(data.train.ids.tolist()), set(data.validation.ids.tolist())


def test_a_run_on_selected_images_is_the_run_on_the_imbalance_itself(train, selected):
    path, ids = selected
    for output, imbalance in {
        "a": {"kind": "imbalance.selected", "file": path},
        "b": {"kind": "imbalance.exponential", "ratio": 0.2, "seed": 1},
        "c": {"kind": "imbalance.exponential", "ratio": 0.2, "seed": 2},
    }.items():
        assert train(output, imbalance).code == 0
    assert ids_of("a")[0] == ids_of("b")[0] == ids
    assert weights("a") == weights("b") != weights("c")


def test_selected_images_that_are_held_out_are_not_trained_on(train, selected):
    path, ids = selected
    held_out = ["--data.holdout", "0.2"]
    assert train("a", {"kind": "imbalance.selected", "file": path}, *held_out).code == 0
    assert train("all", {"kind": "imbalance.balanced"}, *held_out).code == 0
    (train_ids, validation), (remaining, validation_of_all) = ids_of("a"), ids_of("all")
    assert train_ids == ids & remaining and train_ids < ids
    assert validation == validation_of_all and not validation & remaining
    # A file that names these images alone makes the same run.
    content = json.loads(Path(path).read_text())
    content["kept"] = {name: [i for i in part if i in remaining] for name, part in content["kept"].items()}
    Path("rest.json").write_text(json.dumps(content))
    assert train("b", {"kind": "imbalance.selected", "file": "rest.json"}, *held_out).code == 0
    assert weights("a") == weights("b") != weights("all")


def test_a_file_of_selected_images_that_does_not_fit_is_refused(train, selected, tmp_path):
    content = json.loads(Path(selected[0]).read_text())
    kept = content["kept"]
    for change, message in [
        ({"0": kept["1"], "1": kept["0"]}, "was made for other data"),
        ({"9": [*kept["9"], 1797]}, "was made for other data"),
        ({"9": []}, "leaves no image of class 9"),
        ({"9": ["nine"]}, "lists no selected images"),
        (None, "lists no selected images"),
    ]:
        broken = {**content, "kept": {**kept, **change}} if change else {**content, "kept": None}
        Path("broken.json").write_text(json.dumps(broken))
        before = files(tmp_path)
        code, _, err = train("run", {"kind": "imbalance.selected", "file": "broken.json"})
        assert code == 2 and f"broken.json {message}" in err and is_one_sentence(err)
        assert files(tmp_path) - {"run/.lock"} == before - {"run/.lock"}
    code, _, err = train("run", {"kind": "imbalance.selected", "file": "nowhere.json"})
    assert code == 2 and "there is no file nowhere.json of selected images" in err and is_one_sentence(err)


# --- fetch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mirror(tmp_path_factory, monkeypatch):
    """Serve a small MNIST; return its address, folder, images, and the paths that were requested."""
    monkeypatch.setenv("NO_PROXY", "*")
    folder = tmp_path_factory.mktemp("mirror")
    random = np.random.default_rng(0)
    y = np.concatenate([np.arange(10).repeat(3), [0, 0, 7]])
    parts = [(random.integers(0, 256, (len(part), 1, 28, 28), np.uint8), part) for part in (y, np.arange(10))]
    write.mnist(folder, *parts)
    requests = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *line): ...

        def do_GET(self):
            requests.append(self.path)
            super().do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder / "mnist")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield SimpleNamespace(url=url, folder=folder, parts=parts, requests=requests)
        server.shutdown()
        thread.join()


@pytest.fixture
def published(mirror, monkeypatch):
    """Let the files of the mirror be the published ones, by their checksums."""
    mnist = PUBLISHED["mnist"]
    digests = {name: md5(mirror.folder / "mnist" / name) for name in mnist.md5}
    downloads = tuple(item._replace(md5=digests[item.name]) for item in mnist.downloads)
    monkeypatch.setitem(PUBLISHED, "mnist", mnist._replace(downloads=downloads, md5=digests))


def test_fetched_files_can_be_inspected_and_are_not_fetched_again(cli, mirror, published):
    fetch = ["data", "fetch", "mnist", "--data-root", "data", "--mirror", mirror.url]
    code, out, err = cli(*fetch)
    assert (code, err) == (0, "")
    names = PUBLISHED["mnist"].md5
    assert files(Path("data")) == {f"mnist/{name}" for name in names}
    assert sorted(mirror.requests) == sorted(f"/{name}" for name in names)
    for name in names:
        assert f"data/mnist/{name} is there now" in out
        assert Path("data/mnist", name).read_bytes() == (mirror.folder / "mnist" / name).read_bytes()
    assert out.splitlines()[-1] == "now: doubly data inspect mnist --data-root data"
    code, out, err = cli("data", "inspect", "mnist", "--data-root", "data", "--columns", "3", "--picture", "mnist.png")
    assert (code, err) == (0, "")
    assert counts(out) == {str(k): (3 + 2 * (k == 0) + (k == 7), 1) for k in range(10)} | {"all": (33, 10)}
    assert "33 of the 60,000 published training images; 10 of the 10,000 published test images" in out
    x, y = mirror.parts[0]
    assert (cells("mnist.png", 28, 28, 10, 3)[7][2] == x[y == 7][2, 0][..., None]).all()
    mirror.requests.clear()
    for more in ([], ["--offline"]):
        code, out, _ = cli(*fetch, *more)
        assert code == 0 and out.count("is there already") == 4
    assert mirror.requests == []


def test_the_cache_is_used_if_no_folder_is_named(cli, mirror, published, tmp_path, monkeypatch):
    monkeypatch.setenv("DOUBLY_CACHE", str(tmp_path / "cache"))
    assert cli("data", "fetch", "mnist", "--mirror", mirror.url)[0] == 0
    assert cli("data", "inspect", "mnist")[0] == 0
    assert files(tmp_path) == {f"cache/mnist/{name}" for name in PUBLISHED["mnist"].md5}


def test_a_terminal_shows_the_progress_of_downloads(cli, mirror, published, monkeypatch):
    monkeypatch.setattr("doubly.cli.OUT", Console(width=200, force_terminal=True))
    code, out, _ = cli("data", "fetch", "mnist", "--data-root", "data", "--mirror", mirror.url)
    assert code == 0 and all(f"\n{name} " in out for name in PUBLISHED["mnist"].md5) and "━" in out


def test_files_that_are_wrong_or_missing_on_the_mirror_are_refused(cli, mirror, tmp_path):
    for name, message in (("mnist", PUBLISHED["mnist"].downloads[0].md5), ("cifar10", "404")):
        code, _, err = cli("data", "fetch", name, "--data-root", "data", "--mirror", mirror.url)
        assert code == 2 and message in err and is_one_sentence(err)
    assert "put it into data" in err and files(tmp_path) == set()


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_in_one_sentence_and_nothing_is_written(cli, tmp_path):
    for words, message in [
        ("inspct digits", "there is no verb 'data inspct': valid are fetch, inspect, imbalance"),
        ("inspect digts", "there is no dataset, recipe, folder or file 'digts': did you mean 'digits'?"),
        ("inspect digits.imbalanced.don_pgd", "did you mean 'digits.imbalanced.done_pgd'?"),
        ("imbalance digts --ratio 0.2", "did you mean 'digits'?"),
        ("fetch cifar11", "did you mean 'cifar10"),
        ("fetch digits", "there is nothing to fetch for 'digits': it reads what you have"),
        ("fetch folder", "there is nothing to fetch for 'folder': it reads what you have"),
        ("fetch zzz", "valid are cifar10, cifar100,"),
        ("fetch mnist --offline --data-root void", "/t10k-labels-idx1-ubyte.gz into void/mnist"),
        ("inspect digits --columns 0", "columns must be at least 1, got 0"),
        ("inspect digits --output sheet", "sheet is not the name of a picture: end it in .png"),
        ("inspect digits --output sheet.docx", "sheet.docx is not the name of a picture"),
        ("inspect digits --output void/sheet.png", "void/sheet.png"),
        ("inspect digits --set fold=9", "fold=9 of folds=5"),
        ("inspect digits --set flod=1", "did you mean 'fold'?"),
        ("inspect digits --set fold", "--set is written PATH=KIND or PATH=JSON"),
        ("inspect digits --set", "--set needs a value"),
        ("inspect mnist --data-root void", "/void`"),
        ("inspect folder --data-root void", "/void: name it"),
        ("inspect arrays", "there is no file data.npz"),
        ("imbalance svhn --ratio 0.2 --data-root void", "/void`"),
        ("imbalance digits --ratio 0", "ratio in (0, 1] of the images of a class, got 0"),
        ("imbalance digits --ratio 0.2 1.5", "got 1.5"),
        ("imbalance digits --ratio nan", "got nan"),
        ("imbalance digits --ratio", "give at least one --ratio"),
        ("imbalance digits --ratio 0.5 1/500 --profile exponential", "leaves no image of class 0"),
    ]:
        code, out, err = cli("data", *words.split())
        assert code == 2 and message in err and is_one_sentence(err), words
        assert "wrote" not in out and files(tmp_path) == set(), words
    Path("thesis.tex").write_text("precious")
    code, _, err = cli("data", "imbalance", "digits", "--ratio", "0.2", "--output", "thesis.tex")
    assert code == 2 and "thesis.tex" in err and Path("thesis.tex").read_text() == "precious"


def test_words_that_are_missing_or_unknown_are_explained(cli, tmp_path):
    for words, hint in [
        ("fetch", "dataset"),
        ("inspect", "dataset, recipe"),
        ("imbalance digits", "--ratio"),
        ("imbalance digits --ratio few", "few"),
        ("imbalance digits --ratio 0.2 --profile stairs", "stairs"),
        ("inspect digits --column 3", "--columns"),
    ]:
        code, out, err = cli("data", *words.split())
        assert code == 2 and hint in err and "Traceback" not in err and out == "", words
    code, out, err = cli("data")
    assert (code, err) == (2, "") and all(f"doubly data {verb} " in out for verb in ("fetch", "inspect", "imbalance"))
    assert files(tmp_path) == set()
