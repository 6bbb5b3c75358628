"""Every reader on damaged and altered files: its contents, or an error in one sentence; little memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from fewshot_dpkl import FeatureSet, FewShotClassifier, load_head
from fewshot_dpkl.backbones import build, load_backbone
from fewshot_dpkl.backbones.extract import _read_state_dict
from fewshot_dpkl.backbones.files import save_tensors
from fewshot_dpkl.backbones.state import Training
from fewshot_dpkl.data import Store
from fewshot_dpkl.data.mnist import read_idx
from fewshot_dpkl.data.uci import read_csv, read_uci
from fewshot_dpkl.experiments.results import Results
from fewshot_dpkl.pictures.decoding import decode
from fewshot_dpkl.pictures.embedding import FeatureCache
from fewshot_dpkl.regression import DPKLRegressor, load_regressor
from fewshot_dpkl.schema import seal
from tests.backbones.test_train import CARD, TINY
from tests.damage import (
    altered_json,
    altered_npy,
    altered_npz,
    altered_safetensors,
    altered_value,
    altered_zip,
    cut,
    flipped,
)
from tests.data.test_mnist import idx
from tests.heads.test_heads import quick, task
from tests.picture_files import picture
from tests.pictures.test_classifier import tiny

resource = pytest.importorskip("resource", reason="limits of memory are those of POSIX")
if not Path("/proc/self/statm").exists():
    pytest.skip("the memory of a process is read from /proc", allow_module_level=True)
EXAMPLES = int(os.environ.get("FEWSHOT_DPKL_FUZZ", "200"))


@contextlib.contextmanager
def one_gigabyte():
    """Asking for more than a gigabyte fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# what is read


@dataclass
class Reader:
    """How a file comes about and is read.

    Attributes:
        write: makes a whole file.
        read: its contents, as something that `same` can compare.
        alter: what a person who knows the format could change.
        sealed: whether every change shows (by a checksum); others may be read as other contents.
    """

    name: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    alter: Callable[[bytes, random.Random], bytes] = flipped
    sealed: bool = False


def features(path: Path) -> list[Any]:
    loaded = FeatureSet.load(path)
    if path.suffix != ".hdf5" and "checksum" not in loaded.card:
        raise ValueError("a file of another program, which has no checksum")
    return [loaded.features, loaded.labels]


def write_features(path: Path) -> None:
    rng = np.random.default_rng(0)
    names = ["ant", "bee", "cat"]
    FeatureSet(rng.random((9, 4), np.float32), np.arange(9) % 3, names, {"backbone": "x"}).save(path)


def head(path: Path) -> list[Any]:
    loaded = load_head(path)
    return [loaded.predict_proba(task()[2][:3]), loaded.classes_]


def write_head(path: Path) -> None:
    quick("dpkl").fit(*task()[:2]).save(path)


