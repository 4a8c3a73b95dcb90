"""CIFAR's pickles are read without executing anything that a pickle may name."""

import contextlib
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import dataset_writers as write
from doubly.data import CIFAR10
from doubly.data.download.dataset_files import read_file
from doubly.data.sources.pickles import read_batch
from doubly.errors import UsageError

X, Y = write.part(0, 4)
TITLE = b"training batch 1 of 5"


@pytest.fixture
def folder(tmp_path):
    write.cifar10_python(tmp_path, [(X, Y)], write.part(9, 3))
    return tmp_path / "cifar-10-batches-py"


def refused(folder, *texts):
    with pytest.raises(UsageError) as caught:
        CIFAR10(batches=1).load(folder.parent)
    for text in texts:
        assert text in str(caught.value)


def test_the_pickles_written_here_are_those_that_numpy_reads(folder):
    """Else these tests would be of a format of our own."""
    path = folder / "data_batch_1"
    with warnings.catch_warnings(action="ignore"):  # numpy.core has been renamed
        batch = pickle.loads(path.read_bytes(), encoding="bytes")
    np.testing.assert_array_equal(batch[b"data"], X.reshape(4, -1))
    assert {key.decode(): value for key, value in batch.items() if key != b"data"} == {
        key: value for key, value in read_batch(path).items() if key != "data"
    }


def test_batches_written_again_by_python_3_are_read(folder):
    for protocol in (3, 4):
        for order in ("C", "F"):
            batch = {"batch_label": TITLE.decode(), "labels": Y.tolist()}
            batch["data"] = np.asarray(X.reshape(4, -1), order=order)
            (folder / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=protocol))
            images = CIFAR10(batches=1).load(folder.parent).train
            assert torch.equal(images.x, torch.tensor(X)) and images.y.tolist() == Y.tolist()


def test_pickles_are_refused_wherever_they_are_cut(folder):
    path = folder / "batches.meta"
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refused(folder, "batches.meta", "truncated or another file")


# --- pickles that would execute something ---


def call(module, name, *arguments):
    return f"c{module}\n{name}\n".encode() + write.opcodes(arguments) + b"R"


def dotted(module, name, *arguments):
    """Call by the opcode of protocol 4, where names may have dots."""
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return words + b"\x93" + write.opcodes(arguments) + b"R"


def text(word):
    return b"X" + len(word).to_bytes(4, "little") + word


