"""What may happen to a file: bytes flipped, an end cut off, fields of its header replaced or enlarged."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from typing import Any

import numpy as np

JUNK = [
    None,
    True,
    -1,
    0,
    2**70,
    10**9,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 10_000,
    [],
    {},
    [[1]],
    {"a": 1},
]


def flipped(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 20])):
        # as often in the first bytes, where headers are, as anywhere
        place = rng.randrange(min(len(damaged), rng.choice([64, 1024, len(damaged)])))
        damaged[place] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def cut(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content))
    return rng.choice([content[:place], content[place:], content[:place] + bytes(len(content) - place)])


def altered_value(value: Any, rng: random.Random) -> Any:
    """Something of a JSON document dropped, replaced or enlarged, also inside texts that are JSON."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        return json.dumps(altered_value(json.loads(value), rng))
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        copy = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        if rng.random() < 0.2:
            del copy[key]
        else:
            copy[key] = altered_value(copy[key], rng)
        return copy
    if rng.random() < 0.4:
        if isinstance(value, (str, list)):
            return value * rng.choice([2, 1000])
        if isinstance(value, (int, float)):
            return value * rng.choice([2, 10**6, 10**12])
    return rng.choice(JUNK)


def altered_safetensors(content: bytes, rng: random.Random) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    if rng.random() < 0.7 and "__metadata__" in header:
        header["__metadata__"] = altered_value(header["__metadata__"], rng)
    else:
        header = altered_value(header, rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def altered_npy(content: bytes, rng: random.Random) -> bytes:
    length = struct.unpack("<H", content[8:10])[0]
    text = content[10 : 10 + length].decode()
    old, new = rng.choice(
        [("shape", "shapes"), ("(", "(9, "), ("(", "(99999999, "), ("<f", "|O"), ("<", ">"), ("'", ""),
         ("f4", "f8"), ("f4", "S999999999"), (",", ", -"), ("False", "True"), ("{", "[" * 500)]
    )  # fmt: skip
    text = text.replace(old, new)
    return content[:8] + struct.pack("<H", len(text)) + text.encode() + content[10 + length :]


def altered_npz(content: bytes, rng: random.Random) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(out, "w") as target:
        changed = rng.choice(source.namelist())
        for name in source.namelist():
            inside = source.read(name)
            if name == changed:
                if rng.random() < 0.2:
                    continue
                if name.startswith("header") and rng.random() < 0.6:
                    header = json.loads(np.load(io.BytesIO(inside)).tobytes())
                    buffer = io.BytesIO()
                    np.save(buffer, np.frombuffer(json.dumps(altered_value(header, rng)).encode(), np.uint8))
                    inside = buffer.getvalue()
                else:
                    inside = rng.choice([altered_npy, flipped, cut])(inside, rng)
            target.writestr(name, inside)
    return out.getvalue()


def altered_json(content: bytes, rng: random.Random) -> bytes:
    return json.dumps(altered_value(json.loads(content), rng)).encode()


def altered_zip(content: bytes, rng: random.Random) -> bytes:
    """Other sizes and methods in the directory of a zip file."""
    place = content.rindex(b"PK\x01\x02") + rng.choice([8, 10, 16, 20, 24, 28, 42])
    return (
        content[:place] + rng.choice([b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\1\0\1\0"]) + content[place + 4 :]
    )
