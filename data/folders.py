"""Pictures of one's own: a folder per class, or loose files. What is a picture, its content decides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Found:
    """Files that may be pictures, and what was left out.

    Attributes:
        paths: N files.
        folders: N names, of the first folder below the source that a file was found in, None for none.
        classes: the folders of a support set, whether or not they hold anything.
        left_out: hidden and misplaced files and folders, with why.
    """

    paths: list[Path] = field(default_factory=list)
    folders: list[str | None] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    left_out: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        """The classes `[N]` of a support set."""
        return [folder for folder in self.folders if folder is not None]


def read_support(folder: Path) -> Found:
    """All files `folder/<class>/**`, whatever their endings; hidden and loose ones are left out."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}; expected one with a folder of pictures per class"
        )
    found = Found(classes=sorted(path.name for path in folder.iterdir() if _is_class(path)))
    for path in _files(folder, found.left_out):
        if path.parent == folder:
            found.left_out.append((path, "not in a folder of a class"))
        else:
            found.paths.append(path)
            found.folders.append(path.relative_to(folder).parts[0])
    if len(found.classes) < 2:
        raise ValueError(
            f"{folder} has {len(found.classes)} folders; expected at least two, {folder / 'CLASS'}/*.jpg, "
            "each named after its class"
        )
    return found


def read_query(sources: Sequence[Path]) -> Found:
    """Files as they are and all files of folders; hidden ones are left out."""
    found = Found()
    for source in sources:
        for path in _files(source, found.left_out) if source.is_dir() else [source]:
            inside = None if path in (source, source / path.name) else path.relative_to(source).parts[0]
            found.paths.append(path)
            found.folders.append(inside)
    if not found.paths:
        raise FileNotFoundError(
            f"there are no pictures in {', '.join(map(str, sources))}; name another folder"
        )
    return found


def _is_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _files(folder: Path, left_out: list[tuple[Path, str]]) -> list[Path]:
    """The files below `folder`, in order; hidden ones go to `left_out`."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if name.startswith("."):
                left_out.append((Path(parent, name), "hidden"))
            else:
                found.append(Path(parent, name))
        left_out += [(Path(parent, name), "a hidden folder") for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]
        left_out += [(link, "a link to a folder, which may lead round in circles") for link in links]
    return found