def resealed(content: bytes, rng: random.Random) -> bytes:
    """A head whose header was altered by somebody who knows how to make its checksum fit."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    inside = altered_value(json.loads(header["__metadata__"]["fewshot_dpkl"]), rng)
    if isinstance(inside, dict):
        inside["checksum"] = seal(inside, load(content))
    header["__metadata__"]["fewshot_dpkl"] = json.dumps(inside)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def classifier(path: Path) -> list[Any]:
    loaded = FewShotClassifier.load(path, tiny())
    return [loaded.head_.predict_proba(np.ones((2, 24), np.float32)), loaded.classes_]


def write_classifier(path: Path) -> None:
    x = np.random.default_rng(0).random((6, 24))
    FewShotClassifier(tiny(), quick("dpkl")).fit_features(x, list("aabbcc")).save(path)


def regressor(path: Path) -> list[Any]:
    return list(load_regressor(path).predict(np.linspace(-1, 1, 6).reshape(2, 3), return_std=True))


def write_regressor(path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(12, 3))
    made = DPKLRegressor(epochs=10, hidden=(4,), particles=2, n_frequencies=5, random_state=0)
    made.fit(x, x.sum(1)).save(path)


def checkpoint(path: Path) -> list[Any]:
    run = Training(build("conv4"), 3, TINY, torch.device("cpu"))
    run.load(path, CARD)
    return [run.epoch, *(value.numpy() for value in run.model.state_dict().values())]


def write_checkpoint(path: Path) -> None:
    run = Training(build("conv4"), 3, TINY, torch.device("cpu"))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.grad = torch.ones_like(parameter)
    run.move(1.0)
    run.save(path, CARD)


def write_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("all_feats", data=np.random.default_rng(0).random((8, 3), np.float32))
        file.create_dataset("all_labels", data=np.arange(8) % 2)
        file.create_dataset("count", data=[8])


def write_results(path: Path) -> None:
    results = Results(path.parent, {"trials": 1}, ("error",), ("blr",))
    results.add([{"model": "blr", "size": 50, "trial": 0, "error": 3.0}])


def results(path: Path) -> list[Any]:
    read = Results(path.parent, {"trials": 1}, ("error",), ("blr",))
    return [json.dumps(read.rows)]


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/1.txt", "one " * 50)
        archive.writestr("b/2.txt", "two " * 50)


def stored(path: Path) -> list[Any]:
    store = Store(path)
    return [store.read(name) for name in store]


def write_uci(path: Path) -> None:
    np.save(path, np.random.default_rng(0).random((9, 2)))
    np.save(path.with_name("y.npy"), np.arange(9.0))


READERS = [
    Reader("head.safetensors", write_head, head, altered_safetensors, True),
    Reader("resealed-head.safetensors", write_head, head, resealed),
    Reader("classifier.safetensors", write_classifier, classifier, altered_safetensors, True),
    Reader("regressor.safetensors", write_regressor, regressor, altered_safetensors, True),
    Reader("features.safetensors", write_features, features, altered_safetensors, True),
    Reader("features.npz", write_features, features, altered_npz, True),
    Reader("features.hdf5", write_hdf5, features),
    Reader(
        "backbone.safetensors",
        lambda path: save_tensors(path, build("conv4").state_dict(), CARD),
        lambda path: [value.numpy() for value in load_backbone(path).module.state_dict().values()],
        altered_safetensors,
        True,
    ),
    Reader("w.checkpoint.safetensors", write_checkpoint, checkpoint, altered_safetensors, True),
    Reader(
        "weights.pth",
        lambda path: torch.save({"a": torch.ones(3, 2), "b": torch.zeros(2)}, path),
        lambda path: [value.numpy() for value in _read_state_dict(path).values()],
        altered_zip,
    ),
    Reader(
        "train-images-idx3-ubyte",
        lambda path: path.write_bytes(idx(np.arange(60).reshape(3, 4, 5))),
        lambda path: [read_idx(path)],
    ),
    Reader(
        "labels.gz",
        lambda path: path.write_bytes(gzip.compress(idx(np.arange(9)), mtime=0)),
        lambda path: [read_idx(path)],
    ),
    Reader("X.npy", write_uci, lambda path: list(read_uci("toy", path.parent.parent)), altered_npy),
    Reader("t.csv", lambda path: path.write_text("a,b\n1,2\n3,4\n"), lambda path: list(read_csv(path, "b"))),
    Reader("results.json", write_results, results, altered_json),
    Reader("pictures.zip", write_zip, stored, altered_zip),
    Reader(
        "row.npy",
        lambda path: np.save(path, np.ones(5, np.float32)),
        lambda path: [cached(path)],
        altered_npy,
    ),
    *(
        Reader(
            f"picture.{kind.lower()}",
            lambda path, kind=kind: path.write_bytes(picture(3, (40, 30), kind)),
            lambda path: [decode(path.read_bytes(), 16)],
        )
        for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM")
    ),
]


def cached(path: Path) -> Any:
    """What the cache of features makes of a file: None for one that cannot be right."""
    cache = FeatureCache(path.parent, "")
    cache.folder = path.parent
    inside = path.parent / "ro"
    inside.mkdir(exist_ok=True)
    (inside / "row.npy").write_bytes(path.read_bytes())
    return cache.get("row")


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_damaged_file_gives_its_contents_or_a_sentence(reader, tmp_path):
    folder = tmp_path / "toy"
    folder.mkdir()
    path = folder / reader.name
    torch.manual_seed(0)
    reader.write(path)
    whole, expected = path.read_bytes(), reader.read(path)
    seen = {"refused": 0}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from([flipped, cut, reader.alter]), st.integers(0, 2**32))
    def check(change, seed):
        path.write_bytes(change(whole, random.Random(seed)))
        try:
            found = reader.read(path)
        except (ValueError, OSError) as error:
            seen["refused"] += 1
            sentence = str(error)
        else:
            assert same(found, expected) or not reader.sealed
            return
        assert 10 < len(sentence) < 1500

    with one_gigabyte():
        check()
    assert seen["refused"] > EXAMPLES / 4 or reader.name in ("row.npy", "picture.ppm", "picture.bmp"), seen
    path.write_bytes(whole)
    assert same(reader.read(path), expected)
