"""What a file may say of itself: one checker of headers, tensors and arrays for everything that is read back.

A file may be damaged, cut off, of another program or made to harm. Whatever it holds, reading it ends with
its contents or with one sentence (ValueError), and never takes much more memory than the file is long.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import types
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import safe_open
from torch import Tensor

LARGEST = 2**63 - 1
FLOATS = (torch.float16, torch.float32, torch.float64)
DEFLATE = 1032  # how many bytes one byte of a zip file can unfold to, at most
SEEDS = ("random_state", "frequency_seed")
NAME_LENGTH = 1000  # of a class, in letters


class Source:
    """A file that is being read, for sentences about what is wrong with it.

    Args:
        kind: what it should be, such as "saved head".
        advice: what to do where it is not.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, advice: str) -> None:
        self.path, self.kind, self.advice = path, kind, advice

    def refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.path} {problem}; {self.advice}")

    def no_such_kind(self) -> NoReturn:
        self.refuse(f"is not {self._a_kind}")

    @property
    def _a_kind(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    def altered(self, problem: str) -> NoReturn:
        self.refuse(f"is damaged or was altered: {problem}")

    # JSON

    def parse(self, text: str | bytes) -> dict[str, Any]:
        """A JSON object with finite numbers of 64 bits."""
        try:
            document = json.loads(text, parse_float=_finite, parse_int=_integer, parse_constant=_finite)
        except (ValueError, RecursionError):
            self.altered("its header is not JSON with finite numbers")
        if not isinstance(document, dict):
            self.altered("its header is no JSON object")
        return document

    def fields(self, document: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
        """`document` has every field of `schema`, of the type that it names."""
        for name, hint in schema.items():
            if name not in document:
                self.altered(f"{name} is missing in its header")
            if not matches(document[name], hint):
                self.altered(f"{name} is {_short(document[name])}, expected {_said(hint)}")

    def parameters(self, estimator: type, found: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """`found` as parameters of an estimator, lists as tuples, of the types of its annotations."""
        hints, known = get_type_hints(estimator), set(names)
        for name, value in found.items():
            if name not in known:
                self.altered(f"{estimator.__name__} has no parameter {_short(name)}")
            most = 10**5 if "frequencies" in name else LARGEST if name in SEEDS else 10**6
            if isinstance(value, int) and value > most:  # what is computed with them takes memory
                self.altered(f"its parameter {name} is {value}, expected at most {most}")
            if not matches(value, hints.get(name, Any)):
                self.altered(f"its parameter {name} is {_short(value)}, expected {_said(hints[name])}")
        return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}

    def labels(self, values: list[Any], dtype: str) -> np.ndarray:
        """Class labels `[C]`, at least two and each once, of a dtype of numbers, texts or objects."""
        kinds = {"b": bool, "i": int, "u": int, "f": float, "U": str, "O": str | int | float}
        try:
            wanted = np.dtype("O" if dtype == "O" else dtype)
        except (TypeError, ValueError, SyntaxError):
            self.altered(f"the type of its classes is {_short(dtype)}")
        most = 4 * NAME_LENGTH if wanted.kind == "U" else 8
        if wanted.kind not in kinds or wanted.itemsize > most or wanted.shape:
            self.altered(f"the type of its classes is {_short(dtype)}")
        if not all(matches(value, kinds[wanted.kind]) for value in values):
            self.altered(f"its classes are not all of type {_short(dtype)}")
        if len(values) < 2 or len(set(values)) < len(values):
            self.altered(f"it has {len(values)} classes, expected at least two, each once")
        try:
            found = np.array(values, dtype=wanted)
        except (OverflowError, ValueError):
            found = np.array([])
        if found.tolist() != values:
            self.altered(f"its classes do not fit the type {_short(dtype)}")
        return found

    # tensors

    def safetensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and the texts of a safetensors file."""
        try:
            with safe_open(self.path, framework="pt") as file:
                # a copy: in memory as torch aligns it, so that not a bit of a matrix product changes
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
                return tensors, dict(file.metadata() or {})
        except Exception:  # the library raises several kinds
            self.no_such_kind()

    def shapes(
        self,
        tensors: Mapping[str, Tensor],
        schema: Mapping[str, str],
        known: Mapping[str, int] | None = None,
        may_be_infinite: Sequence[str] = (),
    ) -> dict[str, int]:
        """Tensors of these names and no others, finite floats of these shapes: the length of every letter.

        A shape is written as in the docstrings, `"1 n D"`: a number is a length, a letter (or word) one that
        `known` gives or that is the same wherever it stands.
        """
        if set(tensors) != set(schema):
            self.altered(f"it holds {_listed(tensors)}, expected {_listed(schema)}")
        lengths = dict(known or {})
        for name, wanted in schema.items():
            sizes = wanted.split()
            found = list(tensors[name].shape)
            for size, length in zip(sizes, found, strict=False):
                expected = int(size) if size.isdigit() else lengths.setdefault(size, length)
                if length != expected:
                    break
            else:
                if len(sizes) == len(found):
                    self.finite(name, tensors[name], name in may_be_infinite)
                    continue
            about = ", ".join(f"{size} = {lengths[size]}" for size in sizes if size in lengths)
            self.altered(f"{name} has the shape {found}, expected [{_short(', '.join(sizes))}] ({about})")
        return lengths

    def finite(self, name: str, tensor: Tensor, may_be_infinite: bool = False) -> None:
        if tensor.dtype not in (*FLOATS, torch.int64):
            self.altered(f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}")
        if not may_be_infinite and not torch.isfinite(tensor).all():
            self.altered(f"{name} holds values that are not finite")

    # numpy's files

    def npy(self) -> np.ndarray:
        """The array of a .npy file."""
        try:
            with open(self.path, "rb") as file:
                return read_array(file, os.stat(self.path).st_size)
        except BROKEN as error:
            self.refuse(f"is not {self._a_kind} ({_short(str(error))})")

    def npz(self) -> dict[str, np.ndarray]:
        """The arrays of a .npz file."""
        arrays = {}
        try:
            with zipfile.ZipFile(self.path) as archive:
                for entry in archive.infolist():
                    if entry.file_size > DEFLATE * (entry.compress_size + 1):
                        raise ValueError("it claims to unfold to more than it can")
                    with archive.open(entry) as file:
                        arrays[entry.filename.removesuffix(".npy")] = read_array(file, entry.file_size)
        except BROKEN as error:
            self.refuse(f"is not a readable npz file ({_short(str(error))})")
        return arrays


BROKEN = (
    ValueError, EOFError, OverflowError, MemoryError, SyntaxError, TypeError, KeyError, IndexError,
    RuntimeError, NotImplementedError, zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error,
)  # fmt: skip
"""What reading a broken zip or npy file has been seen to raise."""


def read_array(file: IO[bytes], size: int) -> np.ndarray:
    """An array in numpy's format that takes `size` bytes with its header; never pickled objects."""
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        shape, fortran, dtype = readers[version](file)
    except Exception:  # it is read as Python source, with all that can be wrong with one
        raise ValueError("its header is not one of numpy's") from None
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    length = math.prod(shape) * dtype.itemsize
    if file.tell() + length != size or min(shape, default=0) < 0:
        raise ValueError(f"its header says {length} bytes, the file holds {size - file.tell()}")
    content = file.read(length)
    if len(content) != length or file.read(1):  # the second look makes a zip file check its sum
        raise ValueError("it is cut off")
    flat = np.frombuffer(bytearray(content), dtype)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def seal(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A short hash of a header (without its field `checksum`) and of the tensors that it belongs to."""
    rest = {name: value for name, value in document.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def matches(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of the type of a hint; a whole number will do for a float."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(matches(value, each) for each in inside)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in inside)
    if origin in (list, tuple) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return isinstance(value, (list, tuple)) and all(matches(each, inside[0]) for each in value)
    if origin is dict or hint is dict:
        return isinstance(value, dict)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, type(None) if hint is None else hint)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > LARGEST:
        raise ValueError(text[:30])
    return int(text)


def _said(hint: Any) -> str:
    return (
        hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
    )


def _short(value: Any, most: int = 60) -> str:
    text = " ".join(repr(value)[: 10 * most].split()) if not isinstance(value, str) else value[: 10 * most]
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    return text if len(text) <= most else f"{text[:most]}…"


def _listed(names: Iterable[str]) -> str:
    return _short(", ".join(sorted(names)) or "nothing", 200)
