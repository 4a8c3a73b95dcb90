"""Damage a file: bits, cuts, and values of JSON and arrays."""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

DEEP = "[" * 100_000 + "]" * 100_000
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 10**18, 10**400, -(10**40), 0.5, -0.0, 1e308, 1e-320, float("nan")),
    *(
        float("inf"),
        "",
        "x",
        "x" * 5000,
        "\x1b[2J",
        "=1+1",
        "<script>",
        "a\x00b",
        "\udcff",
        "../../etc/passwd",
        "1/0",
        "8/255",
    ),
    *([], [[]], [None], [1, 2], list(range(300)), {}, {"a": 1}, {"kind": "run"}, {"kind": "model.user"}),
)


def damage_bytes(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return damaged bytes and what was done."""
    size = len(content)
    place = draw.randrange(size) if size else 0
    length = min(size - place, draw.choice((1, 2, 8, 64, 512)))
    noise = draw.randbytes(length)
    kind = draw.choice(("flip", "flip", "cut", "noise", "zeros", "insert", "remove", "twice", "empty", "append"))
    changed = bytes((content[place] ^ (1 << draw.randrange(8)),)) if size else b"?"
    results = {
        "flip": content[:place] + changed + content[place + 1 :],
        "cut": content[:place],
        "noise": content[:place] + noise + content[place + length :],
        "zeros": content[:place] + bytes(length) + content[place + length :],
        "insert": content[:place] + noise + content[place:],
        "remove": content[:place] + content[place + length :],
        "twice": content + content,
        "empty": b"",
        "append": content + noise,
    }
    return results[kind], f"{kind} at {place}"


def damage_tree(tree: Any, draw: random.Random) -> str:
    """Change one value, key or entry somewhere in a JSON value, in place, and say what."""
    places = list(_places(tree, ""))
    if not places:
        return "nothing"
    container, key, path = draw.choice(places)
    kind = draw.choice(("value", "value", "value", "value", "delete", "rename", "neighbor"))
    if kind == "delete":
        del container[key]
    elif kind == "rename" and isinstance(container, dict):
        container[draw.choice(("kind", "x", "", "schema", "epoch"))] = container.pop(key)
    elif kind == "neighbor":
        container[key] = json.loads(json.dumps(draw.choice(places)[0], default=str, skipkeys=True, check_circular=True))
    else:
        container[key] = draw.choice(VALUES)
        return f"{path} = {container[key]!r:.40}"
    return f"{kind} {path}"


def _places(tree: Any, path: str) -> Any:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries):
        yield tree, key, f"{path}.{key}"
        yield from _places(value, f"{path}.{key}")


def damage_json(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Change a value of a JSON file; now and then all of it is replaced."""
    if draw.random() < 0.03:
        text = draw.choice(
            (DEEP, "null", "[]", "{}", "3", '"text"', "NaN", "1" * 5000, '{"a":' * 3000 + "1" + "}" * 3000)
        )
        return text.encode(), f"all = {text[:20]}"
    tree = json.loads(content)
    try:
        what = damage_tree(tree, draw)
    except ValueError:  # a part that would contain itself
        tree, what = {}, "all = {}"
    return json.dumps(tree, default=str).encode("utf-8", "surrogatepass"), what


def damage_npz(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Replace an array of an .npz file by another one."""
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file.items())
    name = draw.choice(sorted(arrays))
    value = arrays[name]
    choices = {
        "half": value[: len(value) // 2] if value.ndim else value,
        "empty": value[:0] if value.ndim else value,
        "row": value[None],
        "flat": value.ravel(),
        "float": value.astype(float),
        "negative": -1 - value.astype(int) if value.dtype.kind in "iub" else -value,
        "huge": value.astype(float) + 1e300,
        "nan": np.full(value.shape, np.nan),
        "text": np.full(value.shape, "x"),
        "scalar": np.asarray(3),
        "complex": value.astype(complex),
        "object": np.array([print, None, {}], dtype=object),
        "large labels": np.full(value.shape, 2**40),
        "bool": value.astype(bool),
    }
    what = draw.choice([*choices, "missing"])
    if what == "missing":
        del arrays[name]
    else:
        arrays[name] = choices[what]
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue(), f"{name}: {what}"


def damage_file(path: Path, draw: random.Random) -> str:
    """Damage one file and say what was done: its bytes, or its values where the format is known."""
    content = path.read_bytes()
    what = "is gone"
    by_values = draw.random() < 0.7
    if draw.random() < 0.02:
        path.unlink()
        return f"{path} {what}"
    if by_values and path.suffix == ".json":
        content, what = damage_json(content, draw)
    elif by_values and path.suffix == ".jsonl":
        lines = content.splitlines()
        number = draw.randrange(len(lines))
        lines[number], what = damage_json(lines[number], draw)
        content = b"\n".join(lines) + b"\n"
    elif by_values and path.suffix == ".npz":
        content, what = damage_npz(content, draw)
    else:
        content, what = damage_bytes(content, draw)
    path.write_bytes(content)
    return f"{path}: {what}"
