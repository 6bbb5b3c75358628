"""FeatureSet: frozen features with their labels and a card that says where they come from."""

from __future__ import annotations

import hashlib
import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from safetensors.numpy import save_file

from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.schema import DEFLATE, Source, seal

SHIPPED = Path(__file__).parents[1] / "assets" / "mini-imagenet-novel-conv4.npz"
"""Features of mini-ImageNet novel classes that come with the package."""


def html_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table for notebooks."""
    cells = [[html.escape(str(cell)) for cell in row] for row in rows]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True, eq=False)
class FeatureSet:
    """Features `[N, D]` of N examples, their classes, and a card.

    Attributes:
        features: `[N, D]`, float16 or float32.
        labels: `[N]`, class numbers 0..K-1.
        class_names: K names.
        card: what is known of the origin (backbone, data set, split, preprocessing ...), JSON types only.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import FeatureSet
        >>> made = FeatureSet.from_arrays(np.eye(4).repeat(5, 0), np.repeat(["a", "b", "c", "d"], 5))
        >>> len(made), list(made.class_names)
        (20, ['a', 'b', 'c', 'd'])
        >>> FeatureSet.shipped().card["dataset"]
        'mini-imagenet'
    """

    features: np.ndarray
    labels: np.ndarray
    class_names: Sequence[str]
    card: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", _floats(self.features))
        check(self.features, self.labels, self.class_names, "the feature set")

    @classmethod
    def from_arrays(cls, X: ArrayLike, y: ArrayLike, card: dict[str, Any] | None = None) -> FeatureSet:
        """From plain arrays: `X` `[N, D]`, `y` `[N]` labels of any type (they become the class names)."""
        names, labels = np.unique(np.asarray(y), return_inverse=True)
        features = np.asarray(X)
        if features.dtype != np.float16:
            features = features.astype(np.float32)
        return cls(features, labels.ravel().astype(np.int64), [str(name) for name in names], card or {})

    @property
    def checksum(self) -> str:
        """A short hash of features and labels, the same on every machine."""
        digest = hashlib.sha256(np.ascontiguousarray(self.features, dtype="<f4").tobytes())
        digest.update(np.ascontiguousarray(self.labels, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        return f"FeatureSet({', '.join(f'{name} {value}' for name, value in self._about().items())})"

    def _repr_html_(self) -> str:
        return html_table(["FeatureSet", ""], list(self._about().items()))

    def _about(self) -> dict[str, Any]:
        """What identifies it, in a few words."""
        n, d = self.features.shape
        backbone = self.card.get("backbone")
        name = backbone.get("name", backbone.get("backbone")) if isinstance(backbone, dict) else backbone
        known = {"data set": self.card.get("dataset"), "split": self.card.get("split"), "backbone": name}
        sizes = {"examples": n, "classes": len(self.class_names), "features": d}
        return sizes | {key: str(value)[:60] for key, value in known.items() if value is not None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file: `.npz` (compressed) or `.safetensors`."""
        suffix = Path(path).suffix
        document = {"class_names": list(self.class_names), "card": {**self.card, "checksum": self.checksum}}
        header = json.dumps({**document, "checksum": seal(document, {})})  # of the names and the card
        arrays = {"features": self.features, "labels": self.labels}
        if suffix not in (".npz", ".safetensors"):
            raise ValueError(
                f"cannot write features to {path}; name a file that ends in .npz or .safetensors"
            )
        with atomic_path(path) as temporary:
            if suffix == ".npz":
                np.savez_compressed(temporary, header=np.frombuffer(header.encode(), np.uint8), **arrays)  # type: ignore[arg-type]
            else:
                save_file(arrays, temporary, metadata={"header": header})

    @classmethod
    def shipped(cls) -> FeatureSet:
        """The features that come with the package: novel classes of mini-ImageNet by its Conv-4."""
        return cls.load(SHIPPED)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FeatureSet:
        """Read `.npz`, `.safetensors`, or the `.hdf5` that CloserLookFewShot's save_features.py writes.

        Foreign npz and safetensors files work too: features under `features`, `X` or `x`, labels under
        `labels` or `y`.
        """
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"there is no features file at {path}; write one with fewshot-dpkl extract"
            )
        readers = {
            ".npz": _read_npz,
            ".safetensors": _read_safetensors,
            ".hdf5": _read_hdf5,
            ".h5": _read_hdf5,
        }
        suffix = Path(path).suffix
        if suffix not in readers:
            raise ValueError(f"cannot read features from {path}; known endings are {', '.join(readers)}")
        arrays, header = readers[suffix](path)
        features = _floats(_first(arrays, ("features", "X", "x"), path))
        labels = _first(arrays, ("labels", "y"), path)
        card = header.get("card", {})
        source = _source(path)
        source.fields({"card": card}, {"card": dict})
        if "checksum" in header and seal(header, {}) != header["checksum"]:
            source.altered("the checksum of its header does not fit")
        if "class_names" not in header and "checksum" not in card:  # a file of another program
            check(features, labels, None, str(path))
            return cls.from_arrays(features, labels, card)
        source.fields(header, {"class_names": list[str]})
        if labels.dtype.kind not in "iu":
            source.altered(f"its labels are of type {labels.dtype}, expected numbers of classes")
        check(features, labels, header["class_names"], str(path))
        loaded = cls(features, labels, header["class_names"], card)
        if card.get("checksum", loaded.checksum) != loaded.checksum:
            raise ValueError(f"{path} is damaged (its checksum does not fit its contents); make it again")
        return loaded


