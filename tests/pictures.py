"""Small made-up data sets in the layouts of the real ones."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image


def picture(
    seed: int, size: tuple[int, int] = (84, 84), kind: str = "JPEG", colour: int | None = None
) -> bytes:
    """An encoded picture of smooth noise; `colour` 0, 1 or 2 makes that channel bright."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 120, (6, 6, 3), dtype=np.uint8)
    if colour is not None:
        coarse[..., colour] += 130
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(buffer, kind)
    return buffer.getvalue()


def make_mini_imagenet(root: Path, per_class: int = 2) -> Path:
    """100 classes in train.csv, val.csv and test.csv, `per_class` pictures each."""
    (root / "images").mkdir(parents=True)
    first = 0
    for table, classes in (("train", 64), ("val", 16), ("test", 20)):
        rows = ["filename,label"]
        for number in range(first, first + classes):
            for index in range(per_class):
                name = f"n{number:08d}{index:08d}.jpg"
                (root / "images" / name).write_bytes(picture(number * 100 + index))
                rows.append(f"{name},n{number:08d}")
        (root / f"{table}.csv").write_text("\n".join(rows) + "\n")
        first += classes
    return root


def make_cub(root: Path, per_class: int = 1) -> Path:
    """200 classes in the official layout."""
    classes = [f"{number + 1:03d}.Bird_{number}" for number in range(200)]
    images = [f"{name}/{name}_{index}.jpg" for name in classes for index in range(per_class)]
    for number, name in enumerate(images):
        path = root / "CUB_200_2011" / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, (50, 40)))
    for file, lines in (("classes.txt", classes), ("images.txt", images)):
        text = "".join(f"{number} {line}\n" for number, line in enumerate(lines, 1))
        (root / "CUB_200_2011" / file).write_text(text)
    return root


def make_folder(root: Path, splits: dict[str, int], per_class: int = 8, size: int = 24) -> Path:
    """`root/split/class/*.png`; the classes of a split differ by their bright colour channel."""
    for split, classes in splits.items():
        for number in range(classes):
            folder = root / split / f"{split}-{number}"
            folder.mkdir(parents=True)
            for index in range(per_class):
                content = picture(1000 * number + index, (size, size), "PNG", colour=number % 3)
                (folder / f"{index}.png").write_bytes(content)
    return root


def zipped(folder: Path, archive: Path) -> Path:
    """All files of `folder` in a zip file."""
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                file.write(path, path.relative_to(folder).as_posix())
    return archive
