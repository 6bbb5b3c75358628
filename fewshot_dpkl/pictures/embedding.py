"""Pictures to features with any backbone, found by name among the installed packages."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm

from fewshot_dpkl.files import atomic_path
from fewshot_dpkl.pictures.decoding import Picture, PictureError, decode, prepare, read
from fewshot_dpkl.schema import Source

GROUP = "fewshot_dpkl.backbones"
PREPARATION = (
    1  # raised when `pictures` makes other pixels of a file: features of before are then no longer valid
)


@runtime_checkable
class Backbone(Protocol):
    """What is asked of a backbone. `backbones.Extractor` makes one of any `nn.Module`.

    Attributes:
        name: what finds it again, see `find_backbone`.
        identity: a short text that changes whenever its features would: weights, preprocessing.
        resize: the side of the square pictures it takes.
        preprocessing: how it prepares them, JSON types only; written to saved models for the reader.

    Examples:
        >>> import numpy as np
        >>> from fewshot_dpkl import Backbone, find_backbone
        >>> backbone = find_backbone("conv4-mini-imagenet")
        >>> isinstance(backbone, Backbone), backbone.embed(np.zeros((1, 84, 84, 3), "uint8")).shape
        (True, (1, 1600))
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    @property
    def resize(self) -> int: ...

    @property
    def preprocessing(self) -> dict[str, Any]: ...

    def embed(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 pictures `[N, resize, resize, 3]` to float32 features `[N, D]`, each on its own."""
        ...


def find_backbone(backbone: str | os.PathLike[str] | Backbone) -> Backbone:
    """The backbone of a name; a backbone itself is returned as it is.

    An installed package offers backbones by an entry point of the group `fewshot_dpkl.backbones`: a function
    that takes a name and returns a `Backbone`. The entry point `clip` is asked for every name that begins
    with `clip:`, the one called `default` for all other names.

    Examples:
        >>> from fewshot_dpkl import find_backbone
        >>> find_backbone("conv4-cub").resize
        96
    """
    if not isinstance(backbone, (str, os.PathLike)):
        if not isinstance(backbone, Backbone):
            raise ValueError(
                f"{type(backbone).__name__} is not a backbone; wrap a module with the size of its pictures: "
                "backbones.Extractor(module, resize=256, crop=224)"
            )
        return backbone
    name = os.fspath(backbone)
    loaders = {point.name: point for point in entry_points(group=GROUP)}
    loader = loaders.get(name.partition(":")[0]) or loaders.get("default")
    if loader is None:
        raise ValueError(
            f"no installed package offers the backbone {name!r}; install this one with `pip install -e .`"
        )
    found: Backbone = loader.load()(name)
    return found


def embed(
    backbone: Backbone,
    pictures: Sequence[Picture],
    cache: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> tuple[np.ndarray, dict[int, str]]:
    """Features `[n, D]` of the pictures that can be read, and for each of the others why not.

    Args:
        pictures: N of any kind; a batch `[N, H, W, 3]` (array) or `[N, 3, H, W]` (tensor) will do.
        cache: folder of features of picture files seen before, by content and backbone.
        progress: show a bar when on a terminal.

    Returns:
        Float32 features in the order given, and `{index: reason}` of the N - n refused ones.
    """
    known = FeatureCache(Path(cache), backbone.identity) if cache else None
    rows, refused = [], {}
    for index, picture in enumerate(tqdm(pictures, desc="features", disable=None if progress else True)):
        try:
            rows.append(_row(backbone, picture, known))
        except PictureError as error:
            refused[index] = str(error)
    return np.stack(rows) if rows else np.empty((0, 0), np.float32), refused


def _row(backbone: Backbone, picture: Picture, known: FeatureCache | None) -> np.ndarray:
    """Features `[D]` of one picture: one at a time, so that they do not depend on the pictures beside it."""
    if known is None or not isinstance(picture, (str, os.PathLike)):
        return backbone.embed(prepare(picture, backbone.resize)[None])[0]
    content = read(picture)
    key = hashlib.sha256(content).hexdigest()
    row = known.get(key)
    if row is None:
        row = backbone.embed(decode(content, backbone.resize)[None])[0]
        known.put(key, row)
    return row


class FeatureCache:
    """A folder with one small file of features per picture and backbone."""

    def __init__(self, folder: Path, identity: str) -> None:
        name = hashlib.sha256(f"{identity} {PREPARATION}".encode()).hexdigest()[:16]
        self.folder = folder / name

    def get(self, key: str) -> np.ndarray | None:
        """The features `[D]` kept under `key`, None when there are none or they are damaged."""
        try:
            row = Source(self.folder / key[:2] / f"{key}.npy", "row of features", "remove it").npy()
        except (OSError, ValueError):
            return None
        return row if row.ndim == 1 and row.dtype == np.float32 and np.isfinite(row).all() else None

    def put(self, key: str, row: np.ndarray) -> None:
        try:
            with atomic_path(self.folder / key[:2] / f"{key}.npy") as path:
                np.save(path, row)
        except OSError as error:
            raise OSError(
                f"cannot keep features in {self.folder}: {error.strerror}; choose another folder for the "
                "cache or do without one"
            ) from error
