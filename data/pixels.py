"""Decoded pictures: square uint8 arrays, kept on disk so that JPEG files are decoded once."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fewshot_dpkl.files import atomic_path, user_cache
from fewshot_dpkl.pictures.decoding import decode
from fewshot_dpkl.schema import BROKEN

from .splits import Split


def load_usable(split: Split, size: int) -> tuple[np.ndarray, Split, dict[str, str]]:
    """The pictures of a split that can be read: pixels, split, and why not the others, by name.

    Of the known data sets every picture is needed, of a folder one of each class at least.
    """
    if not split.dataset.startswith("folder:"):
        return load_pixels(split, size), split, {}
    refused: dict[int, str] = {}
    pixels = load_pixels(split, size, refused=refused)
    kept = np.delete(np.arange(len(split)), list(refused))
    lost = sorted(set(range(len(split.class_names))) - set(split.labels[kept].tolist()))
    reasons = {split.names[index]: reason for index, reason in refused.items()}
    if lost:
        of_lost = next(name for index, name in enumerate(split.names) if split.labels[index] == lost[0])
        raise ValueError(
            f"class {split.class_names[lost[0]]} in {split.store.source} has no picture that can be read "
            f"({of_lost}: {reasons[of_lost]}); give it at least one, or remove it"
        )
    if refused:
        names = [split.names[index] for index in kept]
        pixels, split = pixels[kept], replace(split, names=names, labels=split.labels[kept])
    return pixels, split, reasons


def load_pixels(
    split: Split,
    size: int,
    cache: str | os.PathLike[str] | None = None,
    refused: dict[int, str] | None = None,
) -> np.ndarray:
    """All pictures of a split as a read-only memory-mapped uint8 array `[N, size, size, 3]`.

    The array is written once to `cache` (default: `decoded/` in the user's cache folder); its name
    depends on the size and on the names and lengths of the picture files. A picture that cannot be read is
    an error, or black with an entry in `refused` that says why.
    """
    folder = Path(cache) if cache else user_cache() / "decoded"
    path = folder / f"{split.dataset.replace(':', '-')}-{split.split}-{size}-{_fingerprint(split)}.npy"
    shape = (len(split), size, size, 3)
    pixels, known = _kept(path), _kept_reasons(path.with_suffix(".json"))
    if pixels is not None and pixels.shape == shape and pixels.dtype == np.uint8:
        if not known:
            return pixels
        if refused is not None:
            refused.update(known)
            return pixels
    with atomic_path(path) as temporary:
        try:
            unreadable = _decode_to(temporary, split, size, shape, strict=refused is None)
            if unreadable and refused is not None:
                refused.update(unreadable)
                with atomic_path(path.with_suffix(".json")) as beside:
                    beside.write_text(json.dumps(unreadable))
        except OSError as error:
            raise OSError(
                f"cannot write the decoded pictures to {path}: {error.strerror}; they take "
                f"{np.prod(shape) / 1e6:.0f} MB, and $FEWSHOT_DPKL_CACHE chooses another folder"
            ) from error
    return np.load(path, mmap_mode="r")


def _kept(path: Path) -> np.ndarray | None:
    """The array in the cache, None when there is none or it is damaged."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (*BROKEN, OSError):
        return None


def _kept_reasons(path: Path) -> dict[int, str]:
    """Why pictures of the array are black, by their numbers."""
    try:
        found = json.loads(path.read_bytes())
        return {int(index): str(reason) for index, reason in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _decode_to(path: Path, split: Split, size: int, shape: tuple[int, ...], strict: bool) -> dict[int, str]:
    """Write the array; returns why pictures cannot be read, by their numbers, unless `strict`."""
    unreadable = {}
    with open(path, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        about = f"decoding {split.dataset} {split.split}"
        for index, name in enumerate(tqdm(split.names, desc=about, disable=None, leave=False)):
            pixels = np.zeros(shape[1:], np.uint8)
            try:
                pixels = decode(split.store.read(name), size)
            except (ValueError, OSError) as error:
                unreadable[index] = str(error)
                if strict:
                    raise ValueError(
                        f"{name} in {split.store.source} is not a readable picture ({error}); download "
                        "it again"
                    ) from error
            file.write(np.ascontiguousarray(pixels).data)
    return unreadable


def _fingerprint(split: Split) -> str:
    digest = hashlib.sha256()
    for name in split.names:
        # the part of the name that does not depend on where the download was put
        digest.update(f"{'/'.join(name.split('/')[-2:])} {split.store.size(name)}\n".encode())
    return digest.hexdigest()[:16]
