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


def odd_pictures() -> tuple[dict[str, bytes], dict[str, tuple[bytes, str]]]:
    """Odd picture files that must be read, and hostile or broken ones with a word of why they are refused."""
    red = Image.new("RGB", (40, 30), (200, 30, 20))
    fine = {
        "grey.png": _saved(red.convert("L"), "PNG"),
        "bits.png": _saved(red.convert("1"), "PNG"),
        "cmyk.jpg": _saved(red.convert("CMYK"), "JPEG"),
        "palette.png": _saved(red.quantize(4), "PNG"),
        "palette-clear.gif": _saved(red.quantize(4), "GIF", transparency=0),
        "clear.png": _saved(red.convert("RGBA"), "PNG"),
        "deep.png": _saved(Image.fromarray(np.full((30, 40), 51_400, np.uint16)), "PNG"),
        "deep.tif": _saved(Image.fromarray(np.full((30, 40), 51_400, np.uint16)), "TIFF"),
        "moving.gif": _saved(red, "GIF", save_all=True, append_images=[Image.new("RGB", red.size, "blue")]),
        "moving.webp": _saved(red, "WEBP", save_all=True, append_images=[Image.new("RGB", red.size, "blue")]),
        "two-views.jpg": _saved(
            red, "MPO", save_all=True, append_images=[Image.new("RGB", red.size, "blue")]
        ),
        "turned.jpg": _saved(red, "JPEG", exif=_orientation(6)),
        "wild-exif.jpg": _saved(red, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xffjunk"),
        "thin.png": _saved(Image.new("L", (1, 60_000)), "PNG"),
        "dot.png": _saved(Image.new("RGB", (1, 1)), "PNG"),
    }
    refused = {
        "empty.jpg": (b"", "is empty"),
        "half.jpg": (picture(0)[:700], "damaged"),
        "text.jpg": (b"no picture at all", "no picture in a known format"),
        "program.png": (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
            "no picture in a known",
        ),
        "bomb.png": (_saved(Image.new("1", (20_000, 20_000)), "PNG"), "too many"),
        "big.png": (_saved(Image.new("1", (12_000, 12_000)), "PNG"), "12000 × 12000 pixels are too many"),
        "float.tif": (_saved(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"), "float values"),
    }
    return fine, refused


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def zipped(folder: Path, archive: Path) -> Path:
    """All files of `folder` in a zip file."""
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                file.write(path, path.relative_to(folder).as_posix())
    return archive