def hostile(canary):
    """Opcodes of one value each, which create the file `canary` where pickles are executed."""
    path = str(canary).encode()
    touch = b"touch " + path
    python = f"open({str(canary)!r}, 'w').close()".encode()
    string, arguments, touched = text(path), write.opcodes(touch), call("os", "system", touch)
    extension = text(b"os") + text(b"system") + b"K\xf0tR0\x82\xf0" + arguments + b"\x85R"
    return {
        "os.system": touched,
        "posix.system": call("posix", "system", touch),
        "builtins.eval": call("builtins", "eval", python),
        "builtins.exec": call("builtins", "exec", python),
        "Python 2's eval": b"\x80\2" + call("__builtin__", "eval", python),
        "subprocess.call": call("subprocess", "call", [b"touch", path]),
        "subprocess.Popen": call("subprocess", "Popen", [b"touch", path]) + call("os", "wait")[:-1] + b"R0",
        "numpy.savetxt": b"cnumpy\nsavetxt\n" + string + write.opcodes([1]) + b"\x86R",
        "numpy.memmap": b"cnumpy\nmemmap\n(" + string + text(b"u1") + text(b"w+") + b"K\0K\1tR",
        "a dotted name": dotted("shutil", "os.system", touch),
        "a dotted name of numpy": dotted("numpy.testing._private.utils", "os.system", touch),
        "copyreg": b"ccopyreg\nadd_extension\n(" + extension,
        "INST": b"(" + arguments + b"ios\nsystem\n",
        "OBJ": b"(cos\nsystem\n" + arguments + b"o",
        "in a list in a dictionary": b"}" + write.opcodes(b"a") + b"](" + touched + b"es",
        "in the arguments of a replacement": b"cnumpy\ndtype\n(" + touched + b"tR",
        "in the arguments of a builtin": b"cbuiltins\nint\n(" + touched + b"tR",
        "as the content of an array": write.array((4, 3072), b"u1", touched),
        "in an array of objects": write.array((1,), b"O8", b"](" + touched + b"e"),
        "as a state": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n(K\0tU\1b\x87R" + touched + b"b",
        "in a value that is dropped": touched + b"0N",
        "as a key": b"}" + touched + b"Ns",
    }


def with_payload(payload, key=b"labels"):
    """A batch that is good but for one value, which comes after the others."""
    batch = {b"batch_label": TITLE, b"data": X.reshape(4, -1), b"labels": Y.tolist()}
    rest = write.opcodes({name: value for name, value in batch.items() if name != key})
    return b"\x80\x04" + rest + write.opcodes(key) + payload + b"s."


def test_the_hostile_pickles_would_run(tmp_path):
    """The next test is worth something only if they do, here in another process."""
    kinds = list(hostile("canary"))
    for number, kind in enumerate(kinds):
        (tmp_path / f"batch_{number}").write_bytes(with_payload(hostile(tmp_path / f"canary_{number}")[kind]))
    code = """if True:
        import contextlib, pathlib, pickle, sys
        for path in pathlib.Path(sys.argv[1]).glob("batch_*"):
            with contextlib.suppress(Exception):  # some end badly, having run
                pickle.loads(path.read_bytes(), encoding="bytes")
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, timeout=600)
    assert [kind for number, kind in enumerate(kinds) if not (tmp_path / f"canary_{number}").exists()] == []


def test_no_pickle_is_executed(folder, tmp_path):
    canary = tmp_path / "canary"
    for kind, payload in hostile(canary).items():
        for file in ("batches.meta", "data_batch_1"):  # the second is read if the first is good
            content = (folder / file).read_bytes()
            (folder / file).write_bytes(with_payload(payload, b"label_names"))
            refused(folder, file, "nothing was executed", "do not trust this file")
            assert not canary.exists(), kind
            (folder / file).write_bytes(content)


def test_names_beyond_the_three_of_numpy_are_refused_even_if_harmless(tmp_path):
    path = tmp_path / "batch"
    for module, name in (
        ("numpy", "frombuffer"),
        ("numpy", "load"),
        ("numpy", "_reconstruct"),
        ("numpy", "dtype.__init__"),
        ("numpy", "ndarray.__reduce__"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy.core.multiarray", "fromfile"),
        ("numpy.core.multiarray", "ndarray"),
        ("copyreg", "_reconstructor"),
        ("copy_reg", "_reconstructor"),
        ("_codecs", "encode"),
        ("collections", "OrderedDict"),
    ):
        for payload in (f"c{module}\n{name}\n".encode(), dotted(module, name)[:-1]):
            path.write_bytes(with_payload(payload))
            with pytest.raises(UsageError, match=f"{path} names {module}.{name}, which no CIFAR batch contains"):
                read_batch(path)


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
ARRAY = RECONSTRUCT + b"cnumpy\nndarray\n(K\0tU\1b\x87R"
PIXELS = write.opcodes(X.tobytes())


def test_misuse_of_the_replacements_is_refused(folder):
    for payload in (
        b"Pname\n",  # a persistent id
        write.opcodes(b"name") + b"Q",  # one on the stack
        b"\x82\x01",  # an extension that is not registered
        b"h\x63",  # a memo that was not written
        write.array((4,), b"O8", write.opcodes([1, 2, 3, 4])),
        write.array((4, 384), b"i8", PIXELS),
        write.array((4, 3072), b"O8", PIXELS, ({b"code": b"u1"},)),  # the state would change the type
        write.array((4, 3072), b"O8", PIXELS, {b"code": b"u1"}),
        write.array((4, 3072), b"O8", PIXELS, (None, {b"code": b"u1"})),
        write.array((4, 3073), b"u1", PIXELS),
        write.array((4, 2**31 - 1), b"u1", PIXELS),
        write.array((4, 3072), b"u1", b"N"),
        write.array((4, 3072), b"u1", write.opcodes([1])),
        write.array((b"4", b"3072"), b"u1", PIXELS),
        ARRAY,  # without a state
        ARRAY + write.opcodes({b"state": 1}) + b"b",
        ARRAY + write.opcodes((None, {b"__class__": 1})) + b"b",
        ARRAY + write.opcodes((1, (4, 3072), b"u1", 0, X.tobytes())) + b"b",  # a string as the type
        b"cnumpy\nndarray\n" + write.opcodes({b"state": 1}) + b"b",  # attributes of the class itself
        b"cnumpy\ndtype\n" + write.opcodes({b"code": b"u1"}) + b"b",
        b"cnumpy\ndtype\n" + write.opcodes((None, {b"code": b"u1"})) + b"b",
        ARRAY + b"(K\1(K\4M\0\x0ct" + b"cnumpy\ndtype\n)\x81" + b"\x89" + PIXELS + b"tb",  # a type never initialized
        RECONSTRUCT,  # the function instead of an array
        b"cnumpy\nndarray\n",
    ):
        (folder / "data_batch_1").write_bytes(with_payload(payload, b"data"))
        refused(folder, "data_batch_1")


def test_attributes_set_by_a_pickle_do_not_outlive_it(tmp_path):
    bad, good = tmp_path / "bad", tmp_path / "good"
    write.cifar_batch(good, (X, Y), TITLE)
    for target in (RECONSTRUCT, b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"):
        for state in (
            {b"__setstate__": b"x"},
            {b"state": 1},
            (None, {b"__setstate__": b"x"}),
            (None, {b"__defaults__": (1, 2)}),
            (None, {b"__code__": b"x"}),
            (None, {b"__class__": b"x"}),
            (None, {b"__dict__": {b"a": 1}}),
        ):
            # Names are text here, as they have to be for attributes.
            build = target + write.opcodes(state).replace(b"U", b"\x8c") + b"b0N"
            bad.write_bytes(with_payload(build, b"more"))
            with contextlib.suppress(UsageError):
                np.testing.assert_array_equal(read_file(bad, read_batch, "a batch")["data"], X.reshape(4, -1))
            np.testing.assert_array_equal(read_batch(good)["data"], X.reshape(4, -1))
    assert np.dtype("u1").itemsize == 1 and not hasattr(np.ndarray, "state")
