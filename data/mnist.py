"""MNIST: the idx files to arrays, and the balanced splits of its trials."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .splits import data_root

FILES = {
    "training images": "train-images-idx3-ubyte",
    "training labels": "train-labels-idx1-ubyte",
    "test images": "t10k-images-idx3-ubyte",
    "test labels": "t10k-labels-idx1-ubyte",
}
CLASSES = 10


@dataclass(frozen=True)
class Mnist:
    """Digits as rows of 784 uint8 pixels: `images [60000, 784]`, `labels [60000]`, and the test set's."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def read_mnist(root: str | os.PathLike[str] | None = None, download: bool = True) -> Mnist:
    """The four idx files, gzipped or not, of `<root>/mnist` or `<root>/MNIST/raw` (torchvision's layout).

    Args:
        root: see `data.splits.data_root`.
        download: fetch them into `<root>/MNIST/raw` by torchvision where there are none.
    """
    base = data_root(root)
    folders = (base / "mnist", base / "MNIST" / "raw", base)
    folder = next((f for f in folders if all(_find(f, name) for name in FILES.values())), None)
    if folder is None and download:
        folder = _download(base)
    if folder is None:
        raise FileNotFoundError(
            f"there is no MNIST in {base / 'mnist'} or {base / 'MNIST' / 'raw'}; {_ADVICE}"
        )
    images, labels, test_images, test_labels = (read_idx(_find(folder, name)) for name in FILES.values())
    for part, x, y in (("training", images, labels), ("test", test_images, test_labels)):
        if x.ndim != 3 or y.shape != x.shape[:1] or not len(y) or y.max() >= CLASSES:
            raise ValueError(
                f"the {part} files in {folder} hold images of shape {x.shape} and labels of shape {y.shape}; "
                "expected as many labels 0 to 9 as images"
            )
    return Mnist(
        images.reshape(len(images), -1), labels.astype(np.int64),
        test_images.reshape(len(test_images), -1), test_labels.astype(np.int64),
    )  # fmt: skip


_ADVICE = (
    "put the four idx files (train-images-idx3-ubyte.gz and so on, from "
    "https://ossci-datasets.s3.amazonaws.com/mnist/) there, or set --data-root or $FEWSHOT_DPKL_DATA"
)


def _find(folder: Path, name: str) -> Path | None:
    """The file as it is or gzipped."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _download(base: Path) -> Path:
    from torchvision.datasets import MNIST

    try:
        MNIST(base, download=True)
    except (OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip("<>")  # the last server tried
        raise FileNotFoundError(
            f"there is no MNIST in {base / 'mnist'} or {base / 'MNIST' / 'raw'} and it could not be "
            f"downloaded ({reason}); {_ADVICE}"
        ) from None
    return base / "MNIST" / "raw"


def read_idx(path: Path | None) -> np.ndarray:
    """An idx file of unsigned bytes, gzipped if its name says so."""
    assert path is not None
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zeros, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        data = np.frombuffer(content[4 + 4 * dimensions :], np.uint8)
    except (EOFError, gzip.BadGzipFile, zlib.error, struct.error):
        raise ValueError(f"{path} is damaged or not an idx file; download it again") from None
    if zeros or kind != 8 or dimensions not in (1, 3) or len(data) != math.prod(shape):
        raise ValueError(f"{path} is damaged or not an idx file of bytes; download it again")
    return data.reshape(shape).copy()  # writable, as torch wants its arrays


@dataclass(frozen=True)
class DigitSplit:
    """Row numbers of all trials of one size: `training [T, 0.9 n]`, `validation [T, 0.1 n]`."""

    training: np.ndarray
    validation: np.ndarray


def split_digits(labels: np.ndarray, size: int, trials: int, seed: int = 0) -> DigitSplit:
    """`size` digits a trial, equally many of each class in training and in validation (90/10).

    Drawn without replacement from each trial's own shuffle: the labelled digits of a trial are nested in
    size, and trial t is the same whatever the number of trials.
    """
    if size % CLASSES or size < 2 * CLASSES:
        raise ValueError(f"size {size} does not give each of {CLASSES} classes the same number, at least two")
    each = size // CLASSES
    held = max(1, round(each / 10))
    smallest = int(np.bincount(labels, minlength=CLASSES).min())
    if each > smallest:
        raise ValueError(f"size {size} needs {each} digits of each class, but one class has {smallest} only")
    training, validation = [], []
    for trial in range(trials):
        order = np.random.default_rng([seed, trial]).permutation(len(labels))
        of_class = [order[labels[order] == c] for c in range(CLASSES)]
        validation.append(np.concatenate([rows[:held] for rows in of_class]))
        training.append(np.concatenate([rows[held:each] for rows in of_class]))
    return DigitSplit(np.stack(training), np.stack(validation))
