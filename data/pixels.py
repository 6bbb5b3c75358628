"""Decoded pictures: square uint8 arrays, kept on disk so that JPEG files are decoded once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fewshot_dpkl.files import atomic_path, user_cache
from fewshot_dpkl.pictures.decoding import decode

from .splits import Split


def load_pixels(split: Split, size: int, cache: str | os.PathLike[str] | None = None) -> np.ndarray:
    """All pictures of a split as a read-only memory-mapped uint8 array `[N, size, size, 3]`.

    The array is written once to `cache` (default: `decoded/` in the user's cache folder); its name
    depends on the size and on the names and lengths of the picture files.
    """
    folder = Path(cache) if cache else user_cache() / "decoded"
    path = folder / f"{split.dataset.replace(':', '-')}-{split.split}-{size}-{_fingerprint(split)}.npy"
    shape = (len(split), size, size, 3)
    if path.exists():
        pixels: np.ndarray = np.load(path, mmap_mode="r")
        if pixels.shape == shape and pixels.dtype == np.uint8:
            return pixels
    with atomic_path(path) as temporary:
        try:
            _decode_to(temporary, split, size, shape)
        except OSError as error:
            if error.errno is None:  # raised below for a broken picture, already a full sentence
                raise
            raise OSError(
                f"cannot write the decoded pictures to {path}: {error.strerror}; they take "
                f"{np.prod(shape) / 1e6:.0f} MB, and $FEWSHOT_DPKL_CACHE chooses another folder"
            ) from error
    return np.load(path, mmap_mode="r")


def _decode_to(path: Path, split: Split, size: int, shape: tuple[int, ...]) -> None:
    with open(path, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        for name in tqdm(
            split.names, desc=f"decoding {split.dataset} {split.split}", disable=None, leave=False
        ):
            try:
                pixels = decode(split.store.read(name), size)
            except (OSError, ValueError) as error:
                raise OSError(
                    f"{name} in {split.store.source} is not a readable picture ({error}); download it again"
                ) from error
            file.write(np.ascontiguousarray(pixels).data)


def _fingerprint(split: Split) -> str:
    digest = hashlib.sha256()
    for name in split.names:
        # the part of the name that does not depend on where the download was put
        digest.update(f"{'/'.join(name.split('/')[-2:])} {split.store.size(name)}\n".encode())
    return digest.hexdigest()[:16]