def check(features: np.ndarray, labels: np.ndarray, class_names: Sequence[str] | None, what: str) -> None:
    """Refuse arrays that cannot be a feature set, with a sentence that says why."""
    if features.ndim != 2 or not np.issubdtype(features.dtype, np.floating):
        raise ValueError(
            f"{what} has features of shape {list(features.shape)} and type {features.dtype}; "
            "expected a table [N, D] of floats: flatten each example to one row"
        )
    if labels.shape != features.shape[:1]:
        raise ValueError(
            f"{what} has {features.shape[0]} rows of features but labels of shape {list(labels.shape)}; "
            "give one label per row"
        )
    if not len(features):
        raise ValueError(f"{what} is empty; extract features of at least two classes")
    bad = ~np.isfinite(features).all(1)
    if bad.any():
        raise ValueError(
            f"{what} has NaN or infinite features in {bad.sum()} of {len(bad)} rows (first: row "
            f"{bad.argmax()}); check the backbone that made them"
        )
    if class_names is not None and not (labels.min() >= 0 and labels.max() < len(class_names)):
        raise ValueError(
            f"{what} has labels {labels.min()} to {labels.max()} but {len(class_names)} class names"
        )


def _first(arrays: dict[str, np.ndarray], names: tuple[str, ...], path: str | os.PathLike[str]) -> np.ndarray:
    for name in names:
        if name in arrays:
            return arrays[name]
    raise ValueError(
        f"{path} holds {', '.join(arrays) or 'nothing'}; expected an array named {' or '.join(names)}"
    )


def _floats(features: np.ndarray) -> np.ndarray:
    """Whole numbers as float32: pixels, counts."""
    return features.astype(np.float32) if features.dtype.kind in "iub" else features


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:100]


Contents = tuple[dict[str, np.ndarray], dict[str, Any]]


def _source(path: str | os.PathLike[str]) -> Source:
    return Source(path, "readable file of features", "make it again")


def _read_npz(path: str | os.PathLike[str]) -> Contents:
    source = _source(path)
    arrays = source.npz()
    header = arrays.pop("header", None)
    return arrays, {} if header is None else source.parse(header.tobytes())


def _read_safetensors(path: str | os.PathLike[str]) -> Contents:
    source = _source(path)
    tensors, metadata = source.safetensors()
    for name, tensor in tensors.items():
        source.finite(name, tensor, may_be_infinite=True)  # `check` names the rows
    return {name: t.numpy() for name, t in tensors.items()}, source.parse(metadata.get("header", "{}"))


def _read_hdf5(path: str | os.PathLike[str]) -> Contents:
    try:
        import h5py
    except ImportError:
        raise ValueError(
            f"reading {path} needs h5py; install it with: pip install 'fewshot-dpkl[hdf5]'"
        ) from None
    try:
        with h5py.File(path, "r") as file:
            # a few bytes can claim any number of values
            claimed = sum(file[name].size * file[name].dtype.itemsize for name in ("all_feats", "all_labels"))
            if claimed > DEFLATE * os.path.getsize(path):
                raise ValueError("it claims to hold more than it can")
            features, labels = file["all_feats"][()], file["all_labels"][()]
            count = int(file["count"][0]) if "count" in file else len(labels)
        if not 0 < count <= len(labels) or features.dtype.kind != "f" or labels.dtype.kind not in "iuf":
            raise ValueError(f"{count} rows of {len(labels)}")
    except Exception as error:  # the library raises all kinds of them
        raise ValueError(
            f"{path} is not a features file of CloserLookFewShot ({_short(error)}); "
            "expected all_feats, all_labels and count"
        ) from None
    # The file is allocated for whole batches: rows from `count` on were never written.
    return {"features": features[:count].reshape(count, -1), "labels": labels[:count]}, {}
