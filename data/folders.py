"""Pictures of one's own: a folder per class, or loose files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".avif", ".ppm", ".pgm")


def read_support(folder: Path) -> tuple[list[Path], list[str]]:
    """Pictures `folder/<class>/**` and their classes; hidden files and other endings are passed over."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}; expected one with a folder of pictures per class"
        )
    found = [(path, path.relative_to(folder).parts[0]) for path in _pictures(folder) if path.parent != folder]
    classes = {name for _, name in found}
    if len(classes) < 2:
        raise ValueError(
            f"{folder} has pictures of {len(classes)} classes; expected at least two folders "
            f"{folder / 'CLASS'}/*.jpg, each named after its class"
        )
    return [path for path, _ in found], [name for _, name in found]


def read_query(sources: Sequence[Path]) -> tuple[list[Path], list[str | None]]:
    """Files as they are and the pictures of folders, each with the first folder below the source, if any."""
    paths: list[Path] = []
    folders: list[str | None] = []
    for source in sources:
        if not source.is_dir():
            paths.append(source)  # whatever it is called: it was asked for
            folders.append(None)
            continue
        for path in _pictures(source):
            paths.append(path)
            folders.append(None if path.parent == source else path.relative_to(source).parts[0])
    if not paths:
        raise FileNotFoundError(
            f"there are no pictures in {', '.join(map(str, sources))}; known endings are "
            f"{', '.join(PICTURES)}"
        )
    return paths, folders


def _pictures(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            Path(parent, name)
            for name in sorted(files)
            if name.lower().endswith(PICTURES) and not name.startswith(".")
        ]
    return found
