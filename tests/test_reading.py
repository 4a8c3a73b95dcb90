"""Damaged and hostile files: each is refused with a sentence, before anything large is unpacked."""

import io
import json
import zipfile

import numpy as np
import pytest

from doubly import reading
from doubly.errors import UsageError
from doubly.reading import check_unpacked_size, load_npz, parse_json, read_json


def test_json_that_no_file_of_ours_holds_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    for content, sentence in [
        ("[" * 100_000 + "]" * 100_000, "nested more than 64"),
        ("[" * 100_000, "nested more than 64"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than 64"),
        ("[" * 65 + "]" * 65, "nested more than 64"),
        (f'{{"n": {"9" * 400}}}', "an integer of 400 digits"),
        (f'{{"n": [{"9" * 5000}]}}', "an integer of thousands of digits"),
        (f"-{2**64}", "an integer of 20 digits"),
        ('{"a": NaN}', "the number nan"),
        ('{"a": [-Infinity]}', "the number -inf"),
        ('{"a": 1e999}', "the number inf"),
        ('{"a": 1', "line 1"),
        ("", "line 1"),
        (b"\xff\xfe\xff", "is no UTF-8|utf-16|Expecting|codec"),
    ]:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UsageError, match=rf"a\.json is not valid JSON \(.*({sentence})") as refusal:
            read_json(path)
        assert len(str(refusal.value)) < 400
    monkeypatch.setattr(reading, "MAX_JSON_BYTES", 100)
    path.write_text(json.dumps("x" * 200))
    with pytest.raises(UsageError, match="longer than"):
        read_json(path)
    monkeypatch.undo()
    assert parse_json("[" * 63 + "1" + "]" * 63) and parse_json(str(2**64 - 1)) == 2**64 - 1
    assert parse_json(f"[{'9' * 400}, NaN]", any_number=True)[0] == int("9" * 400)


def test_arrays_that_are_damaged_or_too_large_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"

    def packed(content, name="x.npy"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(name, content)

    def header(shape, dtype="|u1"):
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
        return stream.getvalue()

    np.savez(path, x=np.arange(3))
    assert load_npz(path, ["x", "missing"])["x"].tolist() == [0, 1, 2]
    whole = path.read_bytes()
    np.savez_compressed(path, x=np.array([{}], dtype=object))
    pickled = path.read_bytes()
    for content in (b"", b"PK", whole[:-30], whole[:40], b"\x93NUMPY\x01\x00", pickled):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"Error|BadZip"):
            load_npz(path)
    for content in (b"no array", header((10**15,)), header((3,)) + b"1", b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16):
        packed(content)
        with pytest.raises(ValueError, match="Error"):
            load_npz(path)
    monkeypatch.setattr(reading, "MAX_UNPACKED_BYTES", 2**20)
    packed(header((2**22,)) + bytes(2**22))
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("it was unpacked"))
    with pytest.raises(UsageError, match=r"a\.npz would become 4 MiB.*nothing was unpacked: do not trust it"):
        load_npz(path)
    check_unpacked_size(path, 2**20)  # as small as that is fine whatever the ratio
    check_unpacked_size(path, 2**30, 2**26)  # and so is a plausible ratio
